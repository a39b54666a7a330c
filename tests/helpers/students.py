"""Students of polishing."""

import torch

from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.families.model import model_of
from kvfold.convert.training.student import Student

TOKENS = torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(0))


def student(folder, stored=torch.float32, autocast=None):
    """The student of a checkpoint whose attention, but for its norms, is trained."""
    checkpoint = open_checkpoint(folder)
    model = model_of(checkpoint.config)
    names = [name for layer in range(model.geometry.layers) for name in model.attention_names(layer)]
    trained = dict.fromkeys(names, stored)
    return Student(checkpoint.config, checkpoint.read, checkpoint.tensors, trained, torch.device("cpu"), autocast)

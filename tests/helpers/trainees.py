"""Trainees of polishing."""

import torch

from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.families.model import model_of
from kvfold.convert.training.polish import ModelTrainee

TOKENS = torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(0))


def trainee(folder, stored=torch.float32, change=lambda name, tensor: tensor):
    """The model of a checkpoint, its tensors changed, whose attention, but for its norms, is trained."""
    checkpoint = open_checkpoint(folder)
    model = model_of(checkpoint.config)
    names = [name for layer in range(model.geometry.layers) for name in model.attention_names(layer)]
    trained = dict.fromkeys(names, stored)

    def read(name):
        return change(name, checkpoint.read(name))

    return ModelTrainee(checkpoint.config, read, checkpoint.tensors, trained, torch.device("cpu"))

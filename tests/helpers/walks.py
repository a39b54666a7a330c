"""A tiny random llama and a student of it, for tests of the walk and of what is fitted on it."""

from types import SimpleNamespace

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvfold.convert.checkpoint.tensors import DTYPE_NAMES
from kvfold.convert.checkpoint.writer import PlannedTensor
from kvfold.convert.stream.checkpoint_stream import CheckpointStream
from kvfold.convert.walk.walk import Student, Teacher, Walk

LAYERS = 3
SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "tie_word_embeddings": False,
}


def run_stream(stream, tokens):
    """The logits ``[B, T, V]`` of a stream for ``tokens [B, T]``."""
    hidden = stream.embed(tokens)
    for index in range(stream.layers):
        with stream.open_layer(index) as layer, torch.no_grad():
            hidden = layer(hidden).hidden
    return stream.compute_logits(hidden)


class Case:
    """A source with four key/value heads and a student, unrelated in their attention weights; 7 or
    more sequences.
    """

    def __init__(self, kv_heads=2, dtype=torch.float32, sequences=7):
        torch.manual_seed(0)
        self.source, self.student = (
            LlamaForCausalLM(LlamaConfig(**SHAPE, num_key_value_heads=heads))
            .eval()
            .requires_grad_(False)
            for heads in (4, kv_heads)
        )
        for parameter in self.source.parameters():
            parameter += torch.randn_like(parameter) * 0.1
        self.stored = {name: tensor.clone() for name, tensor in self.source.state_dict().items()}
        shared = {name: tensor for name, tensor in self.stored.items() if "self_attn" not in name}
        self.new = {
            name: t.to(dtype)
            for name, t in self.student.state_dict().items()
            if "self_attn" in name
        }
        self.student.load_state_dict(shared | self.new)
        self.calibration, self.held_out = (
            torch.randint(0, 61, (sequences, 13)),
            torch.randint(0, 61, (5, 13)),
        )

    def stream(self):
        return CheckpointStream(self.source.config.to_dict(), self.stored.__getitem__, self.stored)

    def converted(self, source):
        planned = []
        for name, tensor in (self.student.state_dict() | self.new).items():
            copied = None if name in self.new else name
            planned.append(
                PlannedTensor(name, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), copied)
            )
        output = SimpleNamespace(
            config=self.student.config.to_dict(), tensors=planned, encode_layer=self.encode_layer
        )
        return Student(source, output)

    def encode_layer(self, index, weights):
        """The tensors of a layer; tests replace it."""
        raise NotImplementedError

    def layer(self, index):
        return {name: tensor for name, tensor in self.new.items() if f".layers.{index}." in name}

    def walk(self, **options):
        source = self.stream()
        return Walk(
            Teacher(source, self.held_out, self.calibration, **options), self.converted(source)
        )

    def run(self, walk):
        for step in walk:
            yield step
            step.advance_student(self.layer(step.index))

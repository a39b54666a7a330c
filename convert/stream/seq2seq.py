"""A checkpoint of an encoder-decoder as a stream of its decoder's attentions, one layer in memory at a time.

A sequence is the encoder's tokens and the decoder's behind them, always so many of each (``encoded``, and the rest).
Embedding it runs the encoder, whose layers are read as they are called; from then on its states go along before the
decoder's residual stream, and every half of a decoder layer (``attention/drift/halves.py``) is a layer::

    tokens [B, S + T] --> encoder's states [B, S, E], embeddings [B, T, E] --> half --> ... --> half --> logits of T
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers.modeling_outputs import BaseModelOutput

from kvfold.attention.checkpoints.registered import PREFIX, SEQ2SEQ, SPEECH
from kvfold.attention.drift.frame import Arguments, Frame
from kvfold.attention.drift.halves import Half, HalvesFrame
from kvfold.convert.io.checkpoint import Checkpoint
from kvfold.convert.stream.sound import synthetic_sound
from kvfold.convert.stream.stream import CheckpointStream


def stream_class(config: dict[str, Any]) -> type[CheckpointStream]:
    """The stream for checkpoints of ``config``."""
    kind = str(config.get("model_type")).removeprefix(PREFIX)
    if kind in SPEECH:
        return SpeechStream
    return Seq2SeqStream if kind in SEQ2SEQ else CheckpointStream


def checkpoint_stream(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, encoded: int = 0
) -> CheckpointStream:
    """A whole ``checkpoint`` as a stream; the first ``encoded`` tokens of a sequence are for an encoder."""
    stream = stream_class(checkpoint.config)
    return stream(checkpoint.config, checkpoint.read, list(checkpoint.tensors), device, dtype, encoded=encoded)


class Seq2SeqStream(CheckpointStream):
    """The ``LayerStream`` of an encoder-decoder with a head; the first ``encoded`` tokens are its encoder's."""

    _states: Tensor | None = None  # what stands for the encoder's states in recorded arguments

    def _framed(self, model: Any) -> Frame:
        if not hasattr(model, "get_output_embeddings") or model.get_output_embeddings() is None:
            raise ValueError(f"expected a model with a language-model head, found {type(model).__name__}")
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                module.padding_idx = None  # it must lie inside a table of which few rows are loaded
        self._encoder, self._decoder = model.get_encoder(), model.get_decoder()
        paths = {module: path for path, module in model.named_modules()}
        self._encoder_path, self._decoder_path = paths[self._encoder], paths[self._decoder]
        name, layers = next((n, m) for n, m in self._encoder.named_children() if isinstance(m, nn.ModuleList))
        self._encoder_layers = f"{self._encoder_path}.{name}."
        setattr(self._encoder, name, nn.ModuleList(_Read(layer, f"{paths[layer]}.", self) for layer in layers))
        return HalvesFrame(model, self._position_bias)

    @property
    def _layers(self) -> Sequence[nn.Module]:
        return self._halves

    @property
    def _halves(self) -> Sequence[Half]:
        assert isinstance(self._frame, HalvesFrame)  # of _framed
        return self._frame.halves

    @torch.no_grad()
    def embed(self, tokens: Tensor) -> Tensor:
        rows, local = torch.unique(tokens.to(self.device), return_inverse=True)
        table = self.parameters.rows(self._embedding, rows)
        names = self._names_under(self._encoder_path, self._encoder_layers)
        tensors = {name.removeprefix(f"{self._encoder_path}."): each for name, each in self._named(names).items()}
        states = self._states_of(tokens, local, tensors, table)
        ends = {**self._ends(head=False), f"{self._decoder_path}.embed_tokens.weight": table}
        given = {"encoder_outputs": BaseModelOutput(states), "decoder_input_ids": local[:, self.encoded :]}
        return torch.cat([states, self._enter(ends, **given)[0]], 1)

    def _states_of(self, tokens: Tensor, local: Tensor, tensors: dict[str, Tensor], table: Tensor) -> Tensor:
        """The encoder's states ``[B, S, E]``; ``local`` are the ``tokens [B, S + T]`` as rows of ``table``."""
        inputs = {"input_ids": local[:, : self.encoded]}
        states: Tensor = functional_call(self._encoder, {**tensors, "embed_tokens.weight": table}, (), inputs)[0]
        return states

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        blank = self._blank(hidden.shape[1]).expand(len(hidden), -1, -1)
        given = {"encoder_outputs": BaseModelOutput(blank[:, :1]), "decoder_inputs_embeds": blank}
        return self._frame.logits(hidden, self._ends(head=True), **given)

    def _enter_blank(self, tokens: int, **options: Any) -> tuple[Tensor, list[Arguments]]:
        states = self._blank(tokens if options else self.encoded)  # as many of both where caches are counted
        self._states = self._states if options else states
        given = {"encoder_outputs": BaseModelOutput(states), "decoder_inputs_embeds": self._blank(tokens)}
        hidden, arguments = self._enter(self._blank_ends(), **given, **options)
        return hidden, [each for each in arguments for _ in range(2)]  # of both halves

    def _arguments_of(self, index: int, hidden: Tensor) -> Arguments:
        """Those of a layer for states ``hidden [B, S + T, E]``: the encoder's stand in the place of recorded ones."""
        recorded, states = self.arguments(hidden.shape[1] - self.encoded)[index], hidden[:, : self.encoded]
        args = tuple(states if each is self._states else each for each in recorded.args)
        return Arguments(
            args, {name: states if each is self._states else each for name, each in recorded.kwargs.items()}
        )

    def _tensors_of(self, index: int) -> dict[str, Tensor]:
        prefix = self._prefix(index)
        return {name.removeprefix(prefix): tensor for name, tensor in self._named(self._half_names(index)).items()}

    def stored_names(self, index: int | None) -> list[str]:
        if index is None:
            raise ValueError("index: expected a layer of an encoder-decoder, found None")
        return [name for target in self._half_names(index) for name in self.parameters.map.source_of(target).names]

    def _half_names(self, index: int) -> list[str]:
        prefix, half = self._prefix(index), self._halves[index]
        inside = (name for name in self.parameters.map.expected if name.startswith(prefix))
        return [name for name in inside if half.owns(name.removeprefix(prefix))]

    def _prefix(self, index: int) -> str:
        return f"{self._frame.path}.{index // 2}."

    def _names_under(self, path: str, layers: str) -> list[str]:
        """Parameters and buffers beside the layers of a stack, but for the embeddings."""
        beside = (name for name in self.parameters.map.expected if name.startswith(f"{path}."))
        return [name for name in beside if not name.startswith((layers, f"{path}.embed_tokens."))]

    def _end_names(self, head: bool) -> list[str]:
        names = self._names_under(self._decoder_path, f"{self._frame.path}.")
        stacks = (f"{self._encoder_path}.", f"{self._decoder_path}.")
        others = [name for name in self.parameters.map.expected if not name.startswith(stacks)]
        return [*names, *(name for name in others if head and name != self._embedding)]

    def _ends(self, head: bool) -> dict[str, Tensor]:
        return self._named(self._end_names(head))

    def _named(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Parameters ``names``, and buffers, which are zeros where files hold none (Bart's bias of logits)."""
        weights, buffers = self.parameters.map, {name for name, _ in self.parameters.map.model.named_buffers()}
        absent = [name for name in names if name in buffers and name not in weights.sources]
        loaded = self.parameters.named(name for name in names if name not in absent)
        return loaded | {name: torch.zeros(weights.expected[name].shape, device=self.device) for name in absent}

    def _position_bias(self, tokens: int) -> Tensor:
        """T5's biases of the decoder's scores ``[1, H, T, T]``, which its first layer has."""
        bias: Tensor = self._first_attention.compute_bias(tokens, tokens, device=self.device)
        return bias

    @cached_property
    def _first_attention(self) -> Any:
        """The attention that has T5's biases, with these read."""
        first = self._halves[0]
        name = f"{self._prefix(0)}{first.attends_by}.relative_attention_bias.weight"
        table = self.parameters.load(self.parameters.map.source_of(name))[name]
        attention: Any = first.get_submodule(first.attends_by)
        attention.relative_attention_bias = nn.Embedding(len(table), table.shape[1], _weight=table, _freeze=True)
        return attention


class SpeechStream(Seq2SeqStream):
    """That of a model whose encoder hears: the first ``encoded`` tokens are the number of a synthetic sound."""

    def _states_of(self, tokens: Tensor, local: Tensor, tensors: dict[str, Tensor], table: Tensor) -> Tensor:
        encoder = self._encoder
        frames = self.encoded * encoder.conv1.stride[0] * encoder.conv2.stride[0]
        sound = synthetic_sound(tokens[:, 0], encoder.num_mel_bins, frames).to(self.device, self.dtype)
        states: Tensor = functional_call(encoder, tensors, (), {"input_features": sound})[0]
        return states


class _Read(nn.Module):
    """A layer of the encoder, whose parameters are read when it is called and dropped after."""

    def __init__(self, layer: nn.Module, prefix: str, stream: CheckpointStream) -> None:
        super().__init__()
        self._behind = (layer, prefix, stream)  # in a tuple, so that none becomes a submodule

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        layer, prefix, stream = self._behind
        sources = stream.parameters.map.under(prefix)
        made = {name: tensor for source in sources for name, tensor in stream.parameters.load(source).items()}
        return functional_call(layer, {name.removeprefix(prefix): each for name, each in made.items()}, args, kwargs)

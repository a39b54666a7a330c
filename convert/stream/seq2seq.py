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
from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.stream.sound import synthetic_sound
from kvfold.convert.stream.stream import CheckpointStream


def stream_class(config: dict[str, Any]) -> type[CheckpointStream]:
    """The stream for checkpoints of ``config``."""
    kind = str(config.get("model_type")).removeprefix(PREFIX)
    if kind in SPEECH:
        return SpeechStream
    return Seq2SeqStream if kind in SEQ2SEQ else CheckpointStream


def checkpoint_stream(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, encoded: int = 0, whole: bool = False
) -> CheckpointStream:
    """A ``checkpoint`` as a stream; the first ``encoded`` tokens of a sequence are for an encoder.

    ``whole``: the layers of the encoder (T5's) are layers of the stream too, its first.
    """
    stream = WholeStream if whole else stream_class(checkpoint.config)
    return stream(checkpoint.config, checkpoint.read, list(checkpoint.tensors), device, dtype, encoded=encoded)


class Seq2SeqStream(CheckpointStream):
    """The ``LayerStream`` of an encoder-decoder with a head; the first ``encoded`` tokens are its encoder's."""

    _states: Tensor | None = None  # what stands for the encoder's states in recorded arguments
    _blocks: Sequence[nn.Module] = ()  # layers of the encoder that are layers of the stream

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
        return [*self._blocks, *self._halves]

    @property
    def _caching(self) -> Sequence[nn.Module]:
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
        recorded = self.arguments(hidden.shape[1] - self.encoded)[index - len(self._blocks)]
        states = hidden[:, : self.encoded]
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
        prefix, half = self._prefix(index), self._halves[index - len(self._blocks)]
        inside = (name for name in self.parameters.map.expected if name.startswith(prefix))
        return [name for name in inside if half.owns(name.removeprefix(prefix))]

    def _prefix(self, index: int) -> str:
        return f"{self._frame.path}.{(index - len(self._blocks)) // 2}."

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
        return self._biased(len(self._blocks))

    def _biased(self, index: int) -> Any:
        """The attention of layer ``index``, which has T5's biases for all of its stack, with these read."""
        first: Any = self._layers[index]
        name = f"{self._prefix(index)}{first.attends_by}.relative_attention_bias.weight"
        table = self.parameters.load(self.parameters.map.source_of(name))[name]
        attention: Any = first.get_submodule(first.attends_by)
        attention.relative_attention_bias = nn.Embedding(len(table), table.shape[1], _weight=table, _freeze=True)
        return attention


class EncoderLayer(nn.Module):
    """A layer of T5's encoder as one of a stream; the last has the encoder's norm behind it."""

    of_encoder, attends_by = True, "layer.0.SelfAttention"

    def __init__(self, layer: nn.Module, norm: nn.Module | None) -> None:
        super().__init__()
        for name, child in layer.named_children():
            self.add_module(name, child)
        self.final_layer_norm = norm
        self._behind = (layer,)  # in a tuple, so that it does not become a submodule

    def forward(self, hidden: Tensor, bias: Tensor) -> Tensor:
        """``hidden [B, S, E]`` after the layer, with ``bias [1, H, S, S]`` of the scores."""
        after: Tensor = self._behind[0](hidden, None, bias)[0]
        return after if self.final_layer_norm is None else self.final_layer_norm(after)


class WholeStream(Seq2SeqStream):
    """That of T5 with the layers of its encoder, one after the other, before the halves of the decoder's."""

    def _framed(self, model: Any) -> Frame:
        encoder = model.get_encoder()
        blocks, norm = list(encoder.block), encoder.final_layer_norm
        self._blocks = [EncoderLayer(block, norm if block is blocks[-1] else None) for block in blocks]
        return super()._framed(model)

    @torch.no_grad()
    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings of both stacks: T5 has no others."""
        rows, local = torch.unique(tokens.to(self.device), return_inverse=True)
        return self.parameters.rows(self._embedding, rows)[local]

    def _arguments_of(self, index: int, hidden: Tensor) -> Arguments:
        if index >= len(self._blocks):
            return super()._arguments_of(index, hidden)
        bias = self._encoder_attention.compute_bias(self.encoded, self.encoded, device=self.device)
        return Arguments((bias,), {})

    @cached_property
    def _encoder_attention(self) -> Any:
        return self._biased(0)

    def _tensors_of(self, index: int) -> dict[str, Tensor]:
        ends = {} if index != len(self._blocks) - 1 else self._named([self._norm])
        return super()._tensors_of(index) | {name.removeprefix(f"{self._encoder_path}."): ends[name] for name in ends}

    @property
    def _norm(self) -> str:
        return f"{self._encoder_path}.final_layer_norm.weight"

    def _half_names(self, index: int) -> list[str]:
        if index >= len(self._blocks):
            return super()._half_names(index)
        return [name for name in self.parameters.map.expected if name.startswith(self._prefix(index))]

    def _prefix(self, index: int) -> str:
        return super()._prefix(index) if index >= len(self._blocks) else f"{self._encoder_layers}{index}."


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

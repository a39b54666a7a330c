"""A checkpoint as a stream of layers: any decoder that transformers knows, one layer in memory at a time.

The model is built from its config on the meta device, where it weighs nothing; the module itself never leaves it.
transformers' own forward, with every decoder layer replaced by a stand-in (``attention/drift/frame.py``), gives the
embeddings, the arguments of each layer and the logits. A layer runs with tensors that are read when it is opened and
dropped when it is closed. With a ``read`` that gives trainable tensors for some names, gradients reach them::

    loss <- LayerOutput <- functional_call(stock layer) <- parameters <- WeightMap.load <- read(name) <- float32 master

Every arrow is the way that loading the finished file will take: renaming, conversion, rounding to the stored dtype and
casting to the dtype of the computation. So what is trained is exactly what will be stored (``training/refine.py``).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kvfold.attention.drift.frame import Arguments, Frame, attention_name, cache_bytes_per_token
from kvfold.attention.drift.recording import OpenLayer
from kvfold.convert.errors import InputError
from kvfold.convert.stream.stock import empty_model, unusable
from kvfold.convert.stream.weights import Parameters, Read, WeightSource


class CheckpointStream:
    """The ``LayerStream`` of a checkpoint.

    ``config`` is config.json's content, ``read(name)`` gives a stored tensor and ``names`` are those there are. A
    converted model is the same class with its own config and a ``read`` that looks among the new tensors first.
    ``teacher`` is a stream over the same files: tensors that its open layer has in memory are shared, but for those
    named in ``changed``, which ``read`` gives otherwise; ``origins`` names what those are made of that ``read`` renames
    or puts together. Raises InputError for a config that transformers cannot build a decoder of.
    """

    def __init__(
        self,
        config: dict[str, Any],
        read: Read,
        names: Collection[str],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        teacher: "CheckpointStream | None" = None,
        changed: Collection[str] = (),
        origins: Mapping[str, Collection[str]] | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.dtype = dtype
        self.read = read
        self._config, self._names = config, names
        model = empty_model(config, dtype, self.device)
        shared = None if teacher is None else teacher.parameters
        self.parameters: Parameters = Parameters(model, read, names, self.device, dtype, shared, changed, origins)
        try:
            self._frame = Frame(model)
        except ValueError as error:
            raise InputError(f"config.json: {error}") from error
        self.layers = len(self._frame.layers)
        embedding = model.get_input_embeddings()
        self.vocabulary, self._width = map(int, embedding.weight.shape)
        self._embedding = next(f"{name}.weight" for name, module in model.named_modules() if module is embedding)
        self._recorded: tuple[int, list[Arguments]] | None = None

    @torch.no_grad()
    def embed(self, tokens: Tensor) -> Tensor:
        """``tokens [B, T]`` -> the first layer's input ``[B, T, E]``.

        Only the rows of tokens that occur are converted; the stored table stays for the next call until ``release``.
        """
        # A table of 256,000 tokens in float32 can be larger than all layers that are open at a time.
        rows, local = torch.unique(tokens.to(self.device), return_inverse=True)
        ends = self.parameters.named(self._end_names(head=False))
        tensors = {**ends, self._embedding: self.parameters.rows(self._embedding, rows)}
        return self._enter(tensors, input_ids=local)[0]

    @contextmanager
    def open_layer(self, index: int) -> Iterator[OpenLayer]:
        """Read a layer's tensors; they are dropped on leaving."""
        self.release()
        tensors = self.parameters.under(self._prefix(index))
        try:
            yield OpenLayer(index, self._frame.layers[index], partial(self._arguments_of, index), tensors)
        finally:
            tensors.clear()
            self.release()

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """The residual stream after the last layer ``[B, T, E]`` -> logits ``[B, T, V]``.

        The output head stays loaded until ``release``.
        """
        ends = self.parameters.named(self._end_names(head=True))
        with _blaming_config():
            blank = self._blank(hidden.shape[1]).expand(len(hidden), -1, -1)
            return self._frame.logits(hidden, ends, inputs_embeds=blank)

    def arguments(self, tokens: int) -> list[Arguments]:
        """The arguments of each layer beside the hidden states, for unpadded sequences of ``tokens``.

        Recorded for one sequence: masks and position embeddings broadcast over the batch.
        """
        if self._recorded is None or self._recorded[0] != tokens:
            self._recorded = (tokens, self._enter_blank(tokens)[1])
        return self._recorded[1]

    def _enter_blank(self, tokens: int, **options: Any) -> tuple[Tensor, list[Arguments]]:
        """The arguments of the layers for ``tokens`` of zeros.

        The parameters outside the layers, such as embeddings of positions, are zeros too: no argument depends on them.
        """
        ends = {name: self.parameters.map.expected[name] for name in self._end_names(head=False)}
        zeros = {
            name: torch.zeros_like(tensor, dtype=self.dtype, device=self.device)
            for name, tensor in ends.items()
            if tensor.is_floating_point()
        }
        return self._enter(zeros, inputs_embeds=self._blank(tokens), **options)

    def _arguments_of(self, index: int, hidden: Tensor) -> Arguments:
        """The arguments of a layer for ``hidden [B, T, E]``: biases of scores that do not broadcast (bloom) repeat."""
        recorded = self.arguments(hidden.shape[1])[index]
        biases = recorded.kwargs.get("alibi")
        if biases is None or biases.dim() != 3:  # [H, 1, T]
            return recorded
        return Arguments(recorded.args, {**recorded.kwargs, "alibi": biases.repeat(len(hidden), 1, 1)})

    def attention_sources(self, index: int) -> list[WeightSource]:
        """The sources of the parameters of a layer's attention."""
        name = attention_name(self._frame.layers[index])
        return self.parameters.map.under(f"{self._prefix(index)}{name}.")

    def reload(self, layer: OpenLayer, sources: Iterable[WeightSource]) -> None:
        """Make parameters of an open layer of the tensors that ``read`` gives now; gradients flow back to these."""
        prefix = self._prefix(layer.index)
        assert layer.tensors is not None  # as open_layer makes it
        for source in sources:
            made = self.parameters.load(source)
            layer.tensors.update({name.removeprefix(prefix): tensor for name, tensor in made.items()})

    def stored_names(self, index: int | None) -> list[str]:
        """The stored tensors of a layer, or for None of the model outside its layers."""
        inside = f"{self._frame.path}." if index is None else self._prefix(index)
        sources = self.parameters.map.sources.items()
        selected = [source for target, source in sources if target.startswith(inside) != (index is None)]
        return [name for source in selected for name in source.names]

    def release(self) -> None:
        """Drop all parameters that stay loaded between calls. Opening a layer does it too."""
        self.parameters.release()

    def cache_bytes_per_token(self) -> int:
        """Bytes that transformers' own cache grows by per token, all layers, with the model in its stored dtype.

        That is the dtype which transformers loads it in, whatever this stream computes in.
        """

        def enter(tokens: int) -> tuple[Tensor, list[Arguments]]:
            hidden, arguments = self._enter_blank(tokens, use_cache=True)
            return hidden.to("meta"), [Arguments(_to_meta(each.args), _to_meta(each.kwargs)) for each in arguments]

        # Counted in the cache that generation makes, on the meta device, so that no rule of a class is repeated here.
        total = cache_bytes_per_token(self._frame.layers, enter)
        name = self._config.get("dtype") or self._config.get("torch_dtype")
        stored = getattr(torch, str(name).removeprefix("torch."), self.dtype)
        return total * stored.itemsize // self.dtype.itemsize

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "CheckpointStream":
        """The same checkpoint, computed elsewhere or in another precision (and sharing no tensors with a teacher)."""
        device, dtype = self.device if device is None else device, self.dtype if dtype is None else dtype
        return type(self)(self._config, self.read, self._names, device, dtype)

    def _blank(self, tokens: int) -> Tensor:
        """A residual stream ``[1, T, E]`` of zeros."""
        return torch.zeros(1, tokens, self._width, dtype=self.dtype, device=self.device)

    def _prefix(self, index: int) -> str:
        return f"{self._frame.path}.{index}."

    @torch.no_grad()
    def _enter(self, tensors: dict[str, Tensor], **inputs: Any) -> tuple[Tensor, list[Arguments]]:
        with _blaming_config():
            return self._frame.enter(tensors, **inputs)

    def _end_names(self, head: bool) -> list[str]:
        """The decoder's parameters outside its layers but for the embeddings: with the output head, or without."""
        # Outside the base model is the head; inside it, but outside the decoder, are the towers of wrappers.
        base, decoder = f"{self._frame.model.base_model_prefix}.", f"{self._frame.path.rpartition('.')[0]}."
        outside = [name for name in self.parameters.map.expected if not name.startswith(f"{self._frame.path}.")]
        wanted = [name for name in outside if name.startswith(decoder) or (head and not name.startswith(base))]
        return [name for name in wanted if name != self._embedding]


@contextmanager
def _blaming_config() -> Iterator[None]:
    """Turns an error of the stock forward without its layers, which only the config can cause, into an InputError."""
    try:
        yield
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise InputError(unusable(error)) from error


def _to_meta(value: Any) -> Any:
    """``value`` with the tensors in it, also in tuples and dicts, on the meta device; a cache stays as it is."""
    if isinstance(value, Tensor):
        return value.to("meta")
    if isinstance(value, tuple):
        return tuple(_to_meta(item) for item in value)
    if isinstance(value, dict):
        return {key: _to_meta(item) for key, item in value.items()}
    return value

"""Run a checkpoint layer by layer: any decoder that transformers supports, with one layer in memory
at a time.

The model is built from its config on the meta device, where it uses no memory, and its modules stay
there. The forward pass of transformers, with every decoder layer replaced by a stand-in
(``attention/drift/streams.py``), computes the embeddings, the arguments of each layer and the
logits. A layer runs with tensors that are read when it is opened and dropped when it is closed. If
``read`` returns trainable tensors for some names, gradients reach them::

    loss <- LayerOutput <- functional_call(stock layer) <- parameters <- WeightMap.load_parameter
         <- read(name) <- float32 master

The arrows follow the steps of loading the finished file: renaming, conversion, rounding to the
stored dtype, and casting to the dtype of the computation. So refinement trains exactly what will be
stored (``training/refine.py``).
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.utils._pytree import tree_map_only

from kvfold.attention.cache_rounding import round_cache
from kvfold.attention.drift.recording import LayerArguments, OpenLayer, find_attention_name
from kvfold.attention.drift.streams import LayerlessModel, measure_cache_bytes_per_token
from kvfold.convert.errors import InputError
from kvfold.convert.families.layer_io import Read
from kvfold.convert.stream.parameters import WeightMap, WeightSource
from kvfold.convert.stream.stock import build_empty_model, errors_as_input_errors


class CheckpointStream:
    """A stock transformers model that runs layer by layer with the tensors of a checkpoint, of
    which only one layer is in memory at a time.

    ``config`` is the content of config.json, ``read(name)`` returns a stored tensor, and ``names``
    are all stored tensors' names. A converted model uses the same class with its own config and a
    ``read`` that looks among the new tensors first. ``teacher`` is a stream over the same files:
    tensors that its open layer has in memory are shared, except those in ``changed``, for which
    ``read`` returns other values; ``origins`` maps each name that ``read`` renames or combines to
    the stored tensors behind it. ``autocast`` is the dtype of matrix products in ``training``.
    ``rounding`` is that of the cache (`round_cache`). Raises InputError if transformers cannot
    build a decoder from the config.
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
        autocast: torch.dtype | None = None,
        rounding: str | None = None,
    ) -> None:
        """Build the model on the meta device and map its parameters to the stored tensors; no
        weight is read yet.
        """
        self.device = torch.device(device)
        self.dtype = dtype
        self.read = read
        self.autocast = autocast
        self._rounding = rounding
        self._config = config
        self._names = names
        self._teacher = teacher if teacher is not None and teacher.dtype == dtype else None
        self._changed = changed
        self._origins = origins or {}
        self._loaded: dict[WeightSource, Tensor] = {}
        self._table: Tensor | None = None
        self._head_dtype: torch.dtype | None = None
        model = build_empty_model(config, dtype, self.device)
        if rounding is not None:
            round_cache(model, rounding)
        self.weights = WeightMap(model, names)
        try:
            self._frame = LayerlessModel(model)
        except ValueError as error:
            raise InputError(
                f"config.json: the decoder layers of the model cannot be found: {error}"
            ) from error
        self.layers = len(self._frame.layers)
        self._embed_tokens = model.get_input_embeddings()
        self.vocabulary, self._width = map(int, self._embed_tokens.weight.shape)
        self._embedding = next(
            f"{name}.weight"
            for name, module in model.named_modules()
            if module is self._embed_tokens
        )
        # Outside the base model is the head; inside it, but outside the decoder, are the towers of
        # wrappers.
        base = f"{model.base_model_prefix}."
        decoder = f"{self._frame.path.rpartition('.')[0]}."
        layers = f"{self._frame.path}."
        outside = [name for name in self.weights.expected if not name.startswith(layers)]
        outside.remove(self._embedding)
        self._around = [name for name in outside if name.startswith(decoder)]
        self._head = [name for name in outside if not name.startswith(base)]
        self._recorded: dict[int, list[LayerArguments]] = {}  # by the number of tokens

    def release(self) -> None:
        """Free all parameters that stay in memory between calls: the embedding table, norms and
        output head. `open_layer` calls this too.
        """
        self._loaded.clear()
        self._table = None

    def use_training_precision(self) -> AbstractContextManager[Any]:
        """Return a context manager that runs matrix products in the autocast dtype, for calibration
        passes and training steps. If the stream has no autocast dtype, it changes nothing.
        """
        return torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None)

    @torch.no_grad()
    def embed(self, tokens: Tensor) -> Tensor:
        """Embed ``tokens [B, T]`` and return the first layer's input ``[B, T, E]``.

        Only the rows of tokens that occur are converted; the stored table stays in memory until
        ``release``.
        """
        # A table of 256,000 tokens in float32 can be larger than all layers that are open at a
        # time.
        rows, local = torch.unique(tokens.to(self.device), return_inverse=True)
        if self._table is None:
            self._table = self.read(self.weights.find_source(self._embedding).names[0])
        table = self._table[rows.to(self._table.device)].to(self.device, self.dtype)
        around = self._load_parameters(self._around)
        with errors_as_input_errors():
            # Idefics3 would move embeddings of its own to its first parameter's device: meta.
            embedded = functional_call(self._embed_tokens, {"weight": table}, local)
            return self._frame.run_to_first_layer(around, inputs_embeds=embedded)[0]

    @contextmanager
    def open_layer(self, index: int, stored: bool = False) -> Iterator[OpenLayer]:
        """Yield layer ``index`` with its tensors read from the checkpoint. They are freed when the
        with-block ends. With ``stored`` they keep their stored dtypes in memory, and are cast
        whenever the layer runs.
        """

        def make_arguments(hidden: Tensor) -> LayerArguments:
            """Return the arguments, such as rotary tables, that the model passes to this layer for
            ``hidden [B, T, E]``.
            """
            tokens = hidden.shape[1]
            if tokens not in self._recorded:
                self._recorded = {tokens: self._embed_zeros(tokens)[1]}
            recorded = self._recorded[tokens][index]
            biases = recorded.kwargs.get("alibi")
            if biases is None or biases.dim() != 3:
                return recorded
            # biases of scores [H, 1, T] (bloom) do not broadcast over the batch, all else does
            return LayerArguments(
                recorded.args, {**recorded.kwargs, "alibi": biases.repeat(len(hidden), 1, 1)}
            )

        self.release()
        prefix = f"{self._frame.path}.{index}."
        dtype = None if stored else self.dtype
        tensors = {
            source.target.removeprefix(prefix): self._load_source(source, dtype)
            for source in self.weights.find_sources(prefix)
        }
        try:
            yield OpenLayer(
                index,
                self._frame.layers[index],
                make_arguments,
                tensors,
                errors_as_input_errors,
                self.dtype if stored else None,
            )
        finally:
            tensors.clear()
            self.release()

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits ``[B, T, V]`` for the residual stream ``hidden [B, T, E]`` after the
        last layer.

        The output head stays in memory until ``release``; under autocast, its matrices in that
        dtype.
        """
        kind = self.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        if autocast != self._head_dtype:
            self.release()
        self._head_dtype = autocast
        ends = self._load_parameters([*self._around, *self._head])
        if autocast is not None:
            # Autocast would cast them again for each block of tokens.
            for source in map(self.weights.find_source, self._head):
                if self._loaded[source].dim() == 2:
                    self._loaded[source] = self._loaded[source].to(autocast)
            ends = self._load_parameters(ends)
        with errors_as_input_errors():
            hidden = hidden.to(self.device)
            blank = torch.zeros(1, *hidden.shape[1:], dtype=self.dtype, device=self.device)
            return self._frame.compute_logits(hidden, ends, inputs_embeds=blank.expand_as(hidden))

    @torch.no_grad()
    def _embed_zeros(self, tokens: int, **options: Any) -> tuple[Tensor, list[LayerArguments]]:
        """Run the model's input stage on one sequence of ``tokens`` zero embeddings. Returns the
        residual stream ``[1, T, E]`` and the arguments that each layer receives.

        Parameters outside the layers, such as position embeddings, are zeros too, because no
        argument depends on them.
        """
        expected = self.weights.expected
        zeros = {
            name: torch.zeros_like(expected[name], dtype=self.dtype, device=self.device)
            for name in self._around
            if expected[name].is_floating_point()
        }
        blank = torch.zeros(1, tokens, self._width, dtype=self.dtype, device=self.device)
        with errors_as_input_errors():
            return self._frame.run_to_first_layer(zeros, inputs_embeds=blank, **options)

    def _load_parameters(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the parameters ``names`` of the model, by name. A tied parameter is loaded from
        the one that it is tied to.
        """
        return {
            name: self._load_source(self.weights.find_source(name), self.dtype) for name in names
        }

    def _load_source(self, source: WeightSource, dtype: torch.dtype | None) -> Tensor:
        """Return the parameter formed from the stored tensors of ``source``, in ``dtype``; None is
        its own. It stays in memory until `release`. If the teacher has loaded the same parameter,
        it is shared.
        """
        if source not in self._loaded:
            shared = self._find_teacher_parameter(source)
            if shared is None:
                shared = self.weights.load_parameter(source, self.read, dtype, self.device)
            self._loaded[source] = shared
        return self._loaded[source]

    def _find_teacher_parameter(self, source: WeightSource) -> Tensor | None:
        """Return the parameter that the teacher's stream has loaded from the same unchanged tensors
        as ``source``, or None if there is none to share.
        """
        if self._teacher is None or any(name in self._changed for name in source.names):
            return None
        if self._teacher._head_dtype != self._head_dtype:
            return None
        # By names, not by contents: a stored tensor that the student renames or joins is still the
        # teacher's.
        origins = {origin for name in source.names for origin in self._origins.get(name, (name,))}
        shape = self.weights.expected[source.target].shape
        for other, tensor in self._teacher._loaded.items():
            same = other.target == source.target and origins == set(other.names)
            if same and tensor.shape == shape:
                return tensor
        return None

    def list_attention_sources(self, index: int) -> list[WeightSource]:
        """The sources of the parameters in a layer's attention."""
        name = find_attention_name(self._frame.layers[index])
        return self.weights.find_sources(f"{self._frame.path}.{index}.{name}.")

    @contextmanager
    def reload_parameters(
        self, layer: OpenLayer, sources: Iterable[WeightSource]
    ) -> Iterator[None]:
        """Load parameters of the open ``layer`` again, from the tensors that ``read`` returns now,
        and free them when the with-block ends. Gradients flow back to those tensors.
        """
        prefix = f"{self._frame.path}.{layer.index}."
        dtype = self.dtype if layer.dtype is None else None
        names = {source.target.removeprefix(prefix): source for source in sources}
        for name, source in names.items():
            layer.tensors[name] = self.weights.load_parameter(source, self.read, dtype, self.device)
        try:
            yield
        finally:
            for name in names:
                del layer.tensors[name]

    def list_stored_names(self, index: int | None) -> list[str]:
        """List the names of the stored tensors of layer ``index``, or of all tensors outside the
        layers if ``index`` is None.
        """
        prefix = f"{self._frame.path}." if index is None else f"{self._frame.path}.{index}."
        return [
            name
            for target, source in self.weights.sources.items()
            if target.startswith(prefix) != (index is None)
            for name in source.names
        ]

    def measure_cache_bytes_per_token(self) -> int:
        """Return the bytes per token that transformers' own KV cache takes over all layers, with
        the model in its stored dtype.

        The stored dtype is the one in which transformers loads the model, whatever dtype this
        stream computes in.
        """

        def embed_with_cache(count: int) -> tuple[Tensor, list[LayerArguments]]:
            """Return the residual stream and the layers' arguments, with a KV cache, for ``count``
            zero embeddings; all tensors are on the meta device.
            """
            hidden, arguments = self._embed_zeros(count, use_cache=True)
            calls = [(item.args, item.kwargs) for item in arguments]
            calls = tree_map_only(Tensor, lambda tensor: tensor.to("meta"), calls)
            return hidden.to("meta"), [LayerArguments(*call) for call in calls]

        # Counted in the cache that generation makes, on the meta device, so that no rule of a class
        # is repeated here.
        with errors_as_input_errors():
            total = measure_cache_bytes_per_token(self._frame.layers, embed_with_cache)
        if self._rounding is not None:
            return total
        name = self._config.get("dtype") or self._config.get("torch_dtype")
        stored = getattr(torch, str(name).removeprefix("torch."), self.dtype)
        return total * stored.itemsize // self.dtype.itemsize

    def to(
        self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> "CheckpointStream":
        """Return a new stream over the same checkpoint on ``device`` and in ``dtype``. It shares no
        tensors with a teacher.
        """
        return type(self)(
            self._config,
            self.read,
            self._names,
            device or self.device,
            dtype or self.dtype,
            rounding=self._rounding,
        )

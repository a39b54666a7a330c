"""A checkpoint as a stream of layers: any decoder that transformers knows, one layer in memory at a time.

The model is built from its config on the meta device, where it weighs nothing. transformers' own forward, with every
decoder layer replaced by a stand-in, gives the embeddings, the arguments that each layer is called with (position
embeddings, the mask of its layer type, ...) and the logits. A layer runs with tensors read when it is opened and
dropped when it is closed; the module itself never leaves the meta device.
"""

from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from kvfold.attention.drift.streams import LayerOutput
from kvfold.convert.errors import InputError
from kvfold.convert.stream.config_faults import unusable
from kvfold.convert.stream.recorder import recording
from kvfold.convert.stream.skeleton import (
    Arguments,
    StandIn,
    Stop,
    Visit,
    attention_of,
    cached_bytes,
    empty_model,
    layer_list,
)
from kvfold.convert.stream.weight_map import Read, Recipe, WeightMap

_OUTPUT_NAMES = ("o_proj", "dense", "out_proj", "c_proj")


class CheckpointStream:
    """The ``LayerStream`` of a checkpoint.

    ``config`` is config.json's content, ``read(name)`` gives a stored tensor and ``names`` are those there are. A
    converted model is the same class with its own config and a ``read`` that looks among the new tensors first.
    ``twin`` is a stream over the same files: tensors that its open layer has in memory and that ``read`` would give
    alike are shared; ``changed`` names the tensors that differ.
    """

    def __init__(
        self,
        config: dict[str, Any],
        read: Read,
        names: Collection[str],
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        twin: "CheckpointStream | None" = None,
        changed: Collection[str] = (),
    ) -> None:
        self.device = torch.device(device)
        self.dtype = dtype
        self.model = empty_model(config, dtype, self.device)
        self.weights = WeightMap(self.model, names)
        self._config, self._names = config, names
        self.read = read
        self._twin = twin
        self._changed = changed
        self._path, blocks = layer_list(self.model)
        self._blocks: list[nn.Module] = list(blocks)
        self._visit: Visit | None = None
        stand_ins = nn.ModuleList([StandIn(self._visited, index, block) for index, block in enumerate(self._blocks)])
        parent, _, child = self._path.rpartition(".")
        setattr(self.model.get_submodule(parent), child, stand_ins)
        self._arguments: tuple[int, list[Arguments]] | None = None
        self._loaded: dict[Recipe, dict[str, Tensor]] = {}
        self._table: Tensor | None = None

    @property
    def layers(self) -> int:
        return len(self._blocks)

    @torch.no_grad()
    def embed(self, tokens: Tensor) -> Tensor:
        """``tokens [B, T]`` -> the first layer's input ``[B, T, E]``.

        Only the rows of tokens that occur are converted; the stored table is kept for the next call until ``release``.
        """
        rows, local = torch.unique(tokens.to(self.device), return_inverse=True)
        name = self._embedding_name()
        if self._table is None:
            self._table = self._stored_table(name)
        ends = self._ends(head=False)
        ends[name] = self._table[rows.to(self._table.device)].to(self.device, self.dtype)

        def visit(index: int, hidden: Tensor, arguments: Arguments) -> Tensor:
            raise Stop(hidden)

        hidden: Tensor = self._forward(ends, visit, input_ids=local)
        return hidden

    @contextmanager
    def open_layer(self, index: int) -> Iterator["CheckpointLayer"]:
        """Read a layer's tensors; they are dropped on leaving."""
        self.release()
        layer = CheckpointLayer(self, index, self._blocks[index], self._layer_tensors(index))
        try:
            yield layer
        finally:
            layer.tensors.clear()
            self.release()

    def stored_names(self, index: int | None) -> list[str]:
        """The stored tensors that a layer is made of, or for None those outside the layers."""
        inside = f"{self._path}." if index is None else f"{self._path}.{index}."
        recipes = [
            recipe for target, recipe in self.weights.recipes.items() if target.startswith(inside) != (index is None)
        ]
        return [source for recipe in recipes for source in recipe.sources]

    def attention_recipes(self, index: int) -> list[Recipe]:
        """What makes the parameters of a layer's attention module."""
        block = self._blocks[index]
        attention = attention_of(block)
        path = next(path for path, module in block.named_modules() if module is attention)
        return self.weights.under(f"{self._path}.{index}.{path}.")

    def remake(self, layer: "CheckpointLayer", recipes: Iterable[Recipe]) -> None:
        """Make parameters of an open layer anew from what ``read`` gives now; gradients flow back to that."""
        prefix = f"{self._path}.{layer.index}."
        for recipe in recipes:
            made = self.weights.load(recipe, self.read, self.dtype, self.device)
            layer.tensors.update({name.removeprefix(prefix): tensor for name, tensor in made.items()})

    def release(self) -> None:
        """Drop whatever was kept between calls. Opening a layer does it too."""
        self._loaded.clear()
        self._table = None

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """The residual stream after the last layer ``[B, T, E]`` -> logits ``[B, T, V]``.

        The output head stays loaded until ``release``.
        """

        def visit(index: int, inputs: Tensor, arguments: Arguments) -> Tensor:
            return hidden if index == self.layers - 1 else inputs

        logits: Tensor = self._forward(self._ends(head=True), visit, inputs_embeds=hidden).logits
        return logits

    def cache_bytes_per_token(self) -> int:
        """Bytes that transformers' own cache grows by per token, all layers, with the model in its stored dtype.

        That is the dtype which transformers loads it in, whatever this stream computes in.
        """
        hidden = torch.empty(1, 2, self._width(), dtype=self.dtype, device="meta")
        held = cached_bytes(self.model.config, self._blocks, self.arguments(2), hidden) // 2
        name = self._config.get("dtype") or self._config.get("torch_dtype")
        stored = getattr(torch, str(name).removeprefix("torch."), self.dtype)
        return held * stored.itemsize // self.dtype.itemsize

    def to(self, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> "CheckpointStream":
        """The same checkpoint, computed elsewhere or in another precision (and sharing no tensors with a twin)."""
        device, dtype = self.device if device is None else device, self.dtype if dtype is None else dtype
        return CheckpointStream(self._config, self.read, self._names, device, dtype)

    def arguments(self, tokens: int) -> list[Arguments]:
        """What the stock model passes each layer beside the hidden states, for unpadded sequences of ``tokens``.

        Recorded for one sequence: masks and position embeddings broadcast over the batch.
        """
        if self._arguments is None or self._arguments[0] != tokens:
            recorded: list[Arguments] = []

            def visit(index: int, hidden: Tensor, arguments: Arguments) -> Tensor:
                recorded.append(arguments)
                if index == self.layers - 1:
                    raise Stop(hidden)
                return hidden

            blank = torch.zeros(1, tokens, self._width(), dtype=self.dtype, device=self.device)
            with torch.no_grad():
                self._forward({}, visit, inputs_embeds=blank)
            self._arguments = (tokens, recorded)
        return self._arguments[1]

    def _visited(self, index: int, hidden: Tensor, arguments: Arguments) -> Tensor:
        if self._visit is None:
            raise RuntimeError("a stand-in for a layer was called outside the stream's own forward")
        return self._visit(index, hidden, arguments)

    def _forward(self, tensors: dict[str, Tensor], visit: Visit, **inputs: Tensor) -> Any:
        self._visit = visit
        try:
            return functional_call(self.model, tensors, (), {**inputs, "use_cache": False}, strict=False)
        except Stop as stop:
            return stop.args[0]
        except (AttributeError, KeyError, TypeError, ValueError) as error:  # no layer runs here: it is the config
            raise InputError(unusable(error)) from error
        finally:
            self._visit = None

    def _layer_tensors(self, index: int) -> dict[str, Tensor]:
        prefix = f"{self._path}.{index}."
        tensors: dict[str, Tensor] = {}
        for recipe in self.weights.under(prefix):
            made = self._shared(recipe)
            if made is None:
                made = self.weights.load(recipe, self.read, self.dtype, self.device)
            self._loaded[recipe] = made
            tensors.update(made)
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}

    def _ends(self, head: bool) -> dict[str, Tensor]:
        """The parameters outside the layers but for the embeddings: with the output head, or without."""
        embedding = self._embedding_name()
        base = f"{self.model.base_model_prefix}."
        wanted = [
            name
            for name in self.weights.expected
            if not name.startswith(f"{self._path}.") and name != embedding and (head or name.startswith(base))
        ]
        tensors: dict[str, Tensor] = {}
        for name in wanted:
            recipe = self.weights.source_of(name)
            made = self._loaded.get(recipe) or self._shared(recipe)
            if made is None:
                made = self.weights.load(recipe, self.read, self.dtype, self.device)
            self._loaded[recipe] = made
            tensors[name] = made[recipe.target]
        return tensors

    def _shared(self, recipe: Recipe) -> dict[str, Tensor] | None:
        twin = self._twin
        if twin is None or twin.dtype != self.dtype or any(source in self._changed for source in recipe.sources):
            return None
        made = twin._loaded.get(recipe)
        if made is None or any(tensor.shape != self.weights.expected[name].shape for name, tensor in made.items()):
            return None
        return made

    def _stored_table(self, name: str) -> Tensor:
        recipe = self.weights.source_of(name)
        if recipe.converter is not None:
            raise InputError(
                f"{name} is stored in parts ({', '.join(recipe.sources[:3])}); embeddings must be one tensor"
            )
        return self.read(recipe.sources[0])

    def _embedding_name(self) -> str:
        embedding = self.model.get_input_embeddings()
        return next(f"{name}.weight" for name, module in self.model.named_modules() if module is embedding)

    def _width(self) -> int:
        return int(self.model.get_input_embeddings().weight.shape[1])


class CheckpointLayer:
    """One open layer. ``tensors`` are its parameters, named as in its module; replace them to run other weights."""

    def __init__(self, stream: CheckpointStream, index: int, module: nn.Module, tensors: dict[str, Tensor]) -> None:
        self.index = index
        self.module = module
        self.tensors = tensors
        self._stream = stream

    def __call__(self, hidden: Tensor) -> LayerOutput:
        """The whole layer on ``hidden [B, T, E]``."""
        return self._run(hidden, attention_only=False)

    def attend(self, hidden: Tensor) -> LayerOutput:
        """Only what comes before the attention module and the module itself: ``hidden`` of the result is None."""
        return self._run(hidden, attention_only=True)

    def _run(self, hidden: Tensor, attention_only: bool) -> LayerOutput:
        args, kwargs = self._stream.arguments(hidden.shape[1])[self.index]
        seen: dict[str, Tensor] = {}

        def before(module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            seen["input"] = named["hidden_states"] if "hidden_states" in named else inputs[0]

        def after(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            seen["output"] = output[0] if isinstance(output, tuple) else output
            if attention_only:
                raise Stop

        attention = attention_of(self.module)
        handles = [
            attention.register_forward_pre_hook(before, with_kwargs=True),
            attention.register_forward_hook(after),
        ]
        with recording() as call:
            try:
                result = functional_call(self.module, self.tensors, (hidden, *args), dict(kwargs))
            except Stop:
                result = None
            finally:
                for handle in handles:
                    handle.remove()
        return LayerOutput(
            hidden=result[0] if isinstance(result, tuple) else result,
            attention=seen["output"],
            attention_input=seen["input"],
            query=call.query,
            key=call.key,
            scale=call.scale,
            window=call.window,
            softcap=call.softcap,
            mixed=call.mixed,
            output_weight=self._output_weight(call.mixed),
        )

    def _output_weight(self, mixed: Tensor | None) -> Tensor | None:
        """The output projection by head, ``[E, H, Dv]``."""
        attention = attention_of(self.module)
        name = next((name for name in _OUTPUT_NAMES if isinstance(getattr(attention, name, None), nn.Linear)), None)
        if name is None or mixed is None:
            return None
        path = next(path for path, module in self.module.named_modules() if module is attention)
        weight = self.tensors[f"{path}.{name}.weight"]
        return weight.view(weight.shape[0], *mixed.shape[2:])

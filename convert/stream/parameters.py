"""Load the parameters of a stock transformers model from the tensors that a checkpoint stores.

Files and modules do not always agree: Mixtral files store one tensor per expert, but the module has
all experts in one. transformers defines the conversions as data (``conversion_mapping``); a
``WeightMap`` applies them to a few parameters at a time and reads only the tensors that these need,
whichever shards contain them::

    checkpoint's names --read--> stored tensors --converter--> parameter --dtype, device--> the
    module's tensor

Every step is differentiable, including ``read`` if it returns tensors that require gradients.
Refinement can therefore train the tensors of a file: gradients reach their float32 master copies by
the path that loading takes, in reverse.
"""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from kvfold.convert.checkpoint.headers import TensorInfo
from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.checkpoint.tensors import TORCH_DTYPES
from kvfold.convert.errors import InputError, list_some
from kvfold.convert.families.layer_io import Read
from kvfold.convert.stream.stock import (
    build_empty_model,
    choose_auto_class,
    describe_error,
    errors_as_input_errors,
    hide_progress_bars,
)


@dataclass(frozen=True)
class WeightSource:
    """The stored tensors that form one parameter of a model, in order, and the transformers
    converter that combines them, if any.

    ``converter`` is None if the file contains the parameter itself; ``patterns[i]`` is its pattern
    for ``names[i]``. Sources that form the same parameter from the same stored names are equal,
    even if their models differ.
    """

    target: str
    names: tuple[str, ...]
    patterns: tuple[str, ...] = ()
    converter: WeightConverter | None = field(default=None, compare=False)


class WeightMap:
    """A map from every parameter and persistent buffer of ``model`` to the stored tensors that form
    it; ``names`` are the names of all stored tensors.
    """

    def __init__(self, model: Any, names: Iterable[str]) -> None:
        """Find the stored tensors of each parameter by the renaming rules of transformers."""
        self.model = model
        self.expected: dict[str, Tensor] = dict(model.state_dict())
        tied = model.all_tied_weights_keys
        # files have either of two tied parameters
        self.tied: dict[str, str] = {**{source: target for target, source in tied.items()}, **tied}
        self.sources = _find_sources(model, self.expected, names)
        self._float32_modules = {
            *(model._keep_in_fp32_modules or ()),
            *(model._keep_in_fp32_modules_strict or ()),
        }

    def find_sources(self, prefix: str) -> list[WeightSource]:
        """Return the `WeightSource` of each parameter whose name begins with ``prefix``. Raises
        InputError if the checkpoint lacks one of their tensors.
        """
        inside = [target for target in self.expected if target.startswith(prefix)]
        missing = [
            target for target in inside if {target, self.tied.get(target)}.isdisjoint(self.sources)
        ]
        if missing:
            raise self._make_missing_error(missing)
        return [source for target, source in self.sources.items() if target.startswith(prefix)]

    def find_source(self, target: str) -> WeightSource:
        """Return the `WeightSource` of the parameter ``target``, or of the one that it is tied to.
        Raises InputError if the checkpoint has tensors for neither.
        """
        source = self.sources.get(target) or self.sources.get(self.tied.get(target, ""))
        if source is None:
            raise self._make_missing_error([target])
        return source

    def _make_missing_error(self, missing: list[str]) -> InputError:
        """Return the error that the checkpoint lacks tensors for the parameters ``missing``."""
        return InputError(
            f"the checkpoint lacks tensors for {len(missing)} parameters of"
            f" {type(self.model).__name__}; download the model again",
            missing,
        )

    def load_parameter(
        self,
        source: WeightSource,
        read: Read,
        dtype: torch.dtype | None,
        device: torch.device | str,
    ) -> Tensor:
        """Read the stored tensors of ``source`` and return the parameter that they form. Its shape
        is checked; a floating-point parameter is cast to ``dtype``, if it is not None.
        """
        if source.converter is None:
            tensor = read(source.names[0])
        else:
            converter = deepcopy(source.converter)
            for name, pattern in zip(source.names, source.patterns, strict=True):
                converter.add_tensor(source.target, name, pattern, read(name))
            (value,) = converter.convert(
                source.target, model=self.model, config=self.model.config
            ).values()
            tensor = value[0] if isinstance(value, list) else value
        expected = self.expected[source.target]
        if expected.shape != tensor.shape:
            raise InputError(
                f"the model's {source.target} has shape {list(expected.shape)} according to"
                f" config.json, but {list(tensor.shape)} according to the stored"
                f" {', '.join(source.names[:3])}; check that both are from the same model"
            )
        # As from_pretrained does with the modules that a class lists.
        if dtype is not None and not self._float32_modules.isdisjoint(source.target.split(".")):
            dtype = torch.float32
        # The next layer's tensors are read while a device still computes: nothing waits for these
        # to arrive.
        return tensor.to(device, dtype if tensor.is_floating_point() else None, non_blocking=True)

    def list_mismatches(self, stored: Mapping[str, TensorInfo]) -> list[str]:
        """Return one message for each parameter of the model that is missing from the tensors
        ``stored``, or has another shape there.
        """
        tensors = {
            name: torch.empty(info.shape, dtype=TORCH_DTYPES[info.dtype], device="meta")
            for name, info in stored.items()
        }
        problems = []
        try:
            self.find_sources("")
        except InputError as error:
            problems += [f"missing: {name}" for name in error.details]
        for source in self.sources.values():
            try:
                self.load_parameter(source, tensors.__getitem__, torch.float32, "meta")
            except InputError as error:
                problems.append(error.message.partition("; ")[0])
            # of a converter that joins what does not go together
            except (RuntimeError, ValueError, IndexError) as error:
                problems.append(
                    f"{', '.join(source.names[:3])}: cannot form {source.target}:"
                    f" {describe_error(error)}"
                )
        return problems

    def check_tensors_match(self, checkpoint: Checkpoint) -> None:
        """Raise InputError if tensors of ``checkpoint`` are missing, or have other shapes than the
        parameters of the stock model.
        """
        if problems := self.list_mismatches(checkpoint.tensors):
            raise InputError(
                f"{checkpoint.origin}: the tensors do not match config.json: {list_some(problems)};"
                " check that both are from the same model"
            )


def load_model(checkpoint: Checkpoint, dtype: torch.dtype, trust_remote_code: bool) -> Any:
    """Load a causal language model, or the multimodal wrapper around one, in ``dtype`` with
    from_pretrained. Raises InputError if its config does not fit its tensors.
    """
    # transformers leaves random numbers in the place of tensors that are missing, and only warns.
    foreign = trust_remote_code and "auto_map" in checkpoint.config
    if not foreign:
        WeightMap(build_empty_model(checkpoint.config), checkpoint.tensors).check_tensors_match(
            checkpoint
        )
    classes = choose_auto_class(checkpoint.config)
    options = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    if checkpoint.config.get("attn_logit_softcapping"):
        # Below 5.23 gemma2's default, torch's fused attention, leaves it out without a word.
        options["attn_implementation"] = "eager"
    with errors_as_input_errors(checkpoint.origin), hide_progress_bars():
        loaded = classes.from_pretrained(checkpoint.folder, **options)
        # Some values of a config, such as more experts per token than there are, show only when it
        # runs. Under FSDP, only the first process has weights.
        if not foreign and not any(parameter.is_meta for parameter in loaded.parameters()):
            with torch.no_grad():
                loaded(torch.zeros(1, 4, dtype=torch.long, device=loaded.device))
        return loaded


def _find_sources(
    model: Any, expected: dict[str, Tensor], names: Iterable[str]
) -> dict[str, WeightSource]:
    """Return the `WeightSource` of each parameter of ``model``, by parameter name. Raises
    InputError if several stored tensors claim the same parameter.
    """
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    # No supported model has a converter that splits a stored tensor into several parameters.
    converters = [
        entry
        for entry in mapping
        if isinstance(entry, WeightConverter) and len(entry.target_patterns) == 1
    ]
    by_pattern = {
        pattern: converter for converter in converters for pattern in converter.source_patterns
    }
    by_target: dict[str, dict[str, str | None]] = {}  # pattern by stored name
    # In natural order, as transformers sorts them: converters stack experts in the order in which
    # they come.
    for name in sorted(names, key=dot_natural_key):
        target, pattern = rename_source_key(
            name, renamings, converters, model.base_model_prefix, expected
        )
        if target not in expected and name in expected:
            target = name
            pattern = None
        if target in expected:
            by_target.setdefault(target, {})[name] = pattern
    sources = {}
    for target, stored in by_target.items():
        patterns = tuple(pattern for pattern in stored.values() if pattern is not None)
        if len(stored) > 1 and len(patterns) < len(stored):
            raise InputError(
                f"{len(stored)} stored tensors claim the same parameter, {target}:"
                f" {', '.join([*stored][:4])}; download the model again"
            )
        converter = by_pattern[patterns[0]] if patterns else None
        sources[target] = WeightSource(target, tuple(stored), patterns, converter)
    return sources

"""The memory and the disk space that polishing takes beyond a conversion's: it has the whole result in memory."""

from kvfold.convert.conversion.plan import Plan
from kvfold.convert.errors import InputError
from kvfold.convert.sizes import bytes_text

_BATCH_TOKENS = 1024
_MASTER = 4 + 4 + 8 + 4 + 4  # bytes per trained element: master, gradient, Adam's moments, rounded copies
_FROZEN = 4
_ACTIVATIONS = 68  # bytes per token, layer and model dim in float32 (Korthikanti et al., 2022: 34 in 16 bit)
_LOGITS = 8 * (24 << 20)  # bytes
_STATE = 4 + 8 + 4  # bytes per trained element on disk: master, moments, best weights


def check_memory(plan: Plan) -> None:
    """Raise InputError when the request asks for polishing and the model does not fit into memory."""
    if not plan.request.polish:
        return
    free, needed = _free_bytes(plan), polish_bytes(plan)
    if free is not None and needed > free:
        raise InputError(
            f"--polish trains all layers together and needs the whole model in memory: about {bytes_text(needed)} "
            f"({memory_parts(plan)}), found {bytes_text(free)} free; use a machine with more, or --refine alone, which "
            "holds one layer at a time"
        )


def memory_lines(plan: Plan) -> list[str]:
    """The line of ``--dry-run`` on memory, for a request that polishes."""
    if not plan.request.polish:
        return []
    free = _free_bytes(plan)
    found = "" if free is None else f", {bytes_text(free)} free"
    return [f"memory: about {bytes_text(polish_bytes(plan))} to polish ({memory_parts(plan)}){found}"]


def memory_parts(plan: Plan) -> str:
    """The parts of ``polish_bytes`` in words."""
    parts = _parts(plan)
    return ", ".join(f"{name} {bytes_text(size)}" for name, size in parts.items())


def polish_bytes(plan: Plan) -> int:
    """Bytes of memory at most, from the plan alone."""
    return sum(_parts(plan).values())


def scratch_bytes(plan: Plan) -> int:
    """Bytes on disk beside the output while a run that can be resumed polishes."""
    return _STATE * _elements(plan)[0] if plan.request.polish and plan.request.resume else 0


def _parts(plan: Plan) -> dict[str, int]:
    trained, frozen = _elements(plan)
    request, width = plan.request, plan.geometry.model_dim
    tokens = max(_BATCH_TOKENS, request.seq_len)
    text = request.samples * request.seq_len * width * 4
    return {
        "model": _FROZEN * frozen,
        "attention with its optimizer": _MASTER * trained,
        "activations": _ACTIVATIONS * tokens * plan.geometry.layers * width + _LOGITS,
        "the source's states": text,
    }


def _elements(plan: Plan) -> tuple[int, int]:
    """Elements of the result that are trained, and that are not."""
    from math import prod

    computed = {name for names in plan.layout.computed for name in names}
    sizes = {tensor.name: prod(tensor.shape) for tensor in plan.layout.tensors}
    trained = sum(size for name, size in sizes.items() if name in computed)
    return trained, sum(sizes.values()) - trained


def _free_bytes(plan: Plan) -> int | None:
    from kvfold.convert.device import choose_device, free_memory

    return free_memory(choose_device(plan.request.device))

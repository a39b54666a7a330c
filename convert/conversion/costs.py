"""What a conversion takes, from shapes alone: floating-point operations, bytes, memory and time. No torch here.

`kvfold plan` puts a machine's rates in; ``convert`` measures its own and prints the same estimate. Products count 2
operations. The measured runs that the constants are from, and the estimate beside them, are made by
``recipes/benchmarks/bench_costs.py``.
"""

import math
import re
from dataclasses import dataclass

from kvfold.convert.conversion.memory import output_bytes, polishing_bytes, state_bytes
from kvfold.convert.conversion.plan import Plan
from kvfold.convert.conversion.possible import latent_targets
from kvfold.convert.request import held_out_count
from kvfold.convert.training.budget import ROUND, sequences_of, steps_of

_STEP_SEQUENCES, _ROUND, _AUTO_STEPS, _TYPICAL_STEPS = 8, 50, 500, 350  # of refinement; auto ends after 325 to 350
_TRIAL_LAYERS, _TRIAL_TOKENS, _TRIAL_HELD_OUT, _FINALISTS, _TRIAL_STEPS = 4, 8192, 2048, 4, 20
_JUDGED, _JUDGMENTS = 2048, {"contiguous": 2, "similar": 7, "mla": 2}
# Fits of a layer, operations in float64: a E^3 + b E^2 (one thread of a Xeon at 50 GFLOPS, widths of 512 and 1024)
_FIT = {"contiguous": (80, 80_000), "similar": (190, 200_000), "mla": (250, 290_000)}
# The same for MLA from weights alone: 1.9 s of CPU a layer at a width of 1024, 13 s at 2048 (bench_costs.py --weights).
# A latent of queries is factored as well.
_FIT_OF_WEIGHTS = (70, 15_000)
_IN_LAYER = re.compile(r"\.\d+\.")
_WIDE = 8  # bytes of float64
# Bytes of a logit while next-token distributions are compared, up to 2^23 logits at once on a CPU. SmolLM2-135M (49152
# tokens) grew by 770 MB there, to 1.63 GB at the peak of the run: 12 numbers of 4 bytes say as much, 16 leave room.
_LOGITS, _LOGIT = 1 << 23, 16 * 4
# CPU of moving bytes: recipes/results/convert_llama2_7b.json has 35.8 s for 11.9 GB written, of which 11.6 s copy them,
# 13.9 s hash them, 3.8 s import torch; of the rest 3.7 s are other imports, 2.8 s pool heads.
_PER_BYTE, _START = (11.6 + 13.9 + 2.8) / 11.87e9, 3.8 + 3.7  # seconds
# Bytes of a run without text, beside the working set of a layer. Measured by bench_costs.py --weights: pooling 421 MB
# at a width of 256, 473 at 2048, 584 at 4096 (522 in that file); MLA 450 MB at 256, 692 at 1024, 1226 at 2048.
_BASE = 480 * 10**6


@dataclass(frozen=True)
class Work:
    """Operations of a run by what they are for. Fits are in float64; one process makes them, and polishes."""

    walk: float = 0.0
    statistics: float = 0.0
    fits: float = 0.0
    refinement: float = 0.0
    polishing: float = 0.0
    trials: float = 0.0
    trial_fits: float = 0.0


@dataclass(frozen=True)
class Machine:
    """Rates: operations per second of each of the ``processes``, of one processor in float64, bytes per second.

    ``training_flops`` are those of a process in training steps, which may compute in bfloat16; None: ``flops``.
    """

    processes: int
    flops: float
    fit_flops: float
    disk: float
    training_flops: float | None = None


@dataclass(frozen=True)
class Costs:
    """``read``, ``written`` in bytes by all processes together, ``memory`` in bytes at the peak of one.

    ``spilled`` are the bytes at the peak of the file in which ``--spill`` keeps hidden states, of one process.
    ``start`` are the seconds before a run that reads no text; a calibrated one makes its estimate behind them.
    """

    work: Work
    read: int
    written: int
    memory: int
    spilled: int
    start: float = 0.0

    def seconds(self, machine: Machine) -> dict[str, float]:
        """Seconds by what they are for."""
        work, all_flops = self.work, machine.processes * machine.flops
        wide = all_flops / 2  # float64 on units for float32
        training = machine.training_flops or machine.flops
        refining = min(machine.processes, _STEP_SEQUENCES) * training
        return {
            "forward passes": work.walk / all_flops + work.statistics / wide,
            "fitting": work.fits / machine.fit_flops,
            "refining": work.refinement / refining,
            "polishing": work.polishing / training,
            "comparing splits": work.trials / all_flops + work.trial_fits / machine.fit_flops,
            "copying and hashing": _PER_BYTE * self.written / machine.processes,
            "disk": (self.read + self.written) / machine.disk,
            "starting": self.start,
        }


def costs_of(plan: Plan, processes: int = 1, finished: int = 0) -> Costs:
    """What the conversion of ``plan`` takes when ``processes`` share it.

    Of the ``finished`` layers of an interrupted run, which is resumed, only the passes through them are left.
    """
    left, calibrated = plan.geometry.layers - finished, plan.request.calibrated
    work = _work(plan, left) if calibrated else _work_on_weights(plan, math.ceil(left / processes))
    source, out = _source_bytes(plan), sum(tensor.nbytes for tensor in plan.tensors)
    walks = (1 + (plan.request.to == "mla")) * processes if calibrated else 0
    read_back = out if calibrated else 0  # its loss is measured; hashes are made while writing
    spilled = state_bytes(plan, processes) if plan.request.spill is not None else 0
    read, start = source * (1 + walks) + read_back, 0.0 if calibrated else _START
    return Costs(work, read, out, _memory(plan, processes), spilled, start)


def layer_flops(plan: Plan, length: int) -> float:
    """Forward operations of a layer per token in sequences of ``length`` tokens."""
    return _attention_flops(plan, length) + 2 * _other_parameters(plan)


def _attention_flops(plan: Plan, length: int) -> float:
    shape = plan.geometry
    parameters = 2 * (shape.heads + shape.kv_heads) * shape.head_dim * shape.model_dim
    return 2 * parameters + 4 * shape.heads * shape.head_dim * length


def _other_parameters(plan: Plan) -> float:
    """Parameters of a layer beside its attention that a token meets; of experts those that it is sent to."""
    model, config = plan.model, plan.model.config
    experts = max(int(config.get(name) or 0) for name in ("num_local_experts", "num_experts", "n_routed_experts"))
    met = int(config.get("num_experts_per_tok") or 0) / experts if experts else 1.0
    attention = {name for layer in range(plan.geometry.layers) for name in model.attention_names(layer)}
    beside = [
        math.prod(tensor.shape) * (met if ".experts." in tensor.name else 1.0)
        for tensor in model.tensors.values()
        if _IN_LAYER.search(tensor.name) and tensor.name not in attention
    ]
    return sum(beside) / plan.geometry.layers


def _work(plan: Plan, left: int) -> Work:
    """Operations of a run with so many layers ``left`` to fit."""
    request, shape = plan.request, plan.geometry
    text, held_out = request.samples * request.seq_len, held_out_count(request.samples) * request.seq_len
    layer, attention = layer_flops(plan, request.seq_len), _attention_flops(plan, request.seq_len)
    latent, principal = request.to == "mla", request.resolved_method == "principal"
    keeps = principal or bool(request.refine)
    head = 2 * shape.model_dim * shape.vocabulary
    kind = "mla" if latent else (request.group or ("similar" if shape.kv_heads == shape.heads else "contiguous"))
    # Layers: the teacher, for MLA twice; the student where its inputs are kept; held-out text: teacher, student on both
    # inputs, reading back. The output's fit takes both through attention once more.
    full = text * (1 + latent * principal + keeps) + 4 * held_out
    again = 2 * (text + held_out) * principal + _JUDGMENTS[kind] * min(_JUDGED, held_out) * principal
    walk = shape.layers * full * layer + left * again * attention + 4 * held_out * head
    gram = 2 * shape.model_dim**2 * text * (5 / 8) * 2
    outputs = 3 * 2 * (shape.heads * shape.head_dim) ** 2 * (text + held_out)
    cubic, square = _FIT[kind]
    fit = cubic * shape.model_dim**3 + square * shape.model_dim**2
    return Work(
        walk=walk,
        statistics=shape.layers * principal * (gram + outputs),
        fits=left * fit * principal,
        refinement=left * _refinement(plan, _steps(plan), held_out),
        polishing=_polishing(plan, held_out) if request.polish else 0.0,
        **(_trials(plan, fit, layer) if request.budget is not None else {}),
    )


def _work_on_weights(plan: Plan, left: int) -> Work:
    """Operations of a process that reads no text and has ``left`` layers: pooling is a copy, factoring is not."""
    if plan.request.to != "mla":
        return Work()
    width, (cubic, square) = plan.geometry.model_dim, _FIT_OF_WEIGHTS
    latents = 1 if plan.request.q_rank is None else 2
    return Work(fits=left * latents * (cubic * width**3 + square * width**2))


def _steps(plan: Plan) -> int:
    return _TYPICAL_STEPS if plan.request.refine == "auto" else int(plan.request.refine)


def _refinement(plan: Plan, steps: int, held_out: int) -> float:
    """Operations of ``steps`` in one layer: forward and twice as much backward, and the error every 50 steps."""
    if not steps:
        return 0.0
    request, attention = plan.request, _attention_flops(plan, plan.request.seq_len)
    batch = min(_STEP_SEQUENCES, request.samples) * request.seq_len
    targets = request.samples * request.seq_len + 2 * held_out
    return attention * (3 * batch * steps + held_out * (2 + steps // _ROUND) + targets)


def _polishing(plan: Plan, held_out: int) -> float:
    """Operations of polishing: the source's states, its steps, and the error on ``held_out`` tokens every round.

    A step goes through the whole model forward and back, but only attention has gradients of its weights; the head is
    run on the source's states and the student's, and back. At the end source and student are compared once more.
    """
    request, shape = plan.request, plan.geometry
    model = shape.layers * layer_flops(plan, request.seq_len)
    head = 2 * shape.model_dim * shape.vocabulary
    step = 2 * model + shape.layers * _attention_flops(plan, request.seq_len) + 3 * head
    rounds = math.ceil(steps_of(request.polish) / ROUND) + 1
    text = sequences_of(request.polish, request.seq_len) * request.seq_len
    states = (max(request.samples * request.seq_len, text) + held_out) * model
    return states + text * step + rounds * held_out * (model + 2 * head) + held_out * (3 * model + 2 * head)


def _trials(plan: Plan, fit: float, layer: float) -> dict[str, float]:
    """Operations of comparing the splits of a budget: each converts a few layers, the best ones once more refined."""
    request, shape = plan.request, plan.geometry
    layers, splits = min(_TRIAL_LAYERS, shape.layers), len(latent_targets(request, plan.model))
    text = min(_TRIAL_TOKENS, request.samples * request.seq_len)
    held_out = min(_TRIAL_HELD_OUT, held_out_count(request.samples) * request.seq_len)
    finals = min(_FINALISTS, splits) if request.refine else 0
    passes = shape.layers * layer * (2 * text + 3 * held_out) + 4 * layers * text * _attention_flops(
        plan, request.seq_len
    )
    refined = finals * layers * _refinement(plan, _TRIAL_STEPS, held_out)
    return {"trials": (splits + finals) * passes + refined, "trial_fits": (splits + finals) * layers * fit}


def _source_bytes(plan: Plan) -> int:
    return sum(info.nbytes for info in plan.checkpoint.tensors.values())


def _pooling_bytes(plan: Plan) -> int:
    """Bytes of the layer whose heads are pooled: what is read of it as it is stored, and once more in float32."""
    read = [plan.checkpoint.tensors[name] for name in plan.read_names(0)]
    return sum(info.nbytes + 4 * math.prod(info.shape) for info in read)


def _memory(plan: Plan, processes: int) -> int:
    """Bytes at the peak of one process, on its device and beside it."""
    shape, request = plan.geometry, plan.request
    attention = 2 * (shape.heads + shape.kv_heads) * shape.head_dim * shape.model_dim
    fits = _WIDE * (12 * shape.model_dim**2 + 4 * attention)
    if not request.calibrated:
        return _BASE + (fits * 11 // 10 if request.to == "mla" else _pooling_bytes(plan))
    sizes = [math.prod(tensor.shape) for tensor in plan.model.tensors.values()]
    ends = 2 * shape.vocabulary * shape.model_dim
    layer = (sum(sizes) - ends) / shape.layers
    trained = 5 * attention if request.refine else 0
    states = state_bytes(plan, processes) + output_bytes(plan) if request.spill is None else 0
    logits = _LOGIT * min(_LOGITS, held_out_count(request.samples) * request.seq_len * shape.vocabulary)
    walking = states + max(fits + 4 * (max(2 * layer, ends) + trained), 4 * ends + logits)
    return int(10**9 + max(walking, polishing_bytes(plan) if request.polish else 0))

"""Judge a conversion by its measured loss in a few words, and suggest the next command.

The limits are those of SmolLM2-135M-Instruct in ``recipes/results/real_models.json``;
``docs/choosing.md`` shows them, ``docs/results.md`` the rows that they come from.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from kvfold.convert.conversion.plan import Plan, list_possible_kv_heads
from kvfold.convert.methods.registry import DEFAULT
from kvfold.convert.options import format_argv
from kvfold.convert.request import AUTO_LENGTH, EFFORTS, SELF, ConvertRequest
from kvfold.convert.targets.engines import (
    describe_mla_model,
    propose_mla_sizes_by_saving,
    propose_mla_sizes_with_kernels,
)
from kvfold.convert.text.corpus import parse_text_share
from kvfold.convert.training.budget import count_polish_steps

if TYPE_CHECKING:
    from kvfold.attention.drift.compare import DriftMeasurement
    from kvfold.attention.drift.report import DriftReport

NEAR = "near the source"
WORSE = "clearly worse than the source"
UNTRAINED = "needs training"
# Steps of the recommended uptraining: chosen, a fifth of the default.
_UPTRAIN = {"steps": 200}


class LossFigures(NamedTuple):
    """The three figures that decide the verdict on a converted model: excess loss, KL divergence
    and top-1 agreement with the source.

    excess: nats per token
    kl: nats per token
    agreement: share of tokens with the source's top-1
    """

    excess: float
    kl: float
    agreement: float


# The most that --effort normal left of the excess, the KL and the disagreement of fitted
# conversions (docs/choosing.md, "The verdict").
_LEFT = LossFigures(0.55, 0.67, 0.82)
# Refinement steps that auto counts for when efforts are compared: chosen, as in a thorough one.
_AUTO_REFINED = EFFORTS["thorough"]["refine"]
# Options of a run that its next command does not repeat.
_NOT_REPEATED = ("model", "out", "quiet", "fresh", "dry_run", "max_shard_size")

# The limits of the first two verdicts, between the rows of docs/results.md.
LIMITS = {NEAR: LossFigures(0.07, 0.12, 0.80), WORSE: LossFigures(0.25, 0.40, 0.65)}


def is_within(loss: "LossFigures | DriftMeasurement", limits: LossFigures) -> bool:
    """True if no figure of ``loss`` exceeds ``limits``. NaN exceeds every limit."""
    low = loss.excess <= limits.excess and loss.kl <= limits.kl
    return low and loss.agreement >= limits.agreement


def judge_drift(loss: "LossFigures | DriftMeasurement") -> str:
    """Return the verdict on a measured ``loss`` in words: the first in `LIMITS` that all figures
    meet, or else `UNTRAINED`.
    """
    for verdict, limits in LIMITS.items():
        if is_within(loss, limits):
            return verdict
    return UNTRAINED


def format_verdict(drift: "DriftReport") -> str:
    """Return the verdict in words, followed by ", uncertain" if the confidence interval of the
    excess loss contains a limit between two verdicts.
    """
    if drift.identical:
        return "identical to the source"
    margin = drift.excess_margin or 0.0
    doubtful = any(abs(drift.excess - limits.excess) < margin for limits in LIMITS.values())
    return f"{judge_drift(drift)}{', uncertain' * doubtful}"


def predict_loss_after_normal_effort(
    request: ConvertRequest, loss: "DriftMeasurement"
) -> LossFigures | None:
    """Return the most that ``--effort normal`` is expected to leave of the ``loss`` of a conversion
    that was only fitted; None if it was trained, or its method is not the default.
    """
    if request.refine or request.polish or request.resolved_method != DEFAULT:
        return None
    return LossFigures(
        excess=_LEFT.excess * loss.excess,
        kl=_LEFT.kl * loss.kl,
        agreement=1 - _LEFT.agreement * (1 - loss.agreement),
    )


def request_more_training(request: ConvertRequest) -> ConvertRequest | None:
    """Return ``request`` with the next ``--effort``: the first that trains more, and neither
    refines nor polishes less. None if there is none.
    """
    length = request.calibration_length
    refined = _AUTO_REFINED if request.refine == "auto" else int(request.refine)
    polished = count_polish_steps(request.polish, length)
    for name in ("normal", "thorough"):
        refinement = EFFORTS[name]["refine"] - refined
        polishing = count_polish_steps(EFFORTS[name]["polish"], length) - polished
        if min(refinement, polishing) >= 0 and refinement + polishing > 0:
            return replace(request, **EFFORTS[name])
    return None


def request_larger_cache(plan: Plan) -> ConvertRequest | None:
    """Return the request of ``plan`` with the next larger cache that saves something: more
    key/value heads, or a larger latent. None if there is none.
    """
    request = plan.request
    if plan.mla_spec is None:
        larger = [
            count for count in list_possible_kv_heads(plan.geometry) if count > plan.result.kv_heads
        ]
        return replace(request, to="gqa", kv_heads=larger[-1]) if larger else None
    cached = plan.result.count_cache_elements()
    layout = plan.mla_spec.layout
    specs = propose_mla_sizes_with_kernels(plan.model, (layout,))
    specs += propose_mla_sizes_by_saving(plan.model, layout)
    budgets = [describe_mla_model(plan.model, spec).count_cache_elements() for spec in specs]
    larger = [budget for budget in budgets if budget > cached]
    if not larger or not plan.method.reads_text:
        return None
    return replace(request, budget=min(larger), kv_rank=None, rope_dim=None)


def format_convert_command(request: ConvertRequest, exact: bool = False) -> list[str]:
    """Return the ``kvfold convert`` command line of ``request`` as a list of words; unless
    ``exact``, with at least the default amount of calibration text.
    """
    given = request.collect_non_defaults()
    left_out = set(_NOT_REPEATED)
    for name, options in EFFORTS.items():
        if options and options.items() <= given.items():
            given |= {"effort": name}
            left_out |= options.keys()
    tokens = request.samples * request.calibration_length
    if not exact and tokens <= ConvertRequest.samples * AUTO_LENGTH:
        left_out |= {"samples", "seq_len"}
    repeated = {name: value for name, value in given.items() if name not in left_out}
    return ["kvfold", "convert", request.model, request.out, *format_argv(repeated)]


def suggest_next_command(plan: Plan, drift: "DriftReport | None") -> list[str]:
    """Return the command line to run after a conversion, as a list of words.

    It measures a result that is near the source or not measured yet. Any other is converted again
    with more training (`request_more_training`), then with a larger cache
    (`request_larger_cache`); where none is left, it is trained further by ``kvfold uptrain``.
    """
    request = plan.request
    if drift is None or judge_drift(drift) == NEAR:
        rounding = ["--cache", request.cache] if request.cache else []
        return ["kvfold", "drift", request.model, request.out, *rounding]
    further = request_more_training(request) or request_larger_cache(plan)
    if further is not None:
        return format_convert_command(replace(further, overwrite=True))
    texts = [parse_text_share(text)[0] for text in request.calibration]
    text = next((name for name in texts if name != SELF), "FILE")
    trained = ["kvfold", "uptrain", request.out, f"{request.out}-trained"]
    return [*trained, "--teacher", request.model, "--text", text, *format_argv(_UPTRAIN)]

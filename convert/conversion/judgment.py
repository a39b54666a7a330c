"""The verdict on a conversion in words, and the command that improves its result most.

The limits are those of SmolLM2-135M-Instruct in ``recipes/results/real_models.json``; the tables in
``docs/choosing.md`` show them beside the rows that they come from.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from kvfold.convert.conversion.memory import estimate_needs, free_bytes
from kvfold.convert.conversion.plan import Plan, possible_kv_heads
from kvfold.convert.formatting import parse_tokens
from kvfold.convert.options import format_argv
from kvfold.convert.request import EFFORTS, SELF, ConvertRequest
from kvfold.convert.targets.engines import propose_budgets, propose_kernel_splits
from kvfold.convert.text.corpus import with_share
from kvfold.convert.training.budget import step_tokens, steps_of

if TYPE_CHECKING:
    from kvfold.attention.drift.report import DriftReport

NEAR = "near the source"
WORSE = "clearly worse than the source"
UNTRAINED = "needs training"
_THOROUGH = "thorough"
# Chosen: a batch of a quarter of the default, a few million tokens.
_UPTRAIN = {"steps": 200, "batch_tokens": 16384}


class Loss(NamedTuple):
    """What a result loses.

    excess: nats per token
    kl: nats per token
    agreement: share of tokens with the source's top-1
    """

    excess: float
    kl: float
    agreement: float


# The limits of the first two verdicts, between the rows of the table in docs/choosing.md.
LIMITS = {NEAR: Loss(0.07, 0.12, 0.80), WORSE: Loss(0.25, 0.40, 0.65)}
# The parts that `--refine auto --polish auto` leaves of each figure, and of the disagreement: the
# largest of three targets (same page).
LEFT = Loss(0.40, 0.60, 0.80)


def judge(loss: "Loss | DriftReport") -> str:
    """The verdict on ``loss``: the first whose limits no figure exceeds; NaN exceeds all."""
    for verdict, limits in LIMITS.items():
        within = loss.excess <= limits.excess and loss.kl <= limits.kl
        if within and loss.agreement >= limits.agreement:
            return verdict
    return UNTRAINED


def judge_with_doubt(drift: "DriftReport") -> str:
    """The verdict, followed by "uncertain" if the interval of the excess includes a limit."""
    if drift.identical:
        return "identical to the source"
    margin = drift.excess_margin or 0.0
    doubtful = any(abs(drift.excess - limits.excess) < margin for limits in LIMITS.values())
    return f"{judge(drift)}{', uncertain' * doubtful}"


def next_command(plan: Plan, drift: "Loss | DriftReport | None") -> list[str]:
    """The words of the command that helps most after a conversion with this ``drift``; it measures
    the result if that is near the source, or if nothing was measured.
    """
    request = plan.request
    verdict = None if drift is None else judge(drift)
    if drift is None or verdict == NEAR:
        return ["kvfold", "drift", request.model, request.out]
    polished = _polish_longer(plan, request)
    left = Loss(
        LEFT.excess * drift.excess,
        LEFT.kl * drift.kl,
        1 - LEFT.agreement * (1 - drift.agreement),
    )
    larger = larger_target(plan)
    if polished is not None and (judge(left) != verdict or larger is None):
        return [*_convert_words(polished, request.out), "--overwrite"]
    if larger is not None:
        return _convert_words(replace(request, **larger), f"{request.out}-larger")
    names = [with_share(text)[0] for text in request.calibration]
    text = next((name for name in names if name != SELF), "FILE")
    trained = f"{request.out}-trained"
    uptrain = ["kvfold", "uptrain", request.out, trained, "--teacher", request.model]
    return [*uptrain, "--text", text, *format_argv(_UPTRAIN)]


def larger_target(plan: Plan) -> dict[str, Any] | None:
    """The options of the next larger target of the same kind; None if only the source itself is
    larger.
    """
    if plan.latent is None:
        present = plan.request.kv_heads or 1
        larger = [heads for heads in possible_kv_heads(plan.geometry) if heads > present]
        return {"to": "gqa", "kv_heads": min(larger)} if larger else None
    targets = [
        *propose_budgets(plan.model, plan.latent.layout),
        *propose_kernel_splits(plan.model),
    ]
    sizes = [target.kv_rank + target.rope_dim for target in targets]
    larger = [size for size in sizes if size > plan.output.cache_elements]
    if not larger:
        return None
    options: dict[str, Any] = {"budget": min(larger), "kv_rank": None, "rope_dim": None}
    # Only text can tell how a budget is best split.
    return options if plan.request.chosen_method.reads_text else options | {"method": None}


def _polish_longer(plan: Plan, request: ConvertRequest) -> ConvertRequest | None:
    """The request with effort thorough; None if it polishes as long, or if the model does not fit
    in memory.
    """
    effort = EFFORTS[_THOROUGH]
    length = plan.request.length
    polished = steps_of(request.polish, length) * step_tokens(length) if request.polish else 0
    if polished >= (parse_tokens(effort["polish"]) or 0):
        return None
    free = free_bytes(plan)
    needed = estimate_needs(replace(plan, request=replace(plan.request, **effort))).memory
    return None if free is not None and needed > free else replace(request, **effort)


def _convert_words(request: ConvertRequest, out: str) -> list[str]:
    """The command of ``request`` that writes ``out``."""
    left_out = ("model", "out", "quiet", "fresh", "overwrite")
    given = {name: value for name, value in request.non_defaults().items() if name not in left_out}
    effort = EFFORTS[_THOROUGH]
    if effort.items() <= given.items():
        given = {name: value for name, value in given.items() if name not in effort}
        given["effort"] = _THOROUGH
    return ["kvfold", "convert", request.model, out, *format_argv(given)]

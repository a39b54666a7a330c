"""Judge a conversion by its measured loss in a few words, and suggest the next command.

The limits are those of SmolLM2-135M-Instruct in ``recipes/results/real_models.json``; the tables in
``docs/choosing.md`` show them beside the rows that they come from.
"""

from typing import TYPE_CHECKING, NamedTuple

from kvfold.convert.conversion.plan import Plan
from kvfold.convert.options import format_argv
from kvfold.convert.request import EFFORTS, SELF
from kvfold.convert.text.corpus import parse_text_share

if TYPE_CHECKING:
    from kvfold.attention.drift.report import DriftReport

NEAR = "near the source"
WORSE = "clearly worse than the source"
UNTRAINED = "needs training"
# Chosen: a batch of a quarter of the default, a few million tokens.
_UPTRAIN = {"steps": 200, "batch_tokens": 16384}


class Loss(NamedTuple):
    """The three figures that decide the verdict on a converted model: excess loss, KL divergence
    and top-1 agreement with the source.

    excess: nats per token
    kl: nats per token
    agreement: share of tokens with the source's top-1
    """

    excess: float
    kl: float
    agreement: float


# The limits of the first two verdicts, between the rows of the table in docs/choosing.md.
LIMITS = {NEAR: Loss(0.07, 0.12, 0.80), WORSE: Loss(0.25, 0.40, 0.65)}


def judge_drift(loss: "Loss | DriftReport") -> str:
    """Return the verdict on a measured ``loss`` in words: the best one in `LIMITS` whose limits no
    figure exceeds. NaN exceeds every limit.
    """
    for verdict, limits in LIMITS.items():
        within = loss.excess <= limits.excess and loss.kl <= limits.kl
        if within and loss.agreement >= limits.agreement:
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


def suggest_next_command(plan: Plan, drift: "DriftReport | None") -> list[str]:
    """Return the command line to run after a conversion, as a list of words. It measures a result
    that is near the source or not measured yet, and trains any other result.
    """
    request = plan.request
    if drift is None or judge_drift(drift) == NEAR:
        return ["kvfold", "drift", request.model, request.out]
    if not request.polish:
        replaced = ("model", "out", "quiet", "fresh", *EFFORTS["thorough"])
        given = {
            name: value
            for name, value in request.collect_non_defaults().items()
            if name not in replaced
        }
        given |= {"effort": "thorough", "overwrite": True}
        return ["kvfold", "convert", request.model, request.out, *format_argv(given)]
    texts = [parse_text_share(text)[0] for text in request.calibration]
    text = next((name for name in texts if name != SELF), "FILE")
    trained = ["kvfold", "uptrain", request.out, f"{request.out}-trained"]
    return [*trained, "--teacher", request.model, "--text", text, *format_argv(_UPTRAIN)]

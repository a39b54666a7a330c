"""The verdict on a conversion in words, and the command that improves its result most, with an
estimate of its time.

The limits and the gains are those of SmolLM2-135M-Instruct in ``recipes/results/real_models.json``;
the tables in ``docs/choosing.md`` show them beside the rows that they come from.
"""

import math
import shlex
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvfold.convert.conversion.memory import free_bytes, needs_of, writes_text
from kvfold.convert.conversion.plan import Plan, possible_kv_heads
from kvfold.convert.formatting import format_duration, parse_tokens
from kvfold.convert.options import to_argv
from kvfold.convert.request import AUTO_LENGTH, EFFORTS, SELF, ConvertRequest
from kvfold.convert.targets.engines import propose_budgets, propose_kernel_splits
from kvfold.convert.text.corpus import with_share
from kvfold.convert.training.budget import refining_batch, step_tokens, steps_of

if TYPE_CHECKING:
    from kvfold.attention.drift.report import DriftReport

NEAR = "near the source"
WORSE = "clearly worse than the source"
UNTRAINED = "needs training"
# the effort that is recommended, and the one that is told beside it
_MOST = "thorough"
_LESS = "normal"
# A polished token passes through the source, and through the result forward and, at twice the time,
# backward: derived, not measured. Held-out text is read in float32 from disk, so that the estimate
# is rather too long.
_PASSES = 4
# The time of refining all layers on one token of a batch, in polished tokens: 0.51 and 0.61 by the
# clock of the runs behind the rows "effort normal on both" of real_models.json (SmolLM2-135M,
# 2026-11-25).
_REFINED = 0.56
_UPTRAIN = {
    "steps": 200,
    "batch_tokens": 16384,
}  # chosen: a batch of a quarter of the default, a few million tokens


@dataclass(frozen=True)
class Loss:
    """What a result loses: ``excess`` and ``kl`` in nats per token, and the share of tokens with
    another top-1.
    """

    excess: float
    kl: float
    disagreement: float

    def within(self, limits: "Loss") -> bool:
        """True if no figure exceeds ``limits``; figures that are not finite do."""
        return all(
            mine <= most
            for mine, most in zip(vars(self).values(), vars(limits).values(), strict=True)
        )


# The limits of the first two verdicts, between the rows of the table in docs/choosing.md.
LIMITS = {NEAR: Loss(0.07, 0.12, 0.20), WORSE: Loss(0.25, 0.40, 0.35)}
# The parts that `--refine auto --polish auto` leaves of each figure: the largest of three targets
# (same page).
_LEFT = Loss(0.40, 0.60, 0.80)


@dataclass(frozen=True)
class NextStep:
    """A command, the reason for it, and the estimated ``seconds`` that it takes on this machine, if
    known.
    """

    command: str
    why: str
    seconds: float | None = None
    besides: str = ""  # what the estimate leaves out

    def to_text(self) -> str:
        """Two lines: why and how long, then the command."""
        time = (
            ""
            if self.seconds is None
            else f" (about {format_duration(self.seconds)} on this machine{self.besides})"
        )
        return f"next: {self.why}{time}:\n  {self.command}"


def loss_of(drift: "DriftReport") -> Loss:
    """The figures of ``drift`` that verdicts are about."""
    return Loss(drift.excess, drift.kl, 1 - drift.agreement)


def verdict_of(loss: Loss) -> str:
    """The verdict on ``loss``: the first whose limits no figure exceeds."""
    return next((verdict for verdict, limits in LIMITS.items() if loss.within(limits)), UNTRAINED)


def verdict_text(drift: "DriftReport") -> str:
    """One line with the verdict, its figures, and the limits that it keeps or those that it
    exceeds.
    """
    loss = loss_of(drift)
    verdict = verdict_of(loss)
    name = WORSE if verdict == UNTRAINED else NEAR
    limits = LIMITS[name]
    rules = {
        "excess": f"excess loss at most {limits.excess:g}",
        "kl": f"KL at most {limits.kl:g}",
        "disagreement": f"top-1 agreement at least {100 - 100 * limits.disagreement:.0f} %",
    }
    exceeded = [
        rule
        for figure, rule in rules.items()
        if not getattr(loss, figure) <= getattr(limits, figure)
    ]
    margin = drift.measured.excess_margin or 0.0
    doubtful = any(abs(loss.excess - each.excess) < margin for each in LIMITS.values())
    narrow = (
        f"; the 95 % interval of the excess, +-{margin:.3f}, includes a limit: more"
        f" --samples narrow it"
    )
    figures = (
        f"excess loss {loss.excess:+.3f} nats per token, KL {loss.kl:.3f} nats, top-1 agreement "
    )
    kept = (
        f"{'beyond' if exceeded else 'within'} the limits of '{name}':"
        f" {', '.join(exceeded or rules.values())}"
    )
    return (
        f"verdict: {verdict}{', uncertain' * doubtful}:"
        f" {figures}{100 - 100 * loss.disagreement:.2f} % ({kept}){narrow if doubtful else ''}"
    )


def next_step(
    plan: Plan, drift: "DriftReport", seconds: float, pass_seconds: float | None
) -> NextStep:
    """The command that helps most after a run of ``seconds``; ``pass_seconds`` of the result over
    the held-out text.
    """
    request = _asked(plan)
    loss = loss_of(drift)
    verdict = verdict_of(loss)
    if verdict == NEAR:
        compare = shlex.join(["kvfold", "drift", str(request.model), str(request.out)])
        return NextStep(f"{compare} --text FILE", "measure the drift on text of your own")
    per_token = (
        None if pass_seconds is None else _PASSES * pass_seconds / (drift.sequences * drift.length)
    )
    polish = _polishing(plan, seconds, per_token)
    left = Loss(
        *(mine * rest for mine, rest in zip(vars(loss).values(), vars(_LEFT).values(), strict=True))
    )
    if polish is not None and verdict_of(left) != verdict:
        return polish
    larger = larger_target(plan)
    if larger is not None:
        wide = replace(request, **larger)
        return NextStep(
            _again(wide, f"{request.out}-larger"),
            "convert to a larger cache, which loses less",
            seconds,
        )
    return polish or _uptraining(request, per_token)


def larger_target(plan: Plan) -> dict[str, Any] | None:
    """The options of the next larger target of the same kind; None if only the source itself is
    larger.
    """
    if plan.latent is not None:
        targets = [
            *propose_budgets(plan.model, plan.latent.layout),
            *propose_kernel_splits(plan.model),
        ]
        sizes = sorted({each.kv_rank + each.rope_dim for each in targets})
        size = next((size for size in sizes if size > plan.layout.cache_elements), None)
        if size is None:
            return None
        # Only text can tell how a budget is best split.
        without_text = {} if plan.request.chosen_method.reads_text else {"method": None}
        return {"budget": size, "kv_rank": None, "rope_dim": None, **without_text}
    kept = plan.request.kv_heads or 1
    heads = next(
        (heads for heads in reversed(possible_kv_heads(plan.geometry)) if heads > kept), None
    )
    return None if heads is None else {"to": "gqa", "kv_heads": heads}


def _polishing(plan: Plan, seconds: float, per_token: float | None) -> NextStep | None:
    """The same conversion, refined and polished; None if it was as long, or the model does not fit
    in memory.
    """
    request = _asked(plan)
    effort = EFFORTS[_MOST]
    length = plan.request.length
    wanted = parse_tokens(effort["polish"]) or 0
    done = steps_of(request.polish, length) * step_tokens(length) if request.polish else 0
    further = 0 if request.refine == "auto" else max(0, effort["refine"] - request.refine)
    # What was done for longer than the effort does it stays.
    refine = effort["refine"] if further else request.refine
    polish = effort["polish"] if done < wanted else request.polish
    effort = effort | {"refine": refine, "polish": polish}
    free = free_bytes(plan)
    needs = needs_of(replace(plan, request=replace(plan.request, **effort)))
    if (done >= wanted and not further) or (free is not None and needs.memory > free):
        return None
    step = _REFINED * refining_batch(length) * length
    if done:
        why = (
            "refine longer"
            if done >= wanted
            else "refine and polish longer"
            if further
            else "polish longer"
        )
    else:
        why = (
            "refine and polish, which left 0.1 to 0.55 of the excess loss of the conversions"
            " measured"
        )
        if per_token is not None and not request.refine:
            less = EFFORTS[_LESS]
            shorter = seconds + per_token * (
                step * less["refine"] + (parse_tokens(less["polish"]) or 0)
            )
            why += f"; --effort {_LESS} takes about {format_duration(shorter)}, --effort {_MOST}"
    written = ", plus the time to write further dialogues" if writes_text(plan) else ""
    time = (
        None
        if per_token is None
        else seconds + per_token * (step * further + max(0, wanted - done))
    )
    return NextStep(
        _again(replace(request, **effort), request.out, "--overwrite"), why, time, written
    )


def _asked(plan: Plan) -> ConvertRequest:
    """The request of ``plan`` with ``auto`` in place of the length and the number of sequences that
    it stands for.
    """
    request = plan.request
    asked = replace(
        request, samples=max(1, request.samples * request.length // AUTO_LENGTH), seq_len="auto"
    )
    return asked if asked.resolve_length(plan.geometry.positions) == request else request


def _uptraining(request: ConvertRequest, per_token: float | None) -> NextStep:
    text = next((name for name, _ in map(with_share, request.calibration) if name != SELF), "FILE")
    words = [
        "kvfold",
        "uptrain",
        request.out,
        f"{request.out}-trained",
        "--teacher",
        request.model,
        "--text",
        text,
    ]
    time = None if per_token is None else per_token * math.prod(_UPTRAIN.values())
    return NextStep(
        shlex.join([*words, *to_argv(_UPTRAIN)]), "train all weights against the source", time
    )


def _again(request: ConvertRequest, out: str, *flags: str) -> str:
    """The command of ``request`` that writes ``out``."""
    left_out = ("model", "out", "quiet", "fresh", "overwrite")
    given = {name: value for name, value in request.given().items() if name not in left_out}
    if EFFORTS[_MOST].items() <= given.items():
        given = {name: value for name, value in given.items() if name not in EFFORTS[_MOST]} | {
            "effort": _MOST
        }
    return shlex.join(["kvfold", "convert", request.model, out, *to_argv(given), *flags])

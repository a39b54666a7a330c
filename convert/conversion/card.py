"""Write the model card (README.md) of a converted checkpoint. It has no dates, timings or local
paths, so equal requests give equal bytes.

``card.md.jinja`` is its text. Its commands load, serve, measure, further train and reproduce the
checkpoint. They run in the card's folder and have no placeholders to fill in.
"""

import re
import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.attention.drift.metrics import make_position_rows
from kvfold.convert.checkpoint.files import CARD, read_checkpoint_file
from kvfold.convert.checkpoint.hub import HUB_ID
from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.conversion.judgment import LIMITS, NEAR, judge_drift
from kvfold.convert.conversion.plan import Plan
from kvfold.convert.conversion.record import describe_calibration_text
from kvfold.convert.conversion.results import format_losses_by_text
from kvfold.convert.errors import escape_text
from kvfold.convert.families.family import WRAPPERS
from kvfold.convert.limited_process import LimitedProcess
from kvfold.convert.options import collect_options, format_argv
from kvfold.convert.request import ConvertRequest
from kvfold.convert.text.corpus import parse_text_share

if TYPE_CHECKING:
    from kvfold.attention.drift.report import DriftReport

_CARD_SECONDS = 3.0


def render_model_card(plan: Plan, record: Mapping[str, Any], drift: "DriftReport | None") -> str:
    """Return the text of README.md for the converted checkpoint. ``record`` is the content of its
    ``kvfold.json``, ``drift`` its measured loss.
    """
    from jinja2 import Environment

    values: dict[str, Any] = {
        "plan": plan,
        "record": record,
        "drift": drift,
        "front": format_front_matter(plan.checkpoint),
        "source": format_source_name(plan),
        # `kvfold uptrain` trains a plain model that writes text.
        "wrapped": plan.checkpoint.config.get("model_type") in WRAPPERS,
        "command": _format_reproducing_command(plan),
    }
    if drift is not None:
        values |= {
            "positions": make_position_rows(drift),
            "text": describe_calibration_text(record["calibration"]["source"]),
            "by_text": format_losses_by_text(record),
            "verdict": judge_drift(drift),
            "near": LIMITS[NEAR],
        }
    environment = Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=escape_markdown_value,
    )
    template = (Path(__file__).parent / "card.md.jinja").read_text(encoding="utf-8")
    return environment.from_string(template).render(values)


def escape_markdown_value(value: object) -> object:
    """Return ``value`` made safe for one line of Markdown: line breaks, control characters and
    backticks in names from files are escaped. Values that are not strings stay as they are, and
    those with the template's filter ``safe``.
    """
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    return escape_text(value.replace("`", "'"))


def format_front_matter(source: Checkpoint) -> str:
    """Return the model card's metadata as YAML: the license and languages of ``source``, and its
    base model on the hub.
    """
    import yaml
    from huggingface_hub import ModelCardData
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    known: dict[str, Any] = {}
    # No card, or no YAML in it, whatever its parser raises, is no reason to stop a conversion.
    with suppress(Exception):
        block = REGEX_YAML_BLOCK.search(read_checkpoint_file(source.folder, CARD).decode())
        if block is not None:  # YAML takes a minute for a few megabytes
            known = dict(LimitedProcess(yaml.safe_load, _CARD_SECONDS).call(block[2]))

    def get_metadata_strings(name: str, pattern: str = "(?s).+") -> str | list[str] | None:
        """Return the string or list of strings under the metadata key ``name``, or None if a value
        is not a string or does not match ``pattern``.
        """
        value = known.get(name)
        entries = value if isinstance(value, list) else [value]
        texts = [text for text in entries if isinstance(text, str)]
        if not texts or not all(re.fullmatch(pattern, text) for text in texts):
            return None
        return value if isinstance(value, str) else texts

    # Trainers write the path on the machine that trained a model as its base.
    base = source.hub_id or get_metadata_strings("base_model", HUB_ID.pattern)
    wrapped = source.config.get("model_type") in WRAPPERS
    metadata = ModelCardData(
        base_model=base,
        # The other relations of the hub are adapter, merge and quantized.
        base_model_relation="finetune" if base else None,
        # The hub accepts codes of two or three letters, and two words.
        language=get_metadata_strings("language", "[a-z]{2,3}|code|multilingual"),
        library_name="transformers",
        pipeline_tag="image-text-to-text" if wrapped else "text-generation",
        tags=["kvfold"],
        **{
            name: get_metadata_strings(name) for name in ("license", "license_name", "license_link")
        },
    )
    return str(metadata.to_yaml())


def format_source_name(plan: Plan) -> str:
    """Return the source model's name, quoted for shell commands that run in the card's folder: its
    hub id with the commit, or the path ``../folder``.
    """
    name = plan.checkpoint.origin
    return shlex.quote(name if plan.checkpoint.hub_id else f"../{name}")


def _format_reproducing_command(plan: Plan) -> str:
    """Return the ``kvfold convert`` command that reproduces the checkpoint, with every option that
    affects the result and differs from its default.
    """
    specs = collect_options(ConvertRequest)
    changed = plan.request.collect_non_defaults()
    given = {name: value for name, value in changed.items() if not specs[name].runs}
    # Files by their names alone: no path of this machine is in the card.
    given["calibration"] = tuple(
        Path(text).name if Path(parse_text_share(text)[0]).exists() else text
        for text in plan.request.calibration
    )
    arguments = shlex.join(["converted", *format_argv(given)])
    return f"kvfold convert {format_source_name(plan)} {arguments}"


def render_trained_card(card: str, name: str, section: str) -> str:
    """Return the model card of a checkpoint after uptraining: ``section``, which describes the
    training, followed by the earlier ``card``. ``name`` is the title if the card has none.
    """
    front, title, rest = re.findall(r"\A(---\n.*?\n---\n)?\s*(#[^\n]*\n)?(.*)", card, re.DOTALL)[0]
    title = f"{title.rstrip()}, trained further" if title else f"# {name}"
    rest = rest.replace("| source | this checkpoint |", "| source | before the uptraining |")
    before = f"\n## Before the uptraining\n\n{rest.strip()}\n" if rest.strip() else ""
    return f"{front}\n{title}\n\n{section.strip()}\n{before}".lstrip("\n")

"""``kvfold inspect``: what a model caches, and what it can be converted to."""

import shutil
import textwrap
from typing import TYPE_CHECKING

import click

from kvfold.convert.console import STDOUT, check_files, print_result
from kvfold.convert.formatting import format_bytes, format_table

if TYPE_CHECKING:
    from kvfold.convert.measure.inspect import Inspection

_WIDEST = 100
_NO_BREAK = "\N{NO-BREAK SPACE}"
_NORMS = (
    "MLA replaces the norms on queries and keys with linear maps. The loss depends on how much the"
    " norms' divisors vary, which headers do not show; a conversion measures it on text"
    " (`head_norms` in kvfold.json)"
)


@click.command(short_help="Show MODEL's attention, its possible targets and their savings.")
@click.argument("model", required=False, metavar="MODEL")
@click.option(
    "--json",
    "json_file",
    is_flag=False,
    flag_value=STDOUT,
    metavar="[FILE|-]",
    help=(
        "Write the facts as JSON to FILE; without FILE, or with -, to stdout, with no other output"
        " there."
    ),
)
def inspect(model: str | None, json_file: str | None) -> None:
    """Show MODEL's attention kind, heads and cache bytes per token, and the targets it can be
    converted to.

    Only headers and the config are read, so the weights of a hub model are not downloaded.
    """
    from kvfold.convert.measure.inspect import inspect_checkpoint

    # In `--json MODEL`, click took MODEL for the optional file.
    if model is None:
        model = json_file
        json_file = STDOUT
    if model in (None, STDOUT):
        raise click.UsageError("missing argument 'MODEL'", click.get_current_context())
    check_files(json_file)
    inspection = inspect_checkpoint(str(model))
    print_result(json_file, inspection.to_dict, format_inspection(inspection))


def format_inspection(inspection: "Inspection") -> str:
    """The facts, then the targets, wrapped to the width of the terminal."""
    facts = _list_facts(inspection)
    label_width = max(map(len, facts))
    lines = [inspection.model]
    for label, text in facts.items():
        lines += _wrap(f"  {label.ljust(label_width)}  {text}", label_width + 4)
    return "\n".join([*lines, "", *_format_targets(inspection)])


def _wrap(line: str, indent: int) -> list[str]:
    width = min(_WIDEST, shutil.get_terminal_size().columns)
    lines = textwrap.wrap(
        line,
        width,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return [line.replace(_NO_BREAK, " ") for line in lines]


def _list_facts(inspection: "Inspection") -> dict[str, str]:
    attention = (
        f"{inspection.heads} query heads, {inspection.kv_heads} key/value heads, head dim"
        f" {inspection.head_dim}"
    )
    if inspection.attention == "MLA":
        attention = (
            f"{inspection.heads} heads over a latent of {inspection.kv_rank} and a rotary key of"
            f" {inspection.rotary_dims}"
        )
    layers = [str(inspection.layers), f"model dim {inspection.model_dim}"]
    layers.append(f"biases on {', '.join(inspection.biases)}" if inspection.biases else "no biases")
    if inspection.qk_norm:
        layers.append(f"{inspection.qk_norm} norm on queries and keys")
    rotary = "none"
    if inspection.rotary_dims:
        rotary = f"{inspection.rotary_dims} of {inspection.head_dim} dims, {inspection.rope}"
        if inspection.rotary_layers < inspection.layers:
            rotary += f", in {inspection.rotary_layers} of {inspection.layers} layers"
    parameters = f"{inspection.parameters / 1e6:.1f} M"
    if inspection.parameters >= 10**9:
        parameters = f"{inspection.parameters / 1e9:.2f} B"
    cache = inspection.cache
    by_context = [f"{format_bytes(size)} at {context}" for context, size in cache.bytes.items()]
    facts = {
        "family": f"{inspection.family} ({inspection.architecture})",
        "attention": f"{inspection.attention}: {attention}",
        "layers": ", ".join(layers),
        "rotary": rotary,
        "windows": ", ".join(map(str, inspection.windows)),
        "weights": (
            f"{parameters} parameters, {format_bytes(inspection.weight_bytes)} of"
            f" {inspection.dtype} in {inspection.files} file{'s' * (inspection.files > 1)}"
        ),
        "KV cache": (
            f"{cache.cache_elements} elements per token per layer,"
            f" {format_bytes(cache.bytes_per_token)} per token ({', '.join(by_context)})"
        ),
    }
    if inspection.head_norms:
        ranges = {}
        for name, (least, mean, most) in inspection.head_norms.items():
            spread = f"{100 * least:.1f} to {100 * most:.1f} %"
            ranges[name] = f"{spread} (mean over layers {100 * mean:.1f})"
        facts["norms"] = (
            f"divisors varied over the text by {ranges['query_spread']} for queries,"
            f" {ranges['key_spread']} for keys; linear maps lose {ranges['query_missed']} of the"
            f" queries, {ranges['key_missed']} of the keys"
        )
    for support in inspection.engines:
        facts[support.engine] = support.to_text().split(": ", 1)[1]
    return {label: text for label, text in facts.items() if text}


def _format_targets(inspection: "Inspection") -> list[str]:
    """A table of the targets, the engines that serve them, and a reason of each engine that does
    not.
    """
    if not inspection.targets:
        return ["  can become: nothing smaller"]
    rows = [("can become", "saves", "at 128k")]
    served: dict[str, list[str]] = {}
    refused: dict[str, str] = {}
    for target in inspection.targets:
        rows.append(
            (target.options, f"{100 * target.saves:.1f} %", format_bytes(target.bytes["128k"]))
        )
        names = []
        for support in target.engines:
            if support.serves:
                names.append(support.engine + "*" * (not support.ran))
            else:
                # The reasons of an engine are nearly the same for all targets.
                reason = f"{target.options}: {support.to_text()}"
                refused.setdefault(support.engine, reason)
        served.setdefault(", ".join(names) or "no engine", []).append(target.options)
    lines = [f"  {line}" for line in format_table(rows)]
    for reason in (inspection.latent or {}).get("because", ()):
        lines += _wrap(f"  not MLA: {reason}", 4)
    if inspection.qk_norm and any("--to mla" in target.options for target in inspection.targets):
        lines += _wrap(f"  {_NORMS}", 2)
    lines.append("")
    for engines, options in served.items():
        unbroken = (option.replace(" ", _NO_BREAK) for option in options)
        lines += _wrap(f"  served by {engines}: {'; '.join(unbroken)}", 4)
    if "*" in "".join(served):
        lines.append("  * according to the engine's source code; not run")
    for reason in refused.values():
        lines += _wrap(f"  {reason}", 4)
    return lines

"""``kvfold inspect``: what a model caches, and what it can be converted to."""

from typing import TYPE_CHECKING

import click

from kvfold.convert.console import STDOUT, print_result
from kvfold.convert.errors import list_some
from kvfold.convert.formatting import (
    count_columns,
    format_bytes,
    format_labeled_rows,
    format_table,
    wrap_text,
)
from kvfold.convert.targets.engines import ENGINE_LEGEND, name_serving_engines

if TYPE_CHECKING:
    from kvfold.convert.measure.inspect import Inspection


@click.command(short_help="Show MODEL's attention, its possible targets and their savings.")
@click.argument("model")
@click.option(
    "--json", "as_json", is_flag=True, help="Write the facts as JSON to stdout, the text to stderr."
)
def inspect(model: str, as_json: bool) -> None:
    """Show MODEL's attention kind, heads and cache bytes per token, and the targets it can be
    converted to.

    Only headers and the config are read, so the weights of a hub model are not downloaded.
    """
    from kvfold.convert.measure.inspect import inspect_checkpoint

    inspection = inspect_checkpoint(model)
    text = format_inspection(inspection)
    print_result(STDOUT if as_json else None, inspection.to_dict, text)


def format_inspection(inspection: "Inspection") -> str:
    """The inspection as text: facts about the model wrapped to the terminal's width, a table of
    targets, and the engines that serve them.
    """
    lines = [format_labeled_rows(_list_model_facts(inspection)), ""]
    if not inspection.targets:
        return "\n".join([*lines, "can become: nothing smaller"])
    formats = "/".join(inspection.cache.rounded)
    rows = [("can become", "saves", formats)]
    served: dict[str, list[str]] = {}
    for target in inspection.targets:
        saves = f"{100 * target.saves:.1f} %"
        sizes = ("-" if size is None else str(size) for size in target.rounded.values())
        rows.append((target.options, saves, "/".join(sizes)))
        served.setdefault(name_serving_engines(target.engines), []).append(target.options)
    lines += [*format_table(rows), f"{formats}: bytes per token per layer", ""]
    for engines, options in served.items():
        lines += wrap_text(f"served by {engines}:", count_columns())
        lines += [f"  {option}" for option in options]
    lines += wrap_text(f"{ENGINE_LEGEND}; --json has the reasons", count_columns())
    return "\n".join(lines)


def _list_model_facts(inspection: "Inspection") -> list[tuple[str, str]]:
    """The facts about the model as short phrases, such as its attention kind, heads and cache bytes
    per token.
    """
    heads = (
        f"{inspection.heads} query heads, {inspection.kv_heads} key/value heads, head dim"
        f" {inspection.head_dim}"
    )
    if inspection.attention == "MLA":
        heads = (
            f"{inspection.heads} heads over a latent of {inspection.kv_rank} and a rotary key of"
            f" {inspection.rotary_dims}"
        )
    layers = [str(inspection.layers), f"model dim {inspection.model_dim}"]
    layers.append(f"biases on {', '.join(inspection.biases)}" if inspection.biases else "no biases")
    if inspection.qk_norm:
        layers.append(f"{inspection.qk_norm} norm on queries and keys")
    reasons = list_some(inspection.not_stock)
    context = inspection.max_context
    cache = inspection.cache
    sizes = [f"{format_bytes(cache.bytes_per_token)} per token"]
    sizes += [f"{format_bytes(size)} at {context}" for context, size in cache.bytes.items()]
    rounded = [f"{size} in {name}" for name, size in cache.rounded.items() if size is not None]
    return [
        ("model", inspection.model),
        ("family", f"{inspection.family} ({inspection.architecture})"),
        ("heads", f"{inspection.attention}: {heads}"),
        ("layers", ", ".join(layers)),
        (
            "rotary",
            f"{inspection.rotary_dims} of {inspection.head_dim} dims in"
            f" {inspection.rotary_layers} layers, {inspection.rope}",
        ),
        ("context", f"{context} tokens" if context else ""),
        ("windows", ", ".join(map(str, inspection.windows))),
        (
            "weights",
            f"{inspection.parameters / 1e6:,.1f} M parameters,"
            f" {format_bytes(inspection.weight_bytes)} of {inspection.dtype}",
        ),
        (
            "cache",
            f"{cache.cache_elements} elements per token per layer, {', '.join(sizes)}",
        ),
        ("rounded", f"bytes per token per layer: {', '.join(rounded)}"),
        *(("warning", note) for note in inspection.notes),
        *(("no MLA", reason) for reason in inspection.not_mla),
        ("MLA", reasons and f"in layout kvfold, because no stock MLA class has {reasons}"),
        *(("engines", support.to_text()) for support in inspection.engines),
    ]

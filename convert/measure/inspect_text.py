"""The facts of an inspection as lines for the terminal."""

from kvfold.convert.measure.inspect import Inspection
from kvfold.convert.measure.norms import norm_lines
from kvfold.convert.measure.target_sizes import CONTEXTS
from kvfold.convert.sizes import bytes_text


def summary(facts: Inspection) -> str:
    """The facts as lines for the terminal."""
    heads = f"{facts.heads} query heads, {facts.kv_heads} key/value heads, head dim {facts.head_dim}"
    if facts.attention == "MLA":
        heads = f"{facts.heads} heads over a latent of {facts.kv_rank} and a rotary key of {facts.rotary_dims}"
    extras = [f"biases on {', '.join(facts.biases)}"] if facts.biases else ["no biases"]
    extras += [f"{facts.qk_norm} norm on queries and keys"] if facts.qk_norm else []
    rotary = f"{facts.rotary_dims} of {facts.head_dim} dims, {facts.rope}"
    if not facts.rotary_dims:
        rotary = "none"
    elif facts.rotary_layers < facts.layers:
        rotary += f", in {facts.rotary_layers} of {facts.layers} layers"
    rows = {
        "family": f"{facts.family} ({facts.architecture})",
        "attention": f"{facts.attention}: {heads}",
        "layers": f"{facts.layers}, model dim {facts.model_dim}, {', '.join(extras)}",
        "rotary": rotary,
        **({"windows": ", ".join(map(str, facts.windows))} if facts.windows else {}),
        "weights": f"{_count(facts.parameters)} parameters, {bytes_text(facts.weight_bytes)} "
        f"of {facts.dtype} in {facts.files} file{'s' if facts.files > 1 else ''}",
        "KV cache": _cache_text(facts),
    }
    if facts.head_norms:
        rows |= dict(zip(("norms", "norms lost"), norm_lines(facts.head_norms), strict=True))
    rows |= {verdict.engine: verdict.to_text().split(": ", 1)[1] for verdict in facts.engines}
    width = max(map(len, rows))
    lines = [facts.model, *(f"  {name:{width}}  {text}" for name, text in rows.items())]
    return "\n".join([*lines, "", *_target_lines(facts)])


def _target_lines(facts: Inspection) -> list[str]:
    if not facts.targets:
        return ["can become: nothing smaller"]
    width = max(24, *(len(target.options) for target in facts.targets))
    heading = f"  {'can become':{width}}  {'saves':>7}  {'per token':>10}"
    heading += "".join(f"  {'at ' + context:>10}" for context in CONTEXTS) + "  served by"
    rows = [
        f"  {target.options:{width}}  {100 * target.saves:5.1f} %  {bytes_text(target.bytes_per_token):>10}"
        + "".join(f"  {bytes_text(size):>10}" for size in target.bytes.values())
        + f"  {target.served_by}"
        for target in facts.targets
    ]
    rows += [f"  not MLA: {reason}" for reason in (facts.latent.because if facts.latent else ())]
    if facts.qk_norm and any("--to mla" in target.options for target in facts.targets):
        rows += [
            "  MLA has linear maps in place of the norms on queries and keys. What these lose depends on how much the "
            "norms' divisors vary,",
            "  which headers do not show: a conversion measures it on text (`head_norms` in kvfold.json)",
        ]
    read = any("*" in target.served_by for target in facts.targets)
    rows += ["  * by the sources of this engine, not run"] if read else []
    return [heading, *rows, *_rank_lines(facts, width), *_refusals(facts)]


def _refusals(facts: Inspection) -> list[str]:
    """Why an engine does not serve a target, once for each engine."""
    first: dict[str, str] = {}
    for target in facts.targets:
        for verdict in target.engines:
            if not verdict.serves:
                first.setdefault(verdict.engine, f"  {target.options}: {verdict.to_text()}")
    return ["", *first.values()] if first else []


def _rank_lines(facts: Inspection, width: int) -> list[str]:
    """Elements on each tensor-parallel rank: heads are shared out, a latent is whole on every rank."""
    targets, ranks = {target.options: target for target in facts.targets}, list(facts.cache.per_rank)
    if len(ranks) == 1:
        return ["", "  tensor parallelism: the heads divide among no number of ranks but 1"]
    heading = f"  {'elements on each of N ranks':{width}}" + "".join(f"  {f'N = {n}':>7}" for n in ranks)
    rows = [
        f"  {name:{width}}" + "".join(f"  {cache.per_rank.get(n, '-'):>7}" for n in ranks)
        for name, cache in {"now": facts.cache, **targets}.items()
    ]
    return ["", heading + "  (tensor parallelism: a latent is whole on every rank)", *rows]


def _cache_text(facts: Inspection) -> str:
    cache = facts.cache
    sizes = ", ".join(f"{bytes_text(size)} at {context}" for context, size in cache.bytes.items())
    elements = f"{cache.numbers_per_token_and_layer} elements per token per layer"
    return f"{elements}, {bytes_text(cache.bytes_per_token)} per token ({sizes})"


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B" if parameters >= 10**9 else f"{parameters / 1e6:.1f} M"

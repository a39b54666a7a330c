"""What engines look at in a result, from a config or a request alone; without torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvfold.convert.families.geometry import Geometry
from kvfold.convert.families.model import Model
from kvfold.convert.families.rotary import older_rope_keys
from kvfold.convert.families.wrappers import WRAPPERS
from kvfold.convert.targets.mla.config import EXPERT_TYPE, LatentTarget, cached_divisors, changes_no_frequency

RANKS = (1, 2, 4, 8)  # of tensor parallelism


@dataclass(frozen=True)
class Result:
    """What engines look at. A fold has ``kv_heads`` of ``head_dim`` dims; MLA has a split, and heads as stored.

    ``family`` is the ``model_type`` of a fold, or of the wrapper around a latent model. ``older_rope``: the config has
    ``rope_theta`` beside ``rope_parameters``, as before transformers 5, or does not need it. ``lite``: llama.cpp
    expects queries without a latent. ``yarn``: plain RoPE is spelled as YaRN of factor 1, which layout engine was not
    always.
    ``experts``: a latent model with experts, a Mistral4. ``kept``: weights outside the attention are FP8 or MXFP4.
    ``own`` brings its modeling code along. ``biased`` is a DeepSeek model with attention biases or scaled RoPE, as
    kvfold wrote it once: no result any more.
    """

    kind: Literal["fold", "free", "engine", "own", "biased"]
    layers: int
    query_heads: int
    kv_heads: int = 0
    head_dim: int = 0
    split: tuple[int, int] = (0, 0)  # R, P
    divisors: int = 0  # cached beside them
    heads: tuple[int, int, int] = (0, 0, 0)  # unrotated, rotary and value dims
    q_rank: int | None = None
    family: str = ""
    older_rope: bool = True
    vocabulary: int = 0
    yarn: bool = True
    experts: bool = False
    kept: bool = False

    @property
    def lite(self) -> bool:
        return self.layers in (26, 27) or (self.layers, self.vocabulary) == (48, 128256)

    def elements(self, ranks: int = 1) -> int:
        """KV-cache elements per token per layer on each of ``ranks`` tensor-parallel ranks.

        Key/value heads are shared out, one at least to each rank; a latent is whole on every rank.
        """
        return sum(self.split) + self.divisors or 2 * -(-self.kv_heads // ranks) * self.head_dim

    def per_rank(self) -> dict[str, int]:
        """``elements`` for every number of ranks in ``RANKS`` to which the heads can be shared out."""
        # Fewer key/value heads than ranks are repeated, as long as each rank gets a whole number.
        possible = [
            ranks
            for ranks in RANKS
            if self.query_heads % ranks == 0 and (self.kv_heads % ranks == 0 or ranks % self.kv_heads == 0)
        ]
        return {str(ranks): self.elements(ranks) for ranks in possible}


def folded_result(model: Model, kv_heads: int | None = None) -> Result:
    """Of ``model`` as written with ``kv_heads`` key/value heads, by default its own number."""
    size, family = model.geometry, model.family.model_type
    present = size.kv_heads if kv_heads is None else kv_heads
    if model.family.sizes.kv_heads is None:
        return Result("own", size.layers, size.heads, present, size.head_dim)
    older = _older_rope(family, {**model.config, **older_rope_keys(model.config)})
    return Result("fold", size.layers, size.heads, present, size.head_dim, family=family, older_rope=older)


def _older_rope(family: str, config: Mapping[str, Any]) -> bool:
    """Whether a reader that looks for ``rope_theta`` beside ``rope_parameters`` rotates as transformers does."""
    table = config.get("rope_parameters")
    assumed = family in ("llama", "mistral", "deepseek_v3") and table == {"rope_type": "default", "rope_theta": 10000.0}
    return not table or "rope_theta" in config or assumed


def latent_result_of(model: Model, target: LatentTarget) -> Result:
    """Of ``model`` as ``target``."""
    wrapper = "" if model.tower is None else model.family.model_type
    made = target_result(model.geometry, target, experts=model.block.sparse)
    return replace(made, family=wrapper, divisors=cached_divisors(model, target))


def target_result(geometry: Geometry, target: LatentTarget, *, experts: bool = False) -> Result:
    """Of a model that becomes ``target``, with ``experts`` or not."""
    nope, value = target.head_dims(geometry.head_dim)
    split, heads = (target.kv_rank, target.rope_dim), (nope, target.rope_dim, value)
    sizes: Any = {"split": split, "heads": heads, "q_rank": target.q_rank, "vocabulary": geometry.vocabulary}
    kind: Any = "own" if target.layout == "kvfold" else target.layout
    return Result(kind, geometry.layers, geometry.heads, experts=experts, **sizes)


def latent_result(config: Mapping[str, Any]) -> Result:
    """Of the ``config.json`` of a latent model, or of a wrapper around one."""
    if (wrapper := config["model_type"]) in WRAPPERS:
        return replace(latent_result(config["text_config"]), family=wrapper)
    nope, rope, value = (config[f"{name}_head_dim"] for name in ("qk_nope", "qk_rope", "v"))
    experts, biased = config["model_type"] == EXPERT_TYPE, bool(config.get("attention_bias"))
    table = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind: Any = "free" if config["model_type"] == "youtu" or (experts and biased) else "engine"
    if kind == "engine" and (biased or not changes_no_frequency(table)):
        kind = "biased"
    return Result(
        kind,
        config["num_hidden_layers"],
        config["num_attention_heads"],
        split=(config["kv_lora_rank"], rope),
        heads=(nope, rope, value),
        q_rank=config.get("q_lora_rank"),
        vocabulary=config.get("vocab_size", 0),
        older_rope=experts or _older_rope(config["model_type"], config),
        yarn=table.get("rope_type") == "yarn",
        experts=experts,
    )

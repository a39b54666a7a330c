"""Which engines serve a result, at which cache; without torch.

The one table of facts about engines in this repository: ``ENGINES`` says where each was read and what was run. What an
engine makes of a result is in ``answers.py``. ``tests/engines`` runs the engines.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from kvfold.convert.families.model import Model
from kvfold.convert.targets.answers import WAYS
from kvfold.convert.targets.mla.config import LatentTarget
from kvfold.convert.targets.mla.problems import latent_problems
from kvfold.convert.targets.results import Result, folded_result, latent_result_of

PROPOSED = ((512, 64), (448, 64), (256, 64))  # splits that MLA kernels take


@dataclass(frozen=True)
class Engine:
    """An engine: the version and the files that the facts are from, and which results were run there.

    A run compared greedy tokens with those of transformers in float32: ``fold`` is GQA or MQA of a llama (folds of
    other families count as read), ``free`` and ``engine`` are the layouts of MLA, ``own`` is layout kvfold, and in
    ``ran_experts`` those of a model with experts. What is in neither was read in the sources only.
    """

    name: str
    version: str
    sources: str
    ran: tuple[str, ...]
    ran_experts: tuple[str, ...] = ()


ENGINES = (
    Engine(
        "transformers",
        "5.23.0",
        "models/youtu/modeling_youtu.py, models/deepseek_v3/modeling_deepseek_v3.py, "
        "models/mistral4/modeling_mistral4.py (experts)",
        ("fold", "free", "engine", "own"),
        ("free", "engine"),
    ),
    Engine(
        "vLLM",
        "0.32.0",
        "model_executor/layers/attention/mla_attention.py (sizes of the cache), v1/attention/backends/mla/prefill/"
        "flash_attn.py (sizes of heads), v1/attention/backends/mla/cpu_mla.py and amx_mla.py (512+64 only), "
        "model_executor/models/transformers/base.py (layout free), moe.py and fusers/moe.py beside it (experts)",
        ("fold", "free", "engine"),
        ("free", "engine"),
    ),
    Engine(
        "SGLang",
        "0.5.23",
        "srt/models/deepseek_v2.py (config keys), EntryClass of srt/models/*.py (classes of folds), srt/models/phi.py "
        "and olmo.py (key/value heads), srt/model_loader/utils.py (the way to transformers' code)",
        (),
    ),
    Engine(
        "llama.cpp",
        "b11739",
        "conversion/deepseek.py, conversion/phi.py (key/value heads), src/models/deepseek2.cpp (query rank), "
        "src/llama-model.cpp (number of tensors), conversion/mistral3.py and src/models/mistral4.cpp (experts)",
        ("fold", "free", "engine"),
        ("free", "engine"),
    ),
    Engine(
        "mlx-lm",
        "0.32.2",
        "utils.py (model types), models/deepseek_v3.py, models/llama.py (rope_theta), models/olmo.py (config keys), "
        "models/mistral4.py (shared experts)",
        ("fold", "free", "engine"),
        ("free", "engine"),
    ),
)


@dataclass(frozen=True)
class Verdict:
    """What an engine makes of a result.

    ``cache``: elements per token per layer on one device. ``how`` it serves the result, or why it does not; ``instead``
    are options of ``kvfold convert`` whose result it serves. ``ran``: seen in a run of that version, not only read.
    """

    engine: str
    version: str
    serves: bool
    cache: int | None
    how: str
    instead: str | None
    ran: bool

    def to_text(self) -> str:
        """In a line."""
        if not self.serves:
            return f"{self.engine}: no, {self.how}" + (f"; instead: {self.instead}" if self.instead else "")
        notes = [*([] if self.ran else ["by its sources, not run"]), *([self.how] if self.how else [])]
        return ", ".join([f"{self.engine}: yes", *notes])


def verdicts(result: Result, alternatives: Mapping[str, Result] | None = None) -> list[Verdict]:
    """Of every engine. ``alternatives``: what the source could become instead, by its options, the best first."""
    return [_verdict(engine, result, alternatives or {}) for engine in ENGINES]


def _verdict(engine: Engine, result: Result, alternatives: Mapping[str, Result]) -> Verdict:
    ask = WAYS[engine.name]
    way = ask(result)
    instead = (
        None if way.serves else next((options for options, other in alternatives.items() if ask(other).serves), None)
    )
    cache = result.elements() if way.serves else None
    runs = engine.ran_experts if result.experts else engine.ran
    ran = result.kind in runs and result.family in ("", "llama") and not way.read
    return Verdict(engine.name, engine.version, way.serves, cache, way.how, instead, ran)


def proposals(model: Model) -> list[LatentTarget]:
    """The targets that MLA kernels take and ``model`` can become, layout ``engine`` before ``free``."""
    targets = [LatentTarget(*split, layout=layout) for layout in ("engine", "free") for split in PROPOSED]
    return [target for target in targets if not latent_problems(model, target)]


def alternatives(model: Model, target: LatentTarget | None = None) -> dict[str, Result]:
    """What ``model`` could become, by its options: ``target`` in layout ``engine``, ``proposals``, a fold."""
    same = [] if target is None else [replace(target, layout="engine")]
    possible = [each for each in same if not latent_problems(model, each, allow_growth=True)]
    results = {latent_options(each): latent_result_of(model, each) for each in [*possible, *proposals(model)]}
    fold = {"--to mqa": folded_result(model, 1)} if model.geometry.kv_heads > 1 else {}
    return results | fold


def latent_options(target: LatentTarget) -> str:
    """The options of ``kvfold convert`` that make ``target``."""
    options = f"--to mla --kv-rank {target.kv_rank} --rope-dim {target.rope_dim} --layout {target.layout}"
    return options if target.q_rank is None else f"{options} --q-rank {target.q_rank}"

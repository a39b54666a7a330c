"""The supported families (one JSON file each in this folder), the multimodal wrappers around them,
and the lookup of the family for a config.json.

In a wrapper only the language model is converted; everything else is copied.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvfold.convert.errors import InputError
from kvfold.convert.families.schema import Family, parse_family, read_table
from kvfold.convert.families.values import TYPES


@dataclass(frozen=True)
class Wrapper:
    """A model type that wraps a language model: its class, and the default type of the language
    model.

    ``any_text``: the class can build any language model named in ``text_config`` (``AutoModel``),
    including MLA models.
    """

    architecture: str
    text: str
    any_text: bool = False


@dataclass(frozen=True)
class WrappedNames:
    """The prefixes in a wrapper's files that replace ``model.`` and ``lm_head.`` of a plain
    language model.
    """

    tower: str
    head: str

    def wrapped(self, name: str) -> str:
        """Convert a tensor name of a plain language model to the name in the wrapper's files."""
        for old, new in (("model.", self.tower), ("lm_head.", self.head)):
            if name.startswith(old):
                return new + name.removeprefix(old)
        return name


WRAPPERS = {
    "aya_vision": Wrapper("AyaVisionForConditionalGeneration", "cohere2", any_text=True),
    "gemma3": Wrapper("Gemma3ForConditionalGeneration", "gemma3_text"),
    "internvl": Wrapper("InternVLForConditionalGeneration", "qwen2", any_text=True),
    "llava": Wrapper("LlavaForConditionalGeneration", "llama", any_text=True),
    "llava_next": Wrapper("LlavaNextForConditionalGeneration", "llama", any_text=True),
    "llava_onevision": Wrapper("LlavaOnevisionForConditionalGeneration", "qwen2", any_text=True),
    "mistral3": Wrapper("Mistral3ForConditionalGeneration", "mistral", any_text=True),
    "qwen2_5_vl": Wrapper("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text"),
    "qwen2_vl": Wrapper("Qwen2VLForConditionalGeneration", "qwen2_vl_text"),
    "qwen3_vl": Wrapper("Qwen3VLForConditionalGeneration", "qwen3_vl_text"),
}
# Language models that occur in wrappers alone: no class runs them by themselves.
INNER = ("qwen2_5_vl_text", "qwen2_vl_text", "qwen3_vl_text")

PLAIN_NAMES = WrappedNames("model.", "lm_head.")
# Older spellings are in files written before transformers 5, and in those that it writes for the
# same classes.
_SPELLINGS = (
    WrappedNames("language_model.model.", "language_model.lm_head."),
    WrappedNames("model.language_model.", "lm_head."),
    PLAIN_NAMES,
)
# A wrapper's config leaves out what is the default of the language model's class: (vocab_size,
# hidden_size, intermediate_size, num_hidden_layers, num_attention_heads), transformers 5.23.0.
_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
DEFAULT_SIZES = {
    "cohere2": (256000, 8192, 22528, 40, 64),
    "gemma3_text": (262208, 2304, 9216, 26, 8),
    "llama": (32000, 4096, 11008, 32, 32),
    "mistral": (32000, 4096, 14336, 32, 32),
    "qwen2": (151936, 4096, 22016, 32, 32),
    "qwen2_5_vl_text": (152064, 8192, 29568, 80, 64),
    "qwen2_vl_text": (152064, 8192, 29568, 80, 64),
    "qwen3": (151936, 4096, 22016, 32, 32),
    "qwen3_vl_text": (151936, 4096, 22016, 32, 32),
}


def text_type(config: Mapping[str, Any]) -> str | None:
    """The model type of the language model inside a wrapper, or None if ``config`` is a plain
    model.
    """
    wrapper = WRAPPERS.get(str(config.get("model_type")))
    if wrapper is None:
        return None
    return str((config.get("text_config") or {}).get("model_type") or wrapper.text)


def text_config(config: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The language model's config in a wrapper with tensors ``names``; missing sizes are the
    defaults of its class.
    """
    inner = config.get("text_config") or config  # before transformers 5 some wrappers held it flat
    model_type = text_type(config)
    sizes = dict(zip(_SIZES, DEFAULT_SIZES.get(model_type or "", ()), strict=False))
    # wrappers say in different ways whether the head is the embedding: the files show it
    tied = f"{names_in_files(names).head}weight" not in names
    return {
        **sizes,
        **inner,
        "model_type": model_type,
        "architectures": None,
        "tie_word_embeddings": tied,
    }


def names_in_files(names: Collection[str]) -> WrappedNames:
    """The prefixes in files with tensors ``names``; by default those that transformers 5 writes."""
    for spelling in _SPELLINGS:
        if f"{spelling.tower}embed_tokens.weight" in names:
            return spelling
    return _SPELLINGS[1]


_FAMILY_FOLDER = Path(__file__).parent
_LISTED = "docs/families.md lists the supported models, CONTRIBUTING.md explains how to add one"
_CAUSAL = re.compile("CausalLM$|LMHead")
# The keys of nested configs in wrappers, by which a wrapper that is not supported is told from a
# plain model.
_TOWERS = re.compile(
    r"(text|vision|audio|speech|image|video|decoder|encoder|thinker|talker|llm)_config$"
)


@lru_cache
def supported() -> tuple[str, ...]:
    """The model types with a family file, sorted, without those that occur only inside wrappers."""
    return tuple(sorted({path.stem for path in _FAMILY_FOLDER.glob("*.json")} - {*INNER}))


@lru_cache
def load_family(name: str) -> Family:
    """Load the family ``name``, one of ``supported()`` or ``INNER``.

    Raises ``ValueError`` with file, place and key if the file does not match the schema.
    """
    path = _FAMILY_FOLDER / f"{name}.json"
    return parse_family(read_table(path), path.name)


def read_architectures(config: Mapping[str, Any]) -> list[str] | None:
    """The names in ``architectures`` of a decoded config.json. Raises InputError unless they are a
    list of strings.
    """
    stated: list[str] | None = config.get("architectures")
    if stated is not None and not TYPES["texts"][1](stated):
        raise InputError(f"config.json: architectures must be {TYPES['texts'][0]}, not {stated!r}")
    return stated


def family_of(config: Mapping[str, Any]) -> Family:
    """The family for the ``model_type`` of a decoded config.json; for a wrapper, the family of its
    language model.

    Raises ``InputError`` if the model is not supported.
    """
    model_type = config.get("model_type")
    inner = text_type(config)
    if inner is None and model_type not in supported():
        raise InputError(f"config.json: model_type {model_type!r} is {_unsupported(config)}")
    if inner is not None and inner not in (*supported(), *INNER):
        raise InputError(
            f"config.json: model_type {model_type!r} wraps a language model of model_type"
            f" {inner!r}, which is not supported; {_LISTED}"
        )
    family = load_family(inner or str(model_type))
    stated = read_architectures(config)
    known = (family.architecture, *family.also)
    if inner is not None:
        known = (WRAPPERS[str(model_type)].architecture,)
    # Published files spell the names of classes with other capitals at times.
    if stated and not {name.casefold() for name in known} & {name.casefold() for name in stated}:
        raise InputError(
            f"config.json: architectures is {stated!r}, but model_type {model_type!r} is supported"
            f" only as {known[0]}; use a checkpoint with a language-modeling head"
        )
    text = config if inner is None else config.get("text_config") or config
    for key, needed in family.requires.items():
        if text.get(key) not in (None, needed):
            raise InputError(
                f"config.json: {key} is {text[key]!r}, but model_type {family.model_type!r} is"
                f" supported only with {needed!r}"
            )
    return family


def _unsupported(config: Mapping[str, Any]) -> str:
    """The reason why the model type of ``config`` is not supported, and the way out."""
    heads: Any = config.get("architectures")
    if str(config.get("model_type")).startswith("kvfold_"):
        return (
            "output of kvfold in layout kvfold, which cannot be converted again; convert its source"
            " instead"
        )
    if config.get("kv_lora_rank"):
        return (
            "an MLA model already, which cannot be converted again; convert the model that it was"
            " made from instead"
        )
    if towers := sorted(key for key in config if _TOWERS.search(key) and config[key] is not None):
        return (
            f"not a supported multimodal wrapper (the config has {', '.join(towers)}); supported"
            f" wrappers are {', '.join(WRAPPERS)}; {_LISTED}"
        )
    named = TYPES["texts"][1](heads) and not any(_CAUSAL.search(head) for head in heads)
    if named or config.get("is_encoder_decoder") is True:
        return (
            f"not a causal language model (architectures is {heads}); kvfold converts only those,"
            " which docs/families.md lists"
        )
    return f"not supported; {_LISTED}"

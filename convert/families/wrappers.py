"""Multimodal wrappers: the language model's place in their config and files. Everything else is
copied.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any


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

# Older spellings are in files written before transformers 5, and in those that it writes for the
# same classes.
_SPELLINGS = (
    WrappedNames("language_model.model.", "language_model.lm_head."),
    WrappedNames("model.language_model.", "lm_head."),
    WrappedNames("model.", "lm_head."),
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
    return next(
        (each for each in _SPELLINGS if f"{each.tower}embed_tokens.weight" in names), _SPELLINGS[1]
    )

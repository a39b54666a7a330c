"""Attention for checkpoints that no stock class can represent: their modeling file, and its
registration.

``SOURCES`` is the only list of the model types that can become such a checkpoint (layout
``kvfold``).
"""

SOURCES = (
    "apertus",
    "arcee",
    "bloom",
    "cohere",
    "cohere2",
    "exaone4",
    "falcon",
    "gemma",
    "gemma2",
    "gemma3_text",
    "glm4_moe",
    "gpt2",
    "gpt_bigcode",
    "gpt_neox",
    "gptj",
    "granite",
    "granitemoe",
    "mixtral",
    "mpt",
    "nemotron",
    "olmo",
    "olmo2",
    "olmo3",
    "olmoe",
    "opt",
    "phi",
    "phi3",
    "phimoe",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "stablelm",
    "starcoder2",
)

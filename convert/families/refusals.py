"""Why other model types of transformers are not converted: every causal language model that has no family file.

Checked against transformers 5.23.0 by ``tests/convert/families/test_refusals.py``.
"""

_NO_CACHE = "it keeps a recurrent state and no KV cache"
_HYBRID = "some of its layers keep a recurrent or convolutional state; only models whose layers all cache are converted"
_ENCODER = "it is an encoder, which keeps no KV cache, and layout kvfold is not written for it"
_ENCODED = "its layers attend to another model's output too; only plain decoders are converted"
_LATENT = "its attention is latent (MLA) or shares one head already"
_ALL_HEADS = "its class gives every query head a key/value head, and layout kvfold is not written for it yet"
_SHARED_CACHE = "several of its layers share one cache, or differ in key/value heads"
_OTHER_ATTENTION = "its attention is more than one softmax over keys and values"
_GATED = "not written yet (heads whose results are gated or normalized before the output projection)"
_LAYER_ROPE = "not written yet (a rotary base for every layer)"
_EXPERTS = "not written yet (its experts; mixtral, olmoe, qwen2_moe, qwen3_moe and gpt_oss are)"
_CHUNKED = "its attention is in chunks, with queries and keys normalized behind their rotary embedding, experts or not"
_SINKS = "not written yet (sinks beside norms on queries and keys, and a rotary embedding in windowed layers alone)"
_BARE_NORMS = "not written yet (norms without weights behind the rotary embedding)"
_TOWER = "not written yet (the text tower of a multimodal model, without its wrapper)"
_FUSED = "it shares one head already; with multi_query false it is not written yet"

# What another family file, perhaps with a little code, could hold; the others need another method, or gain nothing.
_COULD_BE_ADDED = {
    *(_ENCODER, _ENCODED, _ALL_HEADS, _GATED, _LAYER_ROPE, _EXPERTS, _CHUNKED, _SINKS, _BARE_NORMS, _TOWER, _FUSED),
}
HOW_TO_ADD = "; to add one, see CONTRIBUTING.md, Where to add"

_TYPES = {
    _NO_CACHE: "falcon_mamba mamba mamba2 rwkv xlstm",
    _HYBRID: (
        "bamba bailing_hybrid falcon_h1 granitemoehybrid inkling2_text inkling_text jamba kimi_linear lfm2 lfm2_moe "
        "lfm3 minimax nemotron_h olmo_hybrid qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp_text recurrent_gemma "
        "zamba zamba2 zaya"
    ),
    _ENCODER: (
        "bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert "
        "roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xmod"
    ),
    _ENCODED: (
        "bigbird_pegasus blenderbot blenderbot-small marian mbart mllama_text_model musicgen musicgen_decoder "
        "musicgen_melody musicgen_melody_decoder mvp pegasus plbart prophetnet trocr"
    ),
    _LATENT: (
        "axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 dots3_note_text glm4_moe_lite glm_moe_dsa hy_v4 "
        "longcat_flash minicpm3 mistral4 youtu"
    ),
    _ALL_HEADS: (
        "biogpt codegen cpmant ctrl gpt-sw3 gpt_neo gpt_neox_japanese hrm_text "
        "modernbert-decoder openai-gpt persimmon xglm xlnet"
    ),
    _SHARED_CACHE: "gemma3n_text gemma4_text gemma4_unified_text mimo_v2_flash",
    _OTHER_ATTENTION: "blt diffllama doge jetmoe minimax_m3_vl_text reformer",
    _GATED: "afmoe beam bitnet laguna",
    _LAYER_ROPE: "granite_swa granitemoe_swa",
    _EXPERTS: (
        "aria_text cohere2_moe dbrx dots1 ernie4_5_moe exaone_moe flex_olmo glm4_moe granitemoe granitemoeshared "
        "hunyuan_v1_moe hy_v3 kolibri1 mellum minimax_m2 phimoe solar_open"
    ),
    _TOWER: "cohere_compass_text",
    _FUSED: "gpt_bigcode",
    _CHUNKED: "llama4_text",
    _SINKS: "flint",
    _BARE_NORMS: "nanochat",
}
REASONS = {model_type: reason for reason, types in _TYPES.items() for model_type in types.split()}


def advice(reason: str) -> str:
    """How to add a model type with such a ``reason``; empty where a family file cannot."""
    return HOW_TO_ADD if reason in _COULD_BE_ADDED else ""

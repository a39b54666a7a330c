"""Every causal language model of transformers is a family, a wrapper, or refused for a reason that holds."""

import pytest
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from kvfold.convert.errors import InputError
from kvfold.convert.families import refusals
from kvfold.convert.families.family import encoders, family_of, seq2seq, supported

TOWERS = {"text_config", "vision_config", "audio_config", "audio_encoder_config", "text_encoder"}


def keys(model_type: str) -> set[str]:
    """The keys of the stock config, under all their names."""
    config = CONFIG_MAPPING[model_type]
    return {*config.__dataclass_fields__, *config.attribute_map, *config.attribute_map.values()}


def parts(model_type: str) -> set[str]:
    """The configs that the stock config is made of."""
    return set(getattr(CONFIG_MAPPING[model_type], "sub_configs", None) or {})


def test_every_causal_language_model_is_accounted_for():
    wrappers = {name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if parts(name) & TOWERS}
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - wrappers <= {
        *supported(),
        *encoders(),
        *seq2seq(),
        *refusals.REASONS,
    }
    assert not {*supported(), *encoders(), *seq2seq()} & {*refusals.REASONS}


def test_the_reason_is_the_whole_answer():
    for model_type, reason in refusals.REASONS.items():
        with pytest.raises(InputError) as caught:
            family_of({"model_type": model_type})
        assert (
            str(caught.value)
            == f"config.json: model_type {model_type!r} is not supported: {reason}{refusals.advice(reason)}"
        )
    assert refusals.advice(refusals._GATED) == "; to add one, see CONTRIBUTING.md, Where to add"
    assert refusals.advice(refusals._NO_CACHE) == ""


def test_a_wrapper_is_refused_for_its_language_model_too():
    inner = {"model_type": "qwen3_5_text"}
    with pytest.raises(InputError, match=r"wraps a language model .* is not supported either: some of its layers keep"):
        family_of({"model_type": "qwen3_5", "text_config": inner, "vision_config": {}})


def types(reason: str) -> list[str]:
    return [name for name, why in refusals.REASONS.items() if why == reason and name in CONFIG_MAPPING]


def test_reasons_agree_with_the_stock_configs():
    heads = {name for name in refusals.REASONS if name in CONFIG_MAPPING and "num_key_value_heads" in keys(name)}
    latent = types(refusals._LATENT)
    assert [name for name in latent if not {"kv_lora_rank", "sliding_window"} & keys(name)] == []
    assert not heads & {*types(refusals._ALL_HEADS), *types(refusals._NO_CACHE), *types(refusals._ENCODER)}
    assert [name for name in types(refusals._ENCODER) if "is_decoder" not in keys(name)] == ["xlm"]
    experts = [name for name in types(refusals._EXPERTS) if not any("expert" in key for key in keys(name))]
    assert experts == ["dbrx"]  # whose keys are in ffn_config
    unwritten = {*types(refusals._GATED), *types(refusals._LAYER_ROPE), *types(refusals._EXPERTS)}
    assert unwritten - heads == {"dbrx"}  # whose number is in attn_config

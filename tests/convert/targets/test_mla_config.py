"""Problems of MLA layouts, and layout ``engine`` as inference engines read it."""

import json

import pytest
from helpers.cases import read_cases
from tiny_models import SIZES
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from kvfold.convert.families.model import make_model
from kvfold.convert.families.rotary import compute_frequencies
from kvfold.convert.targets.mla.layout import (
    build_longrope_parameters,
    build_mla_config,
    find_rope_base,
    fit_yarn_parameters,
)
from kvfold.convert.targets.mla.spec import MlaSpec, list_mla_problems

CASES = read_cases(__file__)


def config_of(model_type, **changes):
    config = AutoConfig.for_model(
        model_type, **{**SIZES, "num_key_value_heads": 4, "pad_token_id": None, **changes}
    )
    return json.loads(config.to_json_string(use_diff=False))


def problems(model_type="llama", target=None, *, allow_growth=False, **changes):
    config = config_of(model_type, **changes)
    target = target or MlaSpec(16, 8)
    return list_mla_problems(make_model(config), target, allow_growth=allow_growth)


@pytest.mark.parametrize("sizes", CASES["wrong_sizes"])
def test_sizes_that_cannot_be(sizes, told):
    (problem,) = problems(target=MlaSpec(*sizes))
    told(problem)


@pytest.mark.parametrize(("model_type", "changes", "layouts"), CASES["refused"])
def test_models_that_a_layout_cannot_hold_are_told_why_and_what_works(
    model_type, changes, layouts, told
):
    for layout in layouts:
        found = problems(model_type, MlaSpec(16, 8, layout=layout), **changes)
        assert found
        for problem in found:
            told(problem)
    if layouts == ["engine"]:
        assert problems(model_type, MlaSpec(16, 8), **changes) == []


def test_longrope_needs_a_shorter_context_in_a_stock_class_unless_both_sets_are_equal():
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 4.0}
    rope |= {"original_max_position_embeddings": 32, "short_factor": [1.0] * 4}
    assert problems(rope_parameters={**rope, "long_factor": [1.0] * 4}) == []
    (problem,) = problems(rope_parameters={**rope, "long_factor": [2.0] * 4})
    assert "--context 32" in problem


def test_a_shorter_context_is_named_only_where_it_removes_every_reason():
    """Windows are none in a context that they cover."""
    (problem,) = problems("mistral", sliding_window=32)
    assert "--context 32" in problem
    model = make_model(config_of("mistral", sliding_window=32))
    assert list_mla_problems(model.shorten_context(32), MlaSpec(16, 8)) == []
    (problem,) = problems("gemma3_text", sliding_window=32)
    assert "norm" in problem
    assert "--context" not in problem


THETA = [1.0, 0.1, 0.01, 0.001]


# What the DeepSeek loaders of inference engines read of the config of a dense model without a query
# latent: vLLM       vllm/model_executor/models/deepseek_v2.py       at 002d6073aa03 SGLang
# python/sglang/srt/models/deepseek_v2.py         at 00114aef19bb llama.cpp  conversion/deepseek.py
# at 01a723dc630d
ENGINE_KEYS = """
    first_k_dense_replace hidden_act hidden_size intermediate_size kv_lora_rank
    max_position_embeddings moe_intermediate_size moe_layer_freq n_group n_routed_experts
    n_shared_experts norm_topk_prob num_attention_heads num_experts_per_tok num_hidden_layers
    num_key_value_heads num_nextn_predict_layers q_lora_rank qk_nope_head_dim qk_rope_head_dim
    rms_norm_eps rope_parameters rope_scaling rope_theta routed_scaling_factor
    tie_word_embeddings v_head_dim vocab_size"""


def test_engine_config_answers_every_key_that_the_loaders_ask():
    config = config_of("llama", tie_word_embeddings=True)
    written = build_mla_config(
        make_model(config), MlaSpec(16, 8, layout="engine"), THETA, dtype="bfloat16"
    )
    assert [key for key in ENGINE_KEYS.split() if key not in written] == []
    # The conditions under which each of them makes a layer dense, its rope plain and its attention
    # multi-head.
    assert written["first_k_dense_replace"] == written["num_hidden_layers"] == 2
    rope = written["rope_parameters"]
    assert (rope["rope_type"], rope["factor"]) == ("yarn", 1.0)
    assert {**written["rope_scaling"], "rope_theta": rope["rope_theta"]} == {**rope, "type": "yarn"}
    assert written["num_key_value_heads"] == written["num_attention_heads"] == 8
    assert not written["attention_bias"]
    assert not written["tie_word_embeddings"]


def test_plain_rope_is_recognized_and_anything_else_is_longrope():
    plain = [500000.0 ** (-index / 4) for index in range(4)]
    assert find_rope_base(plain) == pytest.approx(500000.0)
    assert find_rope_base([1.0]) == 10000.0
    for other in ([0.5, 0.25], [1.0, 1.0, 0.1], [*plain[:3], plain[3] * 1.001]):
        assert find_rope_base(other) is None
        table = build_longrope_parameters(other, 512)
        assert table["short_factor"] == table["long_factor"]
        inverse = [
            1 / (f * 10000.0 ** (i / len(other))) for i, f in enumerate(table["short_factor"])
        ]
        assert inverse == pytest.approx(other, rel=1e-12)


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("table", "inexact", "far"),
    [
        # Only the pairs in the blend differ, and none by the factor 8 of plain RoPE.
        ({**LLAMA3, "original_max_position_embeddings": 8192}, {15, 16, 17}, 1.6),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, {}, 1.05),
        ({"rope_type": "linear", "factor": 4.0}, {0}, 4.01),
    ],
    ids=["llama3", "yarn", "linear"],
)
def test_layout_engine_has_the_nearest_frequencies_that_every_engine_computes(table, inexact, far):
    """Of Llama-3.1's 64 pairs, every second one in 64 dims."""
    rope = {"rope_theta": 500000.0, **table}
    sizes = {"head_dim": 128, "max_position_embeddings": 131072}
    model = make_model(config_of("llama", **sizes, rope_parameters=rope))
    spec = MlaSpec(16, 64, layout="engine")
    wanted = compute_frequencies(model.values, None)[0][::2]
    written, cached = fit_yarn_parameters(model, spec, wanted)
    ratios = [max(a / b, b / a) for a, b in zip(wanted, cached, strict=True)]
    different = {index for index, ratio in enumerate(ratios) if ratio > 1 + 1e-6}
    assert inexact == {} or different == inexact
    assert max(ratios) < far
    # The stock class reads them so, and vLLM takes the product for the longest context.
    config = AutoConfig.for_model(**build_mla_config(model, spec, cached, dtype="float32"))
    theta, amplitude = ROPE_INIT_FUNCTIONS["yarn"](config)
    assert theta.tolist() == pytest.approx(cached, rel=1e-6)
    assert amplitude == 1.0
    assert written["factor"] * written["original_max_position_embeddings"] == 131072


@pytest.mark.parametrize(("rank", "rope", "dim", "heads"), CASES["heads"])
def test_heads_are_padded_to_the_nearest_kernel_where_the_cache_has_one(rank, rope, dim, heads):
    assert MlaSpec(rank, rope, layout="engine").choose_head_dims(dim) == tuple(heads)
    assert MlaSpec(rank, rope).choose_head_dims(dim) == (dim, dim)

"""Models with experts as stock ``Mistral4ForCausalLM``: all but the attention is the source's, byte
for byte.
"""

import json

import pytest
import torch
from helpers import precision
from helpers.attention import random_tokens
from helpers.cases import read_cases
from helpers.checkpoints import convert, read_json, tensors
from transformers import AutoConfig, AutoModelForCausalLM, Mistral4ForCausalLM

from kvfold.attention import absorb
from kvfold.convert.families.model import make_model
from kvfold.convert.stream.stock import AutoModelForCausalLM as CompletedAuto
from kvfold.convert.targets.mla.layout import build_mla_config, list_mla_shapes
from kvfold.convert.targets.mla.spec import MlaSpec, list_stock_problems

CASES = read_cases(__file__)
LOSSLESS = {"to": "mla", "kv_rank": 65, "rope_dim": 32, "method": "svd"}
TOKENS = random_tokens(2, 30)
NORMED = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(3))


def config_of(name, **changes):
    stock = AutoConfig.for_model(name)
    known = {key: value for key, value in (CASES["sizes"] | changes).items() if hasattr(stock, key)}
    return json.loads(AutoConfig.for_model(name, **known).to_json_string(use_diff=False))


def greedy(model, tokens=TOKENS):
    return model.generate(
        tokens, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0
    )


@pytest.fixture(scope="module")
def mixtral(tiny_family, tmp_path_factory):
    """A tiny Mixtral, and what it becomes at full rank."""
    source = tiny_family("mixtral", sliding_window=None, num_key_value_heads=4)
    return source, convert(source, tmp_path_factory.mktemp("experts") / "out", **LOSSLESS)


def test_a_lossless_conversion_is_its_source_in_stock_transformers_and_absorbed(mixtral):
    source, out = mixtral
    original = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    stock, info = Mistral4ForCausalLM.from_pretrained(
        out, dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    with torch.no_grad():
        expected = original(TOKENS).logits
        assert (stock.eval()(TOKENS).logits - expected).abs().max() < precision.CONVERTED
    assert expected.abs().max() > 1
    assert torch.equal(greedy(stock), greedy(original))
    completed = CompletedAuto.from_pretrained(out, dtype=torch.float32).eval()
    assert torch.equal(greedy(absorb(completed)), greedy(original))
    assert type(completed.model.layers[0].self_attn).__name__ == "AbsorbedMistral4Attention"


@pytest.mark.parametrize(("name", "changes"), CASES["normed"])
def test_experts_beside_normed_queries_and_keys_generate_alike_absorbed_and_not(
    name, changes, tiny_family, tmp_path
):
    """The norms are fitted, which is another matter; what the router and the experts do is the
    source's.
    """
    source = tiny_family(
        name, num_key_value_heads=4, sliding_window=None, use_sliding_window=False, **changes
    )
    request = LOSSLESS | {"kv_rank": 40, "rope_dim": 8}
    out = convert(source, tmp_path / "out", **request)
    stock = CompletedAuto.from_pretrained(out, dtype=torch.float32).eval()
    original = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    for before, after in zip(original.model.layers, stock.model.layers, strict=True):
        torch.testing.assert_close(after.mlp(NORMED), before.mlp(NORMED), rtol=1e-4, atol=1e-5)
    assert torch.equal(greedy(stock), greedy(absorb(stock)))


def test_experts_are_the_bytes_of_the_source(mixtral):
    source, out = mixtral
    stored = tensors(source)
    made = tensors(out)
    name = "model.layers.1.block_sparse_moe"
    gate, up, down = (
        torch.stack([stored[f"{name}.experts.{expert}.{part}.weight"] for expert in range(4)])
        for part in ("w1", "w3", "w2")
    )
    experts = "model.layers.1.mlp.experts"
    assert torch.equal(made[f"{experts}.gate_up_proj"], torch.cat([gate, up], 1))
    assert torch.equal(made[f"{experts}.down_proj"], down)
    assert torch.equal(made["model.layers.1.mlp.gate.weight"], stored[f"{name}.gate.weight"])
    origins = read_json(out / "kvfold.json")["tensors"]
    assert origins[f"{experts}.down_proj"]["from"] == [
        f"{name}.experts.{expert}.w2.weight" for expert in range(4)
    ]
    assert origins["model.layers.1.mlp.shared_experts.up_proj.weight"]["origin"] == "zeros"


@pytest.mark.parametrize("layout", ["free", "engine"])
@pytest.mark.parametrize(("name", "changes"), CASES["routed"])
def test_shapes_and_routing_are_those_of_the_stock_class(name, changes, layout):
    source = make_model(config_of(name, **changes))
    target = MlaSpec(40, 8, layout=layout)
    written = build_mla_config(source, target, [1.0, 0.1, 0.01, 0.001], dtype="float32")
    with torch.device("meta"):
        stock = CompletedAuto.from_config(AutoConfig.for_model(**written))
    expected = {name: tuple(tensor.shape) for name, tensor in stock.state_dict().items()}
    if written["tie_word_embeddings"]:
        del expected["lm_head.weight"]
    shapes = list_mla_shapes(source, target)
    assert {name: shape for name, (shape, _) in shapes.items()} == expected
    router = stock.model.layers[-1].mlp.gate
    assert router.norm_topk_prob is changes.get("norm_topk_prob", True)
    assert router.top_k == source.values["num_experts_per_tok"]
    assert written["n_shared_experts"] == (layout == "engine")


@pytest.mark.parametrize(("name", "changes", "feature"), CASES["refused"])
def test_experts_that_the_stock_class_cannot_hold(name, changes, feature, told):
    problems = list_stock_problems(make_model(config_of(name, **changes)))
    assert any(feature in problem for problem in problems)
    told(problems[0])

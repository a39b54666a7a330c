"""The table of engines: what each serves, at which cache, and what it would serve instead."""

import json

import pytest
import torch
from helpers.checkpoints import hub_config
from transformers import AutoConfig, AutoModelForCausalLM

from kvfold.convert.data import demo_folder
from kvfold.convert.families.model import model_of
from kvfold.convert.targets import engines as en
from kvfold.convert.targets.mla.layout import mla_config
from kvfold.convert.targets.mla.spec import MlaSpec

LLAMA = hub_config("meta-llama/Meta-Llama-3-8B") | {"architectures": None}
QWEN = {**LLAMA, "model_type": "qwen2", "vocab_size": 1000}


def model(config=LLAMA, **changes):
    return model_of({**config, **changes})


def answers(source, rank, rope, layout):
    result = en.describe_mla(source, MlaSpec(rank, rope, layout=layout))
    return {verdict.engine: verdict for verdict in en.support_for(result)}


def refusals(source, kv_heads):
    return {
        each.engine
        for each in en.support_for(en.describe_fold(source, kv_heads))
        if not each.serves
    }


def test_folds_of_families_that_an_engine_reads_in_another_support():
    phi = {
        "model_type": "phi",
        "num_key_value_heads": 32,
        "partial_rotary_factor": 0.5,
        "hidden_act": "gelu_new",
    }
    assert refusals(model(**phi), 32) == set()
    assert refusals(model(**phi), 8) == {"SGLang", "llama.cpp"}
    assert refusals(model(model_type="olmo"), 4) == {"SGLang", "mlx-lm"}
    assert not any(each.ran for each in en.support_for(en.describe_fold(model(QWEN), 4)))


def test_folds_of_layout_kvfold_are_served_by_vllm_where_the_plug_in_has_them(tiny_family):
    for family in ("gpt2", "gpt_neox", "opt", "gptj"):
        source = model_of(json.loads((tiny_family(family) / "config.json").read_text()))
        found = en.support_for(en.describe_fold(source, 2))
        served = {"transformers"} | ({"vLLM"} if family != "gptj" else set())
        assert {verdict.engine for verdict in found if verdict.serves and verdict.ran} == served
        latent = en.describe_mla(source, MlaSpec(12, 0, layout="kvfold"))
        assert {each.engine for each in en.support_for(latent) if each.serves} == {"transformers"}


def test_a_fold_of_a_checkpoint_without_rope_theta_is_written_with_one():
    """Checkpoints that transformers 5 wrote have it in ``rope_parameters`` only; tables by layer
    type stay alone.
    """
    plain = {"rope_type": "default", "rope_theta": 500000.0}
    config = {name: value for name, value in LLAMA.items() if name != "rope_theta"}
    assert refusals(model(config, rope_parameters=plain), 4) == set()
    assert refusals(model(config, rope_parameters={"full_attention": plain}), 4) == {"mlx-lm"}


@pytest.mark.parametrize(
    ("split", "layout", "refused"),
    [
        ((512, 64), "engine", set()),
        ((448, 64), "engine", set()),
        ((512, 64), "free", {"SGLang", "llama.cpp", "mlx-lm"}),
        ((96, 32), "engine", {"vLLM"}),
        ((448, 128), "engine", {"vLLM"}),  # 576, but not in the sizes of its kernels
        ((96, 32), "free", {"vLLM", "SGLang", "llama.cpp", "mlx-lm"}),
    ],
)
def test_who_refuses_which_split_and_layout(split, layout, refused):
    found = answers(model(), *split, layout)
    assert {name for name, verdict in found.items() if not verdict.serves} == refused
    assert {verdict.cache for verdict in found.values() if verdict.serves} == {sum(split)}


def support(engine, result):
    return next(each for each in en.support_for(result) if each.engine == engine)


def test_the_heads_of_a_layout_free_checkpoint_decide_where_vllm_serves_it():
    narrow = model(num_attention_heads=64, num_key_value_heads=16)
    on_cpu = answers(narrow, 512, 64, "free")["vLLM"]
    assert on_cpu.serves
    assert "64+64/64" in on_cpu.how
    ran = {rank: answers(model(), rank, 64, "free")["vLLM"].ran for rank in (512, 448, 256)}
    assert ran == {512: True, 448: False, 256: False}  # what it serves on GPUs only was not run
    assert not answers(narrow, 448, 64, "free")["vLLM"].serves


def test_mlx_lm_needs_the_older_spelling_of_the_rotary_base():
    target = MlaSpec(512, 64, layout="engine")
    theta = [500000.0 ** (-i / 32) for i in range(32)]
    config = mla_config(model(), target, theta, dtype="bfloat16")
    saved = {
        name: value for name, value in config.items() if name not in ("rope_theta", "rope_scaling")
    }
    # as kvfold writes it, and as transformers saves it
    for written, serves in ((config, True), (saved, False)):
        result = en.describe_latent_config(written)
        assert result.kind == "engine"
        assert support("mlx-lm", result).serves is serves


def test_a_latent_is_whole_on_every_rank_and_heads_are_shared_out():
    latent = en.describe_mla(model(), MlaSpec(512, 64))
    assert en.describe_fold(model()).per_rank() == {"1": 2048, "2": 1024, "4": 512, "8": 256}
    assert latent.per_rank() == {"1": 576, "2": 576, "4": 576, "8": 576}
    assert en.describe_fold(model(), 2).per_rank()["8"] == 256  # a head at least
    odd = model(num_attention_heads=9, num_key_value_heads=3, head_dim=64)
    assert list(en.describe_fold(odd).per_rank()) == ["1"]


@pytest.mark.parametrize("layout", ["free", "engine"])
def test_no_layout_names_a_pad_token_that_its_class_would_zero(layout, tmp_path):
    """The class of layout ``free`` zeroes that row of the embedding, which may be a tied head, as
    it loads.
    """
    config = model_of(json.loads((demo_folder() / "config.json").read_text()))
    assert config.config["pad_token_id"] == 2
    wrote = mla_config(
        config, MlaSpec(24, 8, layout=layout), [1.0, 0.1, 0.01, 0.001], dtype="bfloat16"
    )
    stock = AutoModelForCausalLM.from_config(AutoConfig.for_model(**wrote))
    with torch.no_grad():
        stock.get_input_embeddings().weight.fill_(0.5)
    stock.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert (loaded.get_input_embeddings().weight == 0.5).all()

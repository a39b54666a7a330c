"""Sources whose files name tensors in other ways than the class: what stock transformers reads is
converted as if it had the usual names, everything else is refused in one line.
"""

import re
import shutil

import pytest
import torch
from helpers.checkpoints import (
    assert_same_tensors,
    convert,
    edit_json,
    full_split,
    read_json,
    run_conversion,
    tensors,
)
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from kvfold.convert import inspect_checkpoint
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.measure.drift import open_layer_stream

TIED = ["qwen3", "opt", "falcon"]


def rewrite(source, folder, change):
    """``folder`` with the files of ``source``, whose tensors are changed by ``change``."""
    folder.mkdir()
    for file in source.glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    save_file(change(tensors(source)), folder / "model.safetensors", {"format": "pt"})
    return folder


def drop_embedding(model, stored):
    """``stored`` with the tied head in place of the embedding."""
    (embedding,) = (
        name
        for name, value in model.named_parameters()
        if value is model.get_input_embeddings().weight
    )
    head = next(
        name for name, value in model.named_modules() if value is model.get_output_embeddings()
    )
    return {
        f"{head}.weight" if name == embedding else name: value for name, value in stored.items()
    }


@pytest.mark.parametrize("family", TIED)
def test_a_tied_head_in_place_of_the_embedding(tiny_family, tmp_path, family):
    source = tiny_family(family, tie_word_embeddings=True)
    model = AutoModelForCausalLM.from_pretrained(source)
    other = rewrite(source, tmp_path / "head", lambda stored: drop_embedding(model, stored))
    assert tensors(other).keys() != tensors(source).keys()
    for name, folder in (("a", source), ("b", other)):
        run_conversion(folder, tmp_path / name, to="mqa", method="mean")
    assert_same_tensors(tmp_path / "a", tmp_path / "b")
    record = read_json(tmp_path / "b" / "kvfold.json")
    assert record["source"]["sha256"] == open_checkpoint(other).compute_model_digest()
    tokens = torch.arange(3, 12)[None]
    streams = [
        open_layer_stream(open_checkpoint(folder), torch.device("cpu"), "float32")
        for folder in (source, other)
    ]
    assert torch.equal(*[stream.compute_logits(stream.embed(tokens)) for stream in streams])


NEW_NAMES = {"gpt_neox": "lm_head.weight"} | dict.fromkeys(
    ["mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "phimoe", "granitemoe", "glm4_moe"],
    "experts.gate_up_proj",
)


@pytest.mark.parametrize("family", NEW_NAMES)
def test_the_names_that_transformers_gives_experts_and_heads(tiny_family, tmp_path, family):
    changes = {"sliding_window": None} if family == "mixtral" else {}
    source = tiny_family(family, **changes)
    model = AutoModelForCausalLM.from_pretrained(source)
    model.save_pretrained(tmp_path / "fused", save_original_format=False)
    assert any(name.endswith(NEW_NAMES[family]) for name in tensors(tmp_path / "fused"))
    options = {"to": "mqa", "method": "mean"}
    runs = [("a", options)]
    others = [tmp_path / "fused"]
    if family == "mixtral":
        runs.append(("b", full_split(source, 1) | {"allow_growth": True}))
        pickled = shutil.copytree(tmp_path / "fused", tmp_path / "pickled")
        torch.save(tensors(pickled), pickled / "pytorch_model.bin")
        (pickled / "model.safetensors").unlink()
        others.append(pickled)
    for name, options in runs:
        expected = tmp_path / f"{name}-{source.name}"
        run_conversion(source, expected, **options)
        for folder in others:
            run_conversion(folder, tmp_path / f"{name}-{folder.name}", **options)
            assert_same_tensors(tmp_path / f"{name}-{folder.name}", expected)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_names_without_the_prefix_of_the_base_model(tiny_family, tmp_path, family):
    """As files of gpt2 on the hub leave it out, which hold masks too."""
    source = tiny_family(family, tie_word_embeddings=True)
    masks = {"h.0.attn.bias": torch.ones(1, 1, 128, 128).tril()} if family == "gpt2" else {}
    inner = rewrite(
        source,
        tmp_path / "inner",
        lambda stored: {
            **{re.sub(r"^(model|transformer)\.", "", name): stored[name] for name in stored},
            **masks,
        },
    )
    for folder in (source, inner):
        run_conversion(folder, tmp_path / f"of-{folder.name}", to="mqa", method="mean")
    assert_same_tensors(tmp_path / "of-inner", tmp_path / f"of-{source.name}")


@pytest.mark.parametrize(
    "extra", ["model.layers.2.mlp.up_proj.weight", "model.mtp_layers.0.eh_proj", "mtp.fc"]
)
def test_tensors_that_the_class_does_not_load_are_left_out_and_named(
    tiny_family, tmp_path, out, capsys, extra
):
    source = tiny_family("llama")
    more = rewrite(source, tmp_path / "more", lambda stored: stored | {extra: torch.ones(2, 2)})
    convert(more, out, 2, quiet=False)
    assert extra in capsys.readouterr().err
    assert tensors(out).keys() == tensors(source).keys()
    (note,) = inspect_checkpoint(more).notes
    assert extra in note


def test_a_missing_head_is_named_with_its_way_out(tiny_family, tmp_path, refused):
    source = tiny_family("llama", tie_word_embeddings=False)
    bare = rewrite(
        source,
        tmp_path / "bare",
        lambda stored: {name: stored[name] for name in stored if name != "lm_head.weight"},
    )
    with refused() as caught:
        inspect_checkpoint(bare)
    assert "tie_word_embeddings" in caught.value.message
    edit_json(bare / "config.json", tie_word_embeddings=True)
    assert inspect_checkpoint(bare).family == "llama"

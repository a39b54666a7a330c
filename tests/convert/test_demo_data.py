"""The shipped model and texts: complete, really trained, kept apart; and the script that made them."""

import dataclasses
import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import tokenizers
import torch
from helpers.processes import run_python
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvfold.convert.data import SEPARATOR, demo_folder, read_documents, read_text

RECIPES = Path(__file__).resolve().parents[2] / "recipes" / "demo"
LATER_SPLITS = ("calibration", "held_out")


@pytest.fixture(scope="module")
def training() -> dict:
    return json.loads((demo_folder() / "training.json").read_text())


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(demo_folder(), local_files_only=True)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(demo_folder(), dtype=torch.float32, local_files_only=True).eval()


@pytest.fixture(scope="module")
def held_out(tokenizer) -> torch.Tensor:
    """The held-out documents as one stream of tokens, each document followed by the end token."""
    ids = tokenizer(read_documents("held_out"), verbose=False)["input_ids"]
    return torch.tensor([token for document in ids for token in [*document, tokenizer.eos_token_id]])


@pytest.fixture(scope="module")
def recipe() -> Iterator[ModuleType]:
    sys.path.insert(0, str(RECIPES))
    try:
        import train_demo

        yield train_demo
    finally:
        sys.path.remove(str(RECIPES))


# the twin with norms on queries and keys


def test_a_twin_with_norms_starts_from_the_shipped_model(recipe, held_out):
    model = AutoModelForCausalLM.from_config(recipe.model_config(recipe.Recipe(qk_norm=True)))
    batch = held_out[:512].view(2, 256)
    recipe.take_weights(model, demo_folder(), batch)
    shipped = AutoModelForCausalLM.from_pretrained(demo_folder(), dtype=torch.float32)
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert torch.equal(model.model.layers[2].mlp.up_proj.weight, shipped.model.layers[2].mlp.up_proj.weight)
    losses = [float(recipe.next_token_loss(each, batch)) for each in (shipped, model)]
    assert losses[0] < losses[1] < losses[0] + 0.5  # with gains of one scores would be small: +1.1


# the texts


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def runs(documents: list[str], length: int) -> list[tuple[str, ...]]:
    return [tuple(w[i : i + length]) for w in map(words, documents) for i in range(len(w) - length + 1)]


def test_documents_are_the_text_split_at_its_separator():
    for split in ("train", *LATER_SPLITS):
        documents = read_documents(split)
        assert SEPARATOR.join(documents) == read_text(split)
        assert min(map(len, documents)) >= 200
        assert all(document == document.strip() for document in documents)
    assert len(read_documents("train")) > 400
    assert len(read_documents("calibration")) > 50
    assert len(read_documents("held_out")) > 25


def test_no_paragraph_of_ten_words_is_in_two_splits():
    seen: dict[str, str] = {}
    for split in ("train", *LATER_SPLITS):
        for paragraph in re.split(r"\n\n+", read_text(split).replace(SEPARATOR, "\n\n")):
            if len(said := words(paragraph)) >= 10:
                assert seen.setdefault(" ".join(said), split) == split, paragraph


def test_splits_share_almost_no_run_of_eight_words():
    known = set(runs(read_documents("train"), 8))
    for split in LATER_SPLITS:
        found = runs(read_documents(split), 8)
        assert sum(run in known for run in found) < 0.01 * len(found)


def test_texts_name_no_folder_address_or_license_terms():
    for split in ("train", *LATER_SPLITS):
        assert not re.search(
            r"/root/|/home/\w|\w@\w+\.\w+|object at 0x\w{9}|copyright|contributor agreement", read_text(split), re.I
        )


def test_notice_carries_the_license_of_the_python_that_the_texts_are_from(training):
    notice = (demo_folder().parent / "NOTICE").read_text()
    assert f"Python {training['texts_from_python']}" in notice
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in notice
    assert "Changes made:" in notice


def test_accessors_import_neither_torch_nor_transformers():
    script = (
        "import sys; from kvfold.convert.data import demo_folder, read_documents;"
        "demo_folder(); read_documents('held_out');"
        "print([name for name in ('torch', 'transformers', 'numpy') if name in sys.modules])"
    )
    assert run_python("-c", script).stdout == "[]\n"


# the checkpoint


def test_checkpoint_is_a_small_complete_multi_head_llama_in_bfloat16():
    config = json.loads((demo_folder() / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["num_attention_heads"] == config["num_key_value_heads"] == 8
    names = {file.name for file in demo_folder().iterdir()}
    expected = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"}
    assert names == {*expected, "training.json"}
    assert sum(file.stat().st_size for file in demo_folder().iterdir()) <= 6_000_000
    with safe_open(demo_folder() / "model.safetensors", "pt") as weights:
        assert {weights.get_slice(name).get_dtype() for name in weights.keys()} == {"BF16"}  # noqa: SIM118 (not a dict)
        assert all(weights.get_tensor(name).isfinite().all() for name in weights.keys())  # noqa: SIM118


def test_tokenizer_loads_as_it_was_trained(tokenizer):
    stored = tokenizers.Tokenizer.from_file(str(demo_folder() / "tokenizer.json"))
    for text in [*read_documents("held_out")[:5], "Zürich\t→ 東京\r\n    indented", ""]:
        ids = tokenizer(text, verbose=False)["input_ids"]
        assert ids == stored.encode(text).ids
        assert tokenizer.decode(ids) == text


def test_special_tokens_agree_everywhere(tokenizer, model):
    ids = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert tokenizer.convert_ids_to_tokens(list(ids)) == ["<s>", "</s>", "<pad>"]
    for config in (model.config, model.generation_config):
        assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == ids
    assert len(tokenizer) == model.config.vocab_size


def test_generates_words_it_learned(tokenizer, model):
    prompt = tokenizer("If the file does not exist, ", return_tensors="pt")
    answer = tokenizer.decode(model.generate(**prompt, max_new_tokens=40, do_sample=False)[0])
    said = words(answer)[6:]
    known = set(words(read_text("train")))
    assert len(said) >= 5
    assert sum(word in known for word in said) >= 0.8 * len(said)


@pytest.mark.slow
@torch.no_grad()
def test_held_out_loss_is_as_recorded_and_two_nats_below_unigram_entropy(model, held_out, training):
    share = held_out.bincount().double() / len(held_out)
    entropy = float(-torch.xlogy(share, share).sum())
    windows = held_out[: len(held_out) // 512 * 512].view(-1, 512)
    loss = float(torch.stack([model(row[None], labels=row[None]).loss for row in windows]).mean())
    assert entropy == pytest.approx(training["unigram_entropy"], abs=1e-4)
    assert loss == pytest.approx(training["held_out_loss"]["512"], abs=1e-3)
    assert training["held_out_perplexity"]["512"] == pytest.approx(math.exp(loss), rel=1e-3)
    assert loss <= entropy - 2


# the script


def test_recipe_drops_what_was_said_before_and_legal_notes(recipe):
    import demo_texts

    said = "one two three four five six seven eight nine ten"
    first = demo_texts.document(
        "a", iter([demo_texts.entry("head", f"{said}\n\nCopyright by somebody\n\n----\n\nshort one")])
    )
    assert first.text() == f"head\n{said}\n\nshort one"
    again = demo_texts.document(
        "b", iter([demo_texts.entry("gone", said + " eleven"), demo_texts.entry("", "short one")])
    )
    seen: set[int] = set()
    assert demo_texts.deduplicate(first, seen, set()) == first
    assert demo_texts.deduplicate(again, seen, set()).text() == "short one"
    assert demo_texts.deduplicate(again, seen, {("short", "one")}).text() == ""


@pytest.fixture
def small(recipe):
    return recipe.Recipe(
        vocabulary=300, layers=1, heads=2, head_dim=8, intermediate=16, sequence=32, steps=60, warmup=5
    )


def start(recipe, small):
    documents = read_documents("held_out")[5:8]
    made = recipe.train_tokenizer(documents, small)
    torch.manual_seed(small.seed)
    model = AutoModelForCausalLM.from_config(recipe.model_config(small))
    return model, {split: recipe.encode(made, documents) for split in recipe.SPLITS}


def test_recipe_trains_and_writes_a_checkpoint(recipe, small, tmp_path):
    model, tokens = start(recipe, small)
    before = float(recipe.window_losses(model, tokens["train"], 32).mean())
    assert recipe.train(model, tokens, small, math.inf, tmp_path) == 60
    recipe.save(model, tmp_path)
    result = recipe.measure(tmp_path, tokens, small)
    assert result["held_out_loss"]["32"] < before - 0.5
    assert result["unigram_entropy"] < math.log(300)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16


def test_recipe_repeats_itself_to_the_bit(recipe, small, tmp_path):
    weights = []
    for _ in range(2):
        model, tokens = start(recipe, small)
        recipe.train(model, tokens, dataclasses.replace(small, steps=3), math.inf, tmp_path)
        weights.append(model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])

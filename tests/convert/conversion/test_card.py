"""The model card, and the block that a conversion prints at its end."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from helpers.checkpoints import read_json, run_conversion
from helpers.processes import run_kvfold
from huggingface_hub import ModelCard

from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.conversion import card
from kvfold.convert.conversion.card import (
    escape_markdown_value,
    format_front_matter,
)
from kvfold.convert.conversion.judgment import judge_drift
from kvfold.convert.data import demo_folder


@pytest.fixture
def front(tmp_path):
    """The metadata of a model converted from one with the card ``text``, as the hub reads it."""

    def read(text):
        if text is not None:
            (tmp_path / "README.md").write_bytes(text if isinstance(text, bytes) else text.encode())
        source = Checkpoint(tmp_path, {"model_type": "llama"}, {}, "tiny", {}, None, {})
        return ModelCard(f"---\n{format_front_matter(source)}\n---\n").data.to_dict()

    return read


OURS = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["kvfold"]}
# The metadata of a source, and what a result keeps of it.
KEPT = read_json(Path(__file__).with_name("card.json"))


@pytest.mark.parametrize(("metadata", "kept"), KEPT)
def test_license_and_base_model_are_kept(front, metadata, kept):
    assert front(f"---\n{json.dumps(metadata)}\n---\n# Tiny\n") == OURS | kept


@pytest.mark.parametrize(
    "text", [None, "---\n[broken: yaml\n---\n", "---\n- a\n---\n", b"---\n\xff\n---"]
)
def test_a_source_without_metadata(front, text):
    assert front(text) == OURS


def test_metadata_that_takes_minutes_to_read(front, monkeypatch):
    monkeypatch.setattr(card, "_CARD_SECONDS", 0.2)
    assert front(f"---\nlicense: mit\nx: [{200_000 * '1, '}]\n---\n") == OURS


def test_the_card_has_commands_without_places_to_fill_in(tiny_reader, tmp_path, out):
    text = tmp_path / "own words.txt"
    text.write_text("Some words about nothing. " * 900)
    source = shutil.copytree(tiny_reader, tmp_path / "tiny llama")
    options = {"to": "mqa", "method": "mean", "samples": 4, "seq_len": 16, "refine": 1}
    done = run_conversion(source, out, calibration=text, **options)
    again = shlex.split(done.summary().split("\nnext\n")[1].replace("\\\n", ""))
    assert again[:3] == ["kvfold", "convert", str(source)]
    assert str(text) in again
    card = (out / "README.md").read_text()
    command = re.search("^kvfold convert (.*)$", card, re.MULTILINE)[1]
    assert command == (
        "'../tiny llama' converted --to mqa --method mean --calibration 'own words.txt'"
        " --samples 4 --seq-len 16 --refine 1"
    )
    commands = "".join(re.findall("```[a-z]+\n(.*?)```", card, re.DOTALL))
    assert "vllm serve .\n" in commands
    assert "--teacher '../tiny llama' --text " in commands
    assert not re.search(r"\bPATH\b|\bOUT\b|\bMODEL\b|\bFILE\b|<[a-z]+>", commands)
    assert str(tmp_path) not in card
    assert "docs/" not in card  # which pip does not install
    assert "held-out tokens of own words.txt, " in card


@pytest.mark.slow
def test_the_commands_of_a_card_run(tiny_reader, tmp_path, out, monkeypatch):
    source = shutil.copytree(tiny_reader, tmp_path / "tiny")
    run_conversion(source, out, to="mla", kv_rank=24, rope_dim=8, method="svd")
    (tmp_path / "words.txt").write_text("Some words about nothing. " * 200)
    monkeypatch.chdir(out)
    card = Path("README.md").read_text()
    names = {}
    for block in re.findall("```python\n(.*?)```", card, re.DOTALL):
        exec(block, names)
    prompt = names["tokenizer"]("The list of", return_tensors="pt")
    assert names["model"].generate(**prompt, max_new_tokens=2, do_sample=False).shape[1] > 2
    line = re.search("^kvfold uptrain (.*)$", card, re.MULTILINE)[1]
    line = re.sub(r"HuggingFaceFW/\S+", "../words.txt", line).replace("1000", "1")
    sizes = "--batch-tokens 32 --seq-len 32 --eval-every 0 --device cpu --json trained.json"
    run_kvfold("uptrain", *shlex.split(line), *sizes.split())
    assert read_json(Path("trained.json"))["request"]["teacher"] == "tiny"
    assert (tmp_path / "trained" / "config.json").is_file()


def test_a_model_of_the_hub_is_the_base_model(tmp_path):
    source = Checkpoint(tmp_path, {}, {}, "team/tiny@0123", {}, None, {})
    (tmp_path / "README.md").write_text("---\nbase_model: team/other\n---\n")
    assert format_front_matter(source).startswith("base_model: team/tiny\n")


def test_names_from_files_cannot_leave_their_line_of_a_card():
    assert escape_markdown_value("a`b\n# c\x1b[0m") == "a'b\\n# c\\x1b[0m"


def test_a_calibrated_conversion_ends_with_a_block(tiny_reader, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.chdir(tmp_path)
    done = run_conversion(tiny_reader, "out", to="mqa", samples=2, seq_len=16)
    lines = done.summary().splitlines()
    assert max(map(len, lines)) <= 60
    labels = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert labels == ["made", "cache", "loss", "verdict", "expected", "next"]
    assert done.to_dict()["verdict"] == done.verdict == judge_drift(done.drift)
    assert f"\nVerdict: {done.verdict}. " in Path("out/README.md").read_text()


def test_a_dry_run_of_a_budget_names_no_split(out):
    done = run_conversion(demo_folder(), out, to="mla", budget=64, dry_run=True)
    assert "MLA, split by measured drift" in done.summary()
    assert "sha256" not in done.to_dict()["source"]  # no weights were read

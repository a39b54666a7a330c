"""The model card, and the closing lines of a conversion: what it cost, and what was chosen."""

import json
import re
import shlex
import shutil
import time
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest
from click.testing import CliRunner
from huggingface_hub import ModelCard

from kvfold.convert import ConvertRequest, convert_checkpoint
from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.cli import kvfold
from kvfold.convert.conversion import card
from kvfold.convert.conversion.card import front_matter, trained_card
from kvfold.convert.conversion.record import chosen_text, cost_text, groups_text
from kvfold.convert.data import demo_folder
from kvfold.convert.signals import limited


@pytest.fixture
def front(tmp_path):
    """The metadata of a model converted from one with the card ``text``, as the hub reads it."""

    def read(text):
        if text is not None:
            (tmp_path / "README.md").write_bytes(text if isinstance(text, bytes) else text.encode())
        source = Checkpoint(tmp_path, {"model_type": "llama"}, {}, "tiny", {}, None, {})
        return ModelCard(f"---\n{front_matter(source)}\n---\n").data.to_dict()

    return read


OURS = {"library_name": "transformers", "pipeline_tag": "text-generation", "tags": ["kvfold"]}
DERIVED = {"base_model_relation": "finetune"}


@pytest.mark.parametrize(
    ("card", "kept"),
    [
        ("license: apache-2.0\ntags:\n- mine\n", {"license": "apache-2.0"}),
        (
            'license: "other"\nlicense_name: llama3\nlicense_link: LICENSE\n',
            {"license": "other", "license_name": "llama3", "license_link": "LICENSE"},
        ),
        (
            "base_model:\n- team/one\n- team/two\n",
            {"base_model": ["team/one", "team/two"]} | DERIVED,
        ),
        ("language:\n- en\n- multilingual\n", {"language": ["en", "multilingual"]}),
        ("language: English\n", {}),
        ("base_model: /home/me/model\nlicense: 4\n", {}),
        ("license: [mit, 4]\nlicense_name: {a: b}\n", {"license": ["mit"]}),
    ],
)
def test_license_and_base_model_are_kept(front, card, kept):
    assert front(f"---\n{card}---\n# Tiny\n") == OURS | kept


@pytest.mark.parametrize(
    "text", [None, "# Tiny\n", "---\n[broken: yaml\n---\n", "---\n- a\n---\n", b"---\n\xff\n---"]
)
def test_a_source_without_metadata(front, text):
    assert front(text) == OURS


def test_metadata_that_takes_minutes_to_read(front, monkeypatch):
    monkeypatch.setattr(card, "_CARD_SECONDS", 0.2)
    assert front(f"---\nlicense: mit\nx: [{200_000 * '1, '}]\n---\n") == OURS


def test_the_card_has_commands_without_places_to_fill_in(tiny_reader, tmp_path):
    text = tmp_path / "own words.txt"
    text.write_text("Some words about nothing. " * 900)
    source = shutil.copytree(tiny_reader, tmp_path / "tiny llama")
    options = {
        "to": "mqa",
        "calibration": str(text),
        "samples": 4,
        "seq_len": 16,
        "method": "mean",
        "refine": 1,
    }
    done = convert_checkpoint(
        ConvertRequest(model=str(source), out=str(tmp_path / "out"), quiet=True, **options)
    )
    assert "\non 8 x 16 held-out tokens of own words.txt: perplexity " in done.summary()
    again = done.summary().rpartition("\nnext: ")[2].splitlines()[-1]
    assert shlex.split(again)[:3] == ["kvfold", "convert", str(source)]
    assert str(text) in shlex.split(again)
    found = (tmp_path / "out" / "README.md").read_text()
    command = next(line for line in found.splitlines() if line.startswith("kvfold convert "))
    assert shlex.split(command)[2:] == [
        *(
            "../tiny llama",
            "converted",
            "--to",
            "mqa",
            "--method",
            "mean",
            "--calibration",
            "own words.txt",
        ),
        *("--samples", "4", "--seq-len", "16", "--refine", "1"),
    ]
    commands = re.findall("```[a-z]+\n(.*?)```", found, re.DOTALL)
    assert any("vllm serve .\n" in each for each in commands)
    assert any("--teacher '../tiny llama' --text " in each for each in commands)
    assert not re.search(r"\bPATH\b|\bOUT\b|\bMODEL\b|\bFILE\b|<[a-z]+>", "".join(commands))
    assert str(tmp_path) not in found
    assert "held-out tokens of own words.txt." in found


@pytest.mark.slow
def test_the_commands_of_a_card_run(tiny_reader, tmp_path, monkeypatch):
    source = shutil.copytree(tiny_reader, tmp_path / "tiny")
    out = "out"
    latent = {"to": "mla", "kv_rank": 24, "rope_dim": 8, "method": "svd"}
    convert_checkpoint(
        ConvertRequest(model=str(source), out=str(tmp_path / out), quiet=True, **latent)
    )
    (tmp_path / "words.txt").write_text("Some words about nothing. " * 200)
    monkeypatch.chdir(tmp_path / out)
    blocks = re.findall("```(python|sh)\n(.*?)```", Path("README.md").read_text(), re.DOTALL)
    names: dict[str, object] = {}
    for kind, block in blocks:
        if kind == "python":
            exec(block, names)
    prompt = names["tokenizer"]("The list of", return_tensors="pt")
    assert names["model"].generate(**prompt, max_new_tokens=2, do_sample=False).shape[1] > 2
    line = next(
        line
        for _, block in blocks
        for line in block.splitlines()
        if line.startswith("kvfold uptrain ")
    )
    words = [
        "../words.txt" if word.startswith("HuggingFaceFW/") else word
        for word in shlex.split(line)[1:]
    ]
    words[words.index("1000")] = "1"
    sizes = ["--batch-tokens", "32", "--seq-len", "32", "--eval-every", "0", "--device", "cpu"]
    done = CliRunner().invoke(
        kvfold, [*words, *sizes, "--json", "trained.json"], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    trained = json.loads(Path("trained.json").read_text())
    assert trained["teacher"] == "tiny"
    assert [row["step"] for row in trained["log"]] == [1]
    assert (tmp_path / "trained" / "config.json").is_file()


def test_a_trained_card_begins_with_the_training():
    front = "---\nlicense: mit\n---\n\n"
    card = (
        f"{front}# Tiny, MQA\n\nText. Everything else comes from the source, byte for byte. More.\n"
    )
    found = trained_card(card, "out", "Trained for 2 steps.", attention_only=True)
    assert found.startswith(f"{front}# Tiny, MQA, trained further\n\nTrained for 2 steps.\n")
    assert found.endswith("from the source; the uptraining trained only the attention. More.\n")
    assert "byte for byte" not in found
    assert trained_card("", "out", "Trained.", attention_only=False) == "# out\n\nTrained.\n"
    assert trained_card("Own words.", "out", "Trained.", attention_only=False).endswith(
        "uptraining\n\nOwn words.\n"
    )


def test_a_model_of_the_hub_is_the_base_model(tmp_path):
    opened = {"config": {}, "tensors": {}, "config_hash": "", "reader": None}
    assert Checkpoint(tmp_path, origin="team/tiny@0123", **opened).hub_id == "team/tiny"
    assert Checkpoint(tmp_path, origin="folder", **opened).hub_id is None
    (tmp_path / "README.md").write_text("---\nbase_model: team/other\nlicense: mit\n---\n")
    found = front_matter(Checkpoint(tmp_path, origin="team/tiny@0123", **opened))
    assert found.startswith("base_model: team/tiny\n")


def test_the_cost_and_the_split_of_a_budget_are_told(told):
    figures = {"perplexities": (40.0, 44.2068), "excess": 0.1, "kl": 0.12345, "agreement": 0.765}
    drift = Mock(sequences=8, length=256, **figures, **{"measured.excess_margin": 0.02})
    told(cost_text(drift, "text.txt"))
    drift.excess = float("nan")
    told(cost_text(drift, "text.txt"))
    plan = Mock(**{"request.budget": 32, "latent.kv_rank": 24, "latent.rope_dim": 8})
    splits = {"splits": [{}, {}, {}]}
    told(chosen_text(plan, splits))
    other = {
        "engines": ["vLLM"],
        "kl": 0.5,
        "instead_of": {"kv_rank": 16, "rope_dim": 16, "kl": 0.48},
    }
    told(chosen_text(plan, {**splits, "preferred_for_engines": other}))
    assert chosen_text(Mock(**{"request.budget": None}), splits) == ""


def test_the_groups_of_heads_are_told_and_why(told):
    def text_of(groups, **request):
        given = {
            "group": None,
            "resolved_method": "principal",
            "chosen_method.reads_text": True,
            **request,
        }
        plan = Mock(**{f"request.{name}": value for name, value in given.items()})
        plan.geometry.heads = 8
        plan.geometry.kv_heads = 4
        return groups_text(plan, {"groups": groups})

    neighbors = [[0, 1], [2, 3]]
    told(text_of([neighbors, [[0, 2], [1, 3]]]))
    pooled = {"resolved_method": "mean", "chosen_method.reads_text": False}
    for request in ({}, {"group": "similar"}, {"group": "contiguous"}, pooled):
        told(text_of([neighbors], **request))
    assert text_of([[[0, 1, 2, 3]]]) == groups_text(Mock(), {}) == ""


def test_a_dry_run_of_a_budget_names_no_split(tmp_path):
    request = ConvertRequest(demo_folder(), tmp_path / "out", to="mla", budget=64, dry_run=True)
    done = convert_checkpoint(request)
    lines = done.summary().splitlines()
    assert (
        "MHA -> MLA, split by measured drift, method principal: 512 -> 64 KV-cache elements"
        in lines[0]
    )
    assert (
        "  model.layers.0.self_attn.kv_b_proj.weight  BF16 new" in lines
    )  # its shape would be that of a split
    assert done.to_dict()["attention"] == {"from": "MHA", "to": "MLA, split by measured drift"}
    assert "sha256" not in done.to_dict()["source"]  # no weights were read


def test_a_dry_run_tells_the_shares_of_its_texts(tmp_path):
    texts = [tmp_path / "prose.txt", tmp_path / "code.txt"]
    for text in texts:
        text.write_text("A list of words. " * 40)
    options = {
        "calibration": [f"{texts[0]}:3", str(texts[1])],
        "samples": 2,
        "seq_len": 16,
        "dry_run": True,
    }
    said = convert_checkpoint(
        ConvertRequest(demo_folder(), tmp_path / "out", to="mqa", **options)
    ).summary()
    assert f"calibration: 2 x 16 tokens of {texts[0]} (75 %) + {texts[1]} (25 %)\n" in said


def test_a_dry_run_tells_the_training(tmp_path):
    options = {"seq_len": 256, "refine": 50, "polish": "200k", "dry_run": True}
    said = convert_checkpoint(
        ConvertRequest(demo_folder(), tmp_path / "out", to="mqa", **options)
    ).summary()
    assert "refinement: 50 steps of 2048 tokens, in each layer" in said.splitlines()
    assert (
        "polishing: 196 steps of 1024 tokens, 201k tokens in all, after the last layer"
        in said.splitlines()
    )


def test_a_limit_holds_where_its_error_is_swallowed_once():
    ended = time.monotonic() + 20

    def work():
        with suppress(TimeoutError):
            while time.monotonic() < ended:
                pass
        while time.monotonic() < ended:
            pass

    with pytest.raises(TimeoutError), limited(0.1):
        work()

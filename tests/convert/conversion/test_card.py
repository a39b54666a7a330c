"""The front matter of the model card: the license that binds, and the model it came from."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from helpers.checkpoints import add_demo_tokenizer
from huggingface_hub import ModelCard, ModelCardData
from huggingface_hub.utils import validate_repo_id
from transformers.pipelines import SUPPORTED_TASKS

from kvfold.convert import ConvertRequest, convert_checkpoint
from kvfold.convert.checkpoint.opening import Checkpoint
from kvfold.convert.cli import kvfold
from kvfold.convert.conversion.card import front_matter, trained_card
from kvfold.convert.data import demo_folder


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
        ("license:\n- mit\n- other\n", {"license": ["mit", "other"]}),
        (
            'license: "other"\nlicense_name: llama3\nlicense_link: LICENSE\n',
            {"license": "other", "license_name": "llama3", "license_link": "LICENSE"},
        ),
        ("base_model: team/base\nlicense: mit\n", {"base_model": "team/base", "license": "mit"} | DERIVED),
        ("base_model:\n- team/one\n- team/two\n", {"base_model": ["team/one", "team/two"]} | DERIVED),
        ("language: en\n", {"language": "en"}),
        ("language:\n- en\n- multilingual\n", {"language": ["en", "multilingual"]}),
        ("language: English\n", {}),
        ("base_model: /home/me/model\nlicense: 4\n", {}),
        ("license: [mit, 4]\nlicense_name: {a: b}\n", {"license": ["mit"]}),
        ("license: Our Own (v2)\n", {"license": "Our Own (v2)"}),
    ],
)
def test_license_and_base_model_are_kept(front, card, kept):
    assert front(f"---\n{card}---\n# Tiny\n") == OURS | kept


@pytest.mark.parametrize(
    "text",
    [None, "", "# Tiny\nno front matter", "---\n[broken: yaml\n---\n", "---\n- a\n- list\n---\n", b"---\n\xff\n---"],
)
def test_a_source_without_metadata(front, text):
    assert front(text) == OURS


def test_the_card_has_commands_without_places_to_fill_in(tmp_path):
    text = tmp_path / "own words.txt"
    text.write_text("Some words about nothing. " * 900)
    source = shutil.copytree(demo_folder(), tmp_path / "tiny llama")
    options = {"to": "mqa", "calibration": str(text), "samples": 4, "seq_len": 16, "method": "mean", "refine": 1}
    request = ConvertRequest(model=str(source), out=str(tmp_path / "out"), quiet=True, **options)
    card = (tmp_path / "out" / "README.md") if convert_checkpoint(request).written else None
    found = card.read_text()
    command = next(line for line in found.splitlines() if line.startswith("kvfold convert "))
    assert shlex.split(command)[2:4] == ["../tiny llama", "converted"]
    assert shlex.split(command)[4:] == [
        *("--to", "mqa", "--method", "mean", "--calibration", "own words.txt"),
        *("--samples", "4", "--seq-len", "16", "--refine", "1"),
    ]
    commands = re.findall("```[a-z]+\n(.*?)```", found, re.DOTALL)
    assert any("vllm serve .\n" in each for each in commands)
    assert any("--teacher '../tiny llama' --text " in each for each in commands)
    assert not re.search(r"\bPATH\b|\bOUT\b|\bMODEL\b|\bFILE\b|<[a-z]+>", "".join(commands))
    assert str(tmp_path) not in found
    assert "held-out tokens of own words.txt." in found
    assert "they also chose among groups" in found


@pytest.mark.slow
def test_the_commands_of_a_card_run(tmp_path, monkeypatch, tiny_family):
    source, out = shutil.copytree(tiny_family("llama", vocab_size=2048, mlp_bias=False), tmp_path / "tiny"), "out"
    add_demo_tokenizer(source)
    latent = {"to": "mla", "kv_rank": 24, "rope_dim": 8, "method": "svd"}
    convert_checkpoint(ConvertRequest(model=str(source), out=str(tmp_path / out), quiet=True, **latent))
    (tmp_path / "words.txt").write_text("Some words about nothing. " * 200)
    monkeypatch.chdir(tmp_path / out)
    blocks = re.findall("```(python|sh)\n(.*?)```", Path("README.md").read_text(), re.DOTALL)
    names: dict[str, object] = {}
    for kind, block in blocks:
        if kind == "python":
            exec(block, names)
    prompt = names["tokenizer"]("The list of", return_tensors="pt")
    assert names["model"].generate(**prompt, max_new_tokens=2, do_sample=False).shape[1] > 2
    line = next(line for _, block in blocks for line in block.splitlines() if line.startswith("kvfold uptrain "))
    words = ["../words.txt" if word.startswith("HuggingFaceFW/") else word for word in shlex.split(line)[1:]]
    words[words.index("1000")] = "1"
    sizes = ["--batch-tokens", "32", "--seq-len", "32", "--eval-every", "0", "--device", "cpu"]
    done = CliRunner().invoke(kvfold, [*words, *sizes, "--json", "trained.json"], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    trained = json.loads(Path("trained.json").read_text())
    assert trained["teacher"] == "tiny"
    assert [row["step"] for row in trained["log"]] == [1]
    assert (tmp_path / "trained" / "config.json").is_file()


def test_what_the_hub_validates_offline(front):
    found = ModelCardData(**front("---\nlicense: apache-2.0\nlanguage: en\nbase_model: team/base\n---\n"))
    assert found.library_name == "transformers"
    assert found.pipeline_tag in SUPPORTED_TASKS
    assert found.base_model_relation in {"adapter", "finetune", "merge", "quantized"}
    assert validate_repo_id(found.base_model) is None


def test_a_trained_card_begins_with_the_training():
    card = "---\nlicense: mit\n---\n\n# Tiny, MQA\n\nText. Everything else is the source's, byte for byte. More.\n"
    found = trained_card(card, "out", "Trained for 2 steps.", attention_only=True)
    assert found.startswith("---\nlicense: mit\n---\n\n# Tiny, MQA, trained further\n\nTrained for 2 steps.\n")
    assert found.endswith("before the uptraining, which trained the attention alone. More.\n")
    assert "byte for byte" not in found
    table = trained_card("| | source | this checkpoint |\n", "out", "Trained.", attention_only=True)
    assert table.endswith("| | source | before the uptraining |\n")
    assert trained_card("", "out", "Trained.", attention_only=False) == "# out\n\nTrained.\n"
    assert trained_card("Own words.", "out", "Trained.", attention_only=False).endswith("uptraining\n\nOwn words.\n")


def test_a_model_of_the_hub_is_the_base_model(tmp_path):
    opened = {"config": {}, "tensors": {}, "digests": {}, "reader": None, "aliases": {}}
    assert Checkpoint(tmp_path, origin="team/tiny@0123", **opened).hub_id == "team/tiny"
    assert Checkpoint(tmp_path, origin="folder", **opened).hub_id is None
    (tmp_path / "README.md").write_text("---\nbase_model: team/other\nlicense: mit\n---\n")
    assert (
        front_matter(Checkpoint(tmp_path, origin="team/tiny@0123", **opened)).splitlines()[0] == "base_model: team/tiny"
    )

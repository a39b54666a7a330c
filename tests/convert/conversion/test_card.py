"""The front matter of the model card: the license that binds, and the model it came from."""

import shutil

import pytest
from huggingface_hub import ModelCard

from kvfold.convert import ConvertRequest, convert_checkpoint
from kvfold.convert.conversion.card import front_matter
from kvfold.convert.io.checkpoint import Checkpoint


@pytest.fixture
def front(tmp_path, tiny_family):
    """The metadata of a model converted from one with the card ``text``, as the hub reads it."""

    def convert(text, suffix=""):
        model = shutil.copytree(tiny_family("llama"), tmp_path / f"model{suffix}")
        if text is not None:
            (model / "README.md").write_bytes(text if isinstance(text, bytes) else text.encode())
        out = tmp_path / f"out{suffix}"
        convert_checkpoint(ConvertRequest(model=str(model), out=str(out), to="mqa", method="mean", quiet=True))
        return ModelCard.load(out / "README.md").data.to_dict()

    return convert


OURS = {"library_name": "transformers", "tags": ["kvfold"]}


@pytest.mark.parametrize(
    ("card", "kept"),
    [
        ("license: apache-2.0\ntags:\n- mine\n", {"license": "apache-2.0"}),
        ("license:\n- mit\n- other\n", {"license": ["mit", "other"]}),
        (
            'license: "other"\nlicense_name: llama3\nlicense_link: LICENSE\n',
            {"license": "other", "license_name": "llama3", "license_link": "LICENSE"},
        ),
        ("base_model: team/base\nlicense: mit\n", {"base_model": "team/base", "license": "mit"}),
        ("base_model:\n- team/one\n- team/two\n", {"base_model": ["team/one", "team/two"]}),
        ("base_model: /home/me/model\nlicense: 4\n", {}),
        ("license: [mit, 4]\nlicense_name: {a: b}\n", {"license": ["mit"]}),
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


def test_a_model_of_the_hub_is_the_base_model(tmp_path):
    opened = {"config": {}, "tensors": {}, "digests": {}, "reader": None, "aliases": {}}
    assert Checkpoint(tmp_path, origin="team/tiny@0123", **opened).hub_id == "team/tiny"
    assert Checkpoint(tmp_path, origin="folder", **opened).hub_id is None
    (tmp_path / "README.md").write_text("---\nbase_model: team/other\nlicense: mit\n---\n")
    assert (
        front_matter(Checkpoint(tmp_path, origin="team/tiny@0123", **opened)).splitlines()[0] == "base_model: team/tiny"
    )

"""``--calibration self`` end to end, and what it refuses."""

import json
import shutil

import pytest

from kvfold.convert import ConvertRequest, InputError, convert_checkpoint
from kvfold.convert.conversion import journal, memory, source
from kvfold.convert.data import demo_folder

MQA = {"to": "mqa", "group": "contiguous", "calibration": "self", "samples": 6, "seq_len": 24, "quiet": True}


def convert(out, model=None, **options):
    convert_checkpoint(ConvertRequest(model=str(model or demo_folder()), out=str(out), **{**MQA, **options}))
    return json.loads((out / "kvfold.json").read_text())


@pytest.fixture(scope="module")
def unbroken(tiny_reader, tmp_path_factory):
    out = tmp_path_factory.mktemp("unbroken") / "out"
    convert(out, tiny_reader)
    return out


def test_the_record_says_whose_text_it_was(unbroken):
    record = json.loads((unbroken / "kvfold.json").read_text())
    text = record["calibration"]
    assert (text["source"], text["sequences"], text["held_out"], text["tokens_each"]) == ("self", 6, 8, 24)
    assert len(text["sha256"]) == 64
    assert record["request"]["seed"] == 0
    assert not list(unbroken.glob(".*"))
    assert "held-out tokens of text that the source wrote itself." in (unbroken / "README.md").read_text()


def test_a_resumed_run_finds_its_text_and_gives_the_bytes_of_an_unbroken_one(
    tiny_reader, unbroken, tmp_path, monkeypatch
):
    note, noted = journal.Journal.note, []

    def stop(self, notes):
        noted.append(len(self.notes))
        note(self, notes)
        if len(noted) == 1:
            raise RuntimeError("killed")

    monkeypatch.setattr(journal.Journal, "note", stop)
    with pytest.raises(RuntimeError, match="killed"):
        convert(tmp_path / "out", tiny_reader, resume=True)
    with monkeypatch.context() as patch:
        patch.setattr(source, "write_sequences", lambda *_: pytest.fail("the text was written again"))
        convert(tmp_path / "out", tiny_reader, resume=True)
    assert noted == [0, 1, 2, 3]
    for file in unbroken.iterdir():
        assert file.read_bytes() == (tmp_path / "out" / file.name).read_bytes(), file.name


def test_what_cannot_be_is_said_before_anything_is_written(tmp_path, monkeypatch):
    model = shutil.copytree(demo_folder(), tmp_path / "model")
    settings = json.loads((model / "tokenizer_config.json").read_text())
    bare = {name: value for name, value in settings.items() if not name.startswith(("bos", "chat"))}
    (model / "tokenizer_config.json").write_text(json.dumps(bare))
    with pytest.raises(InputError, match="--calibration self: expected a tokenizer with a chat template or a BOS"):
        convert(tmp_path / "out", model)
    monkeypatch.setattr(source, "first_tokens", lambda *_: [1, 2])
    with pytest.raises(InputError, match="--seq-len 2: must exceed the 2 tokens that begin every text; raise it"):
        convert(tmp_path / "out", seq_len=2)
    monkeypatch.setattr(memory, "free_bytes", lambda plan: 1 << 20)
    expected = "--calibration self needs the whole model in memory: about"
    with pytest.raises(InputError, match=f"{expected} .* give --calibration FILE"):
        convert(tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model"]

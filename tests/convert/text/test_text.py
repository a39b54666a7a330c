"""Calibration text: documents drawn from files, beginnings and ends of sequences, and refused texts."""

import hashlib
import json
import re
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from kvfold.convert.errors import InputError
from kvfold.convert.measure.losses import token_windows
from kvfold.convert.request import held_out_count
from kvfold.convert.text import corpus
from kvfold.convert.text import tokenizer as tokens_of
from kvfold.convert.text import windows as text
from kvfold.convert.text.corpus import BUILT_IN, check_sources
from kvfold.convert.text.tokenizer import check_vocabulary, prefix_tokens
from kvfold.convert.text.windows import CalibrationTokens, check_seq_len, load_calibration

BOS, EOS = 256, 257


def byte_tokenizer(bos: bool = True, eos: bool = True, closes: bool = False, chat: bool = False) -> Any:
    """One token per byte; ``closes`` also ends every text with EOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)} | {"<s>": BOS, "</s>": EOS}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    if bos:
        template = "<s> $A </s>" if closes else "<s> $A"
        backend.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("<s>", BOS), ("</s>", EOS)]
        )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>" if eos else None, model_max_length=64
    )
    if chat:
        tokenizer.chat_template = (
            "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor %}{{ eos_token }}"
        )
    return tokenizer


def numbers(count: int, start: int = 0) -> str:
    """Text in which every stretch of six characters occurs once."""
    return " ".join(f"{number:05d}" for number in range(start, start + count))


def decoded(tokens: CalibrationTokens, tokenizer: Any) -> list[str]:
    rows = torch.cat([tokens.calibration, tokens.held_out])
    return [tokenizer.decode(row[1:]) for row in rows]


@pytest.fixture
def tokenizer() -> Any:
    return byte_tokenizer()


def lines(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_sequences_begin_with_bos_and_are_pieces_of_the_text_that_never_overlap(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "some.txt"
    path.write_text(numbers(400))
    found = load_calibration(str(path), tokenizer, samples=20, seq_len=62)
    assert found.calibration.shape == (20, 62)
    assert found.held_out.shape == (8, 62)
    assert found.calibration.dtype == torch.int64
    assert (found.calibration[:, 0] == BOS).all()
    assert (found.held_out[:, 0] == BOS).all()
    assert found.source == "some.txt"
    assert found.digest == hashlib.sha256(path.read_bytes()).hexdigest()
    places = sorted(path.read_text().index(piece) for piece in decoded(found, tokenizer))
    assert all(after - before >= 61 for before, after in pairwise(places))


def test_the_seed_chooses(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "some.txt"
    path.write_text(numbers(400))
    first, again, other = (load_calibration(str(path), tokenizer, 5, 31, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.calibration, again.calibration)
    assert torch.equal(first.held_out, again.held_out)
    assert not torch.equal(first.calibration, other.calibration)


@pytest.mark.parametrize(("samples", "held_out"), [(1, 8), (64, 8), (65, 9), (128, 16), (1000, 125)])
def test_an_eighth_and_at_least_eight_are_held_out(samples: int, held_out: int) -> None:
    assert held_out_count(samples) == held_out


def test_further_sequences_leave_the_others_as_they_are(tmp_path, tokenizer):
    path = tmp_path / "text.txt"
    path.write_text(numbers(2000), encoding="utf-8")
    plain, more = (load_calibration(str(path), tokenizer, 5, 31, held_out=3, further=count) for count in (0, 20))
    assert torch.equal(more.calibration, plain.calibration)
    assert torch.equal(more.held_out, plain.held_out)
    assert torch.equal(plain.training, plain.calibration)
    assert torch.equal(more.training, torch.cat([more.calibration, more.further]))
    assert len(more.further) == 20
    rows = [tuple(row.tolist()) for row in torch.cat([more.training, more.held_out])]
    assert len(set(rows)) == 28
    every = load_calibration(str(path), tokenizer, 5, 31, held_out=3, further=10**6)
    assert len(every.training) + 3 == 12000 // 30  # characters; a sequence begins with the BOS token


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, [BOS]), ({"closes": True}, [BOS]), ({"bos": False}, [])],
    ids=["bos", "bos and eos", "none"],
)
def test_prefix_is_what_the_tokenizer_puts_first(options: dict[str, bool], expected: list[int]) -> None:
    assert prefix_tokens(byte_tokenizer(**options)) == expected


@pytest.mark.parametrize(("options", "prefix"), [({"closes": True}, [BOS]), ({"bos": False}, [])])
def test_windows_for_perplexity_begin_with_the_prefix_alone(options: dict[str, bool], prefix: list[int]) -> None:
    tokenizer, words = byte_tokenizer(**options), numbers(100)
    assert tokenizer("")["input_ids"] == prefix + [EOS] * bool(options.get("closes"))
    found = token_windows(tokenizer, words, 5, 41)
    assert found.shape == (5, 41)
    assert found[:, : len(prefix)].tolist() == [prefix] * 5
    assert "".join(tokenizer.decode(row[len(prefix) :]) for row in found) == words[: 5 * (41 - len(prefix))]
    assert token_windows(tokenizer, words, 99, 41).shape == (len(words) // (41 - len(prefix)), 41)


def test_sequences_longer_than_the_positions() -> None:
    check_seq_len(64, 64, "tiny")
    with pytest.raises(InputError, match=r"^--seq-len 65: longer than the 64 positions that tiny is made for; lower"):
        check_seq_len(65, 64, "tiny")


def test_tokens_that_the_model_does_not_know() -> None:
    check_vocabulary(torch.tensor([3, 96]), 97, "tiny")
    check_vocabulary(torch.empty(0, 4, dtype=torch.int64), 97, "tiny")
    with pytest.raises(InputError, match=r"^tiny: its tokenizer gives token 97, but the model knows 97 tokens; check"):
        check_vocabulary(torch.tensor([[3, 97]]), 97, "tiny")


def test_sequences_of_long_documents_stay_inside_them(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(eos=False)
    rows = [{"text": numbers(30, start=1000 * index)} for index in range(10)]
    found = load_calibration(lines(tmp_path / "rows.jsonl", rows), tokenizer, 10, 61)
    for piece in decoded(found, tokenizer):
        assert any(piece in row["text"] for row in rows)


def test_short_documents_are_packed_with_eos_between(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"text": f"document {index:03d}"} for index in range(60)]
    found = load_calibration(lines(tmp_path / "rows.jsonl", rows), tokenizer, 6, 41)
    joined = "</s>".join(row["text"] for row in rows) + "</s>"
    for piece in decoded(found, tokenizer):
        assert piece in joined
        assert 2 <= piece.count("</s>") <= 4


def test_the_rest_of_a_long_document_is_packed_too(tokenizer: Any) -> None:
    long, short = torch.arange(25), torch.arange(100, 103)
    windows = text.cut([long, short], 10, EOS)
    assert windows.tolist() == [
        list(range(10)),
        list(range(10, 20)),
        [20, 21, 22, 23, 24, EOS, 100, 101, 102, EOS],
    ]
    assert text.cut([long, short], 10, None).tolist() == windows[:2].tolist()


def test_messages_go_through_the_chat_template_and_get_one_bos(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(chat=True)
    rows = [{"messages": [{"role": "user", "content": numbers(4, 10 * n)}]} for n in range(40)]
    found = load_calibration(lines(tmp_path / "chats.jsonl", rows), tokenizer, 10, 21)
    everything = torch.cat([found.calibration, found.held_out])
    assert (everything == BOS).sum(1).tolist() == [1] * 18
    assert any(piece.startswith("[user]") for piece in decoded(found, tokenizer))


def test_messages_need_a_chat_template(tmp_path: Path, tokenizer: Any) -> None:
    spec = lines(tmp_path / "chats.jsonl", [{"text": "fine"}, {"messages": [{"role": "user", "content": "hello"}]}])
    with pytest.raises(InputError) as caught:
        load_calibration(spec, tokenizer, 1, 8)
    assert caught.value.message == (
        f"{spec}, line 2: the tokenizer's chat template does not take these messages: "
        "it has none; give rows with `text` instead"
    )


def test_too_little_text_says_what_is_needed_and_found(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "short.txt"
    path.write_text("x" * 1000)
    with pytest.raises(InputError) as caught:
        load_calibration(str(path), tokenizer, 128, 512)
    assert caught.value.message == (
        "short.txt: too little text: 144 sequences of 512 tokens need 73728 tokens, found 1000 in 1 document, "
        "enough for 1 sequences; give more text, or lower --samples or --seq-len"
    )


def test_too_little_text_names_a_missing_eos_token(tmp_path: Path) -> None:
    spec = lines(tmp_path / "rows.jsonl", [{"text": "short"}] * 500)
    with pytest.raises(InputError, match=r"short documents cannot be packed: the tokenizer has no EOS token"):
        load_calibration(spec, byte_tokenizer(eos=False), 1, 32)


def test_a_sequence_must_have_room_for_text(tmp_path: Path, tokenizer: Any) -> None:
    with pytest.raises(InputError, match="--seq-len 1: must exceed the 1 tokens that begin every text; raise it"):
        load_calibration(None, tokenizer, 1, 1)


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        ("{broken", "expected a JSON object, found invalid JSON: Expecting property name enclosed in double quotes"),
        ("[1, 2]", "expected an object with a string `text` or a list `messages`, found a list"),
        ('{"body": "x"}', "expected an object with a string `text` or a list `messages`, found the fields body"),
        ('{"text": 3}', "expected an object with a string `text` or a list `messages`, found the fields text"),
    ],
)
def test_a_bad_row_is_named_with_its_line(tmp_path: Path, tokenizer: Any, row: str, complaint: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "fine"}\n\n' + row + "\n")
    with pytest.raises(InputError) as caught:
        load_calibration(str(path), tokenizer, 1, 8)
    assert caught.value.message == f"{path}, line 3: {complaint}"


@pytest.mark.parametrize("name", ["some.txt", "some.jsonl"])
def test_text_that_is_not_utf8_is_named_with_its_line(tmp_path: Path, tokenizer: Any, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"plain\nmore\ncaf\xe9\n")
    with pytest.raises(InputError) as caught:
        load_calibration(str(path), tokenizer, 1, 8)
    assert caught.value.message == (f"{path}, line 3: expected UTF-8 text, found byte 0xe9; convert the file to UTF-8")


def test_a_byte_order_mark_is_no_text(tmp_path: Path, tokenizer: Any) -> None:
    path = tmp_path / "some.txt"
    path.write_bytes(b"\xef\xbb\xbf" + b"ab" * 100)
    assert set("".join(decoded(load_calibration(str(path), tokenizer, 4, 11), tokenizer))) == {"a", "b"}


def test_plain_text_may_have_any_suffix(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "some.md").write_text(numbers(200) + " ü" * (1 << 16))  # a character is cut where the look ends
    (tmp_path / "some.txt").write_bytes((tmp_path / "some.md").read_bytes())
    plain, other = (load_calibration(str(tmp_path / f"some.{kind}"), tokenizer, 3, 31) for kind in ("txt", "md"))
    assert torch.equal(plain.calibration, other.calibration)
    for name, found in (("some.json", "found a .json file"), ("some.bin", "found a file that is no UTF-8 text")):
        (tmp_path / name).write_bytes(b"\xff\xfe{}")
        with pytest.raises(InputError, match=found):
            load_calibration(str(tmp_path / name), tokenizer, 1, 8)


def test_several_texts_are_mixed_in_equal_shares(tmp_path: Path, tokenizer: Any) -> None:
    texts = {"a.txt": numbers(2000), "b.md": numbers(300, start=50_000)}
    for name, content in texts.items():
        (tmp_path / name).write_text(content)
    names = [str(tmp_path / name) for name in texts]
    found = load_calibration(names, tokenizer, 21, 31, further=4)
    assert found.source == "a.txt + b.md"

    def share(tokens: torch.Tensor) -> list[str]:
        pieces = [tokenizer.decode(row[1:]) for row in tokens]
        return ["a" if piece in texts["a.txt"] else "b" for piece in pieces if piece in "".join(texts.values())]

    calibration = share(found.calibration)
    assert (calibration.count("a"), calibration.count("b")) == (11, 10)
    assert calibration != sorted(calibration)
    assert sorted(share(found.held_out)) == ["a"] * 4 + ["b"] * 4
    assert sorted(share(found.further)) == ["a"] * 2 + ["b"] * 2
    again, other = (load_calibration(names, tokenizer, 21, 31, seed=seed, further=4) for seed in (0, 1))
    assert torch.equal(again.calibration, found.calibration)
    assert not torch.equal(other.calibration, found.calibration)
    assert other.digest == found.digest != load_calibration(names[0], tokenizer, 1, 31).digest
    with pytest.raises(InputError, match="--samples: expected 2 or more, one for each --calibration, found 1"):
        load_calibration(names, tokenizer, 1, 31)


def test_the_built_in_text_is_enough_for_the_default_request(tokenizer: Any) -> None:
    found = load_calibration(None, tokenizer, 128, 512)
    assert found.source == BUILT_IN == "the built-in standard-library text"
    assert found.calibration.shape == (128, 512)
    assert len(found.digest) == 64


@pytest.mark.parametrize("name", ["empty.txt", "empty.jsonl", "empty.md"])
def test_an_empty_file_is_refused_before_anything_is_loaded(tmp_path: Path, name: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(InputError, match=f"^--text .*{name}: expected text, found an empty file$"):
        check_sources([str(tmp_path / name)], "text")


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("nothing.txt", ": no file nothing.txt"),
        ("some.csv", "found a file that is no UTF-8 text"),
        ("folder", "found a folder, and datasets, by name or in a folder, need the datasets package"),
        ("folder.txt", "found a folder, and datasets, by name or in a folder, need the datasets package"),
        ("a/b", "found no such file, and datasets, by name or in a folder, need the datasets package: pip install"),
    ],
)
def test_refused_texts_name_the_option_that_gave_them(tmp_path, tokenizer, monkeypatch, name, found) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "some.csv").write_bytes(b"a,\0b")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(InputError, match=rf"^--text.*{re.escape(found)}"):
        load_calibration(name, tokenizer, 1, 8, split="held_out", option="text")


class Rows(list):
    def shuffle(self, seed: int, buffer_size: int) -> "Rows":
        self.seed = seed
        return self


class FakeDatasets:
    """The part of the datasets package that is used, over rows in memory."""

    def __init__(self, rows: Rows) -> None:
        self.rows, self.asked = rows, ()

    def load_dataset(self, name: str, config: str | None, *, split: str, streaming: bool) -> Rows:
        self.asked = (name, config, split, streaming)
        if not self.rows:
            raise FileNotFoundError(f"Couldn't find {name}\nsecond line")
        return self.rows


def test_a_dataset_is_streamed_shuffled_by_the_seed(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDatasets(Rows({"text": numbers(20, 100 * n)} for n in range(50)))
    monkeypatch.setitem(sys.modules, "datasets", fake)
    found = load_calibration("someone/something:v2", tokenizer, 4, 31, seed=7)
    assert fake.asked == ("someone/something", "v2", "train", True)
    assert fake.rows.seed == 7
    assert found.source == "dataset someone/something:v2"
    assert found.calibration.shape == (4, 31)


def test_a_dataset_that_is_not_there_or_has_other_fields(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", FakeDatasets(Rows()))
    with pytest.raises(InputError) as error:
        load_calibration("someone/something", tokenizer, 1, 8)
    assert error.value.message.endswith("and no dataset: Couldn't find someone/something")
    monkeypatch.setitem(sys.modules, "datasets", FakeDatasets(Rows([{"body": 1}])))
    with pytest.raises(InputError, match=r"--calibration someone/something, row 0: expected .* found the fields body"):
        load_calibration("someone/something", tokenizer, 1, 8)


@pytest.mark.parametrize("name", ["big.txt", "big.jsonl"])
def test_a_big_file_is_read_in_parts_from_all_over(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(corpus, "_CELL", 4096)
    monkeypatch.setattr(text, "_READ_AT_LEAST", 1 << 14)
    path = tmp_path / name
    rows = [numbers(10, 10 * n) for n in range(4000)]
    path.write_text("".join(f"{row}\n" if name == "big.txt" else json.dumps({"text": row}) + "\n" for row in rows))
    seen = []
    parse = corpus.TextFile._parse
    monkeypatch.setattr(
        corpus.TextFile, "_parse", lambda self, start, raw: seen.append(len(raw)) or parse(self, start, raw)
    )
    found = load_calibration(str(path), tokenizer, 8, 61)
    assert sum(seen) <= 1 << 14 < path.stat().st_size / 10
    everything = "\n".join(rows)
    places = []
    for piece in decoded(found, tokenizer):
        part = max(piece.replace("</s>", "\n").split("\n"), key=len)
        assert part in everything
        places.append(everything.index(part) / len(everything))
    assert max(places) - min(places) > 0.3


def test_more_of_a_big_file_is_read_when_the_first_parts_are_too_little(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "_CELL", 64)
    monkeypatch.setattr(text, "_READ_AT_LEAST", 64)
    monkeypatch.setattr(text, "_BYTES_PER_TOKEN", 0)
    path = tmp_path / "big.txt"
    path.write_text("\n".join(numbers(1, n) for n in range(2000)))
    assert load_calibration(str(path), tokenizer, 40, 31).calibration.shape == (40, 31)


def test_long_texts_are_tokenized_in_blocks_without_loss(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens_of, "_BLOCK", 50)
    for whole in (numbers(100), "x" * 333, "line\n" * 77):
        blocks = list(tokens_of._blocks(whole))
        assert "".join(blocks) == whole
        assert max(map(len, blocks)) <= 50
        assert len(blocks) > 6

"""Calibration text: documents drawn from files, beginnings and ends of sequences, and refused
texts.
"""

import hashlib
import json
import re
import sys
from itertools import pairwise
from unittest.mock import MagicMock

import pytest
import torch
from helpers.cases import read_cases
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from kvfold.convert.errors import InputError
from kvfold.convert.measure.losses import cut_token_windows
from kvfold.convert.text import corpus, windows
from kvfold.convert.text.corpus import (
    check_seq_len,
    check_text_sources,
    choose_calibration_texts,
    open_corpus,
    parse_text_share,
)
from kvfold.convert.text.tokenizer import check_vocabulary, find_prefix_tokens, split_blocks
from kvfold.convert.text.windows import load_calibration

CASES = read_cases(__file__)
BOS = 256
EOS = 257


def byte_tokenizer(bos=True, eos=True, closes=False, chat=False):
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
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>" if eos else None,
        model_max_length=64,
    )
    if chat:
        tokenizer.chat_template = (
            "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}{% endfor"
            " %}{{ eos_token }}"
        )
    return tokenizer


def numbers(count, start=0):
    """Text in which every stretch of six characters occurs once."""
    return " ".join(f"{number:05d}" for number in range(start, start + count))


def load(name, tokenizer, samples, seq_len, *seed, **options):
    """The sequences of one text."""
    return load_calibration([(str(name), 1.0)], tokenizer, samples, seq_len, *seed, **options)


def decoded(tokens, tokenizer):
    rows = [*tokens.training_sequences, *tokens.held_out, *tokens.long]
    return [tokenizer.decode(row[1:]) for row in rows]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def tokenizer():
    return byte_tokenizer()


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "some.txt"
    path.write_text(numbers(2000))
    return path


def test_sequences_begin_with_bos_and_are_pieces_of_the_text_that_never_overlap(text, tokenizer):
    found, again, other = (load(text, tokenizer, 20, 62, seed) for seed in (1, 1, 2))
    assert (found.calibration.shape, found.held_out.shape) == ((20, 62), (8, 62))
    assert found.calibration.dtype == torch.int64
    assert (torch.cat([found.calibration, found.held_out])[:, 0] == BOS).all()
    assert (found.source, found.held_out_texts) == ("some.txt", ())
    assert found.digest == hashlib.sha256(text.read_bytes()).hexdigest()
    places = sorted(text.read_text().index(piece) for piece in decoded(found, tokenizer))
    assert all(after - before >= 61 for before, after in pairwise(places))
    assert torch.equal(found.calibration, again.calibration)
    assert torch.equal(found.held_out, again.held_out)
    assert not torch.equal(found.calibration, other.calibration)


def test_further_sequences_leave_the_others_as_they_are(text, tokenizer):
    plain, more = (load(text, tokenizer, 5, 31, further=count) for count in (0, 20))
    assert torch.equal(more.held_out, plain.held_out)
    assert torch.equal(plain.training_sequences, plain.calibration)
    assert torch.equal(more.training_sequences, torch.cat([plain.calibration, more.further]))
    assert len(torch.cat([more.training_sequences, more.held_out]).unique(dim=0)) == 5 + 8 + 20
    every = load(text, tokenizer, 5, 31, further=10**6)
    assert (
        len(every.training_sequences) + 8 == 12000 // 30
    )  # characters; a sequence begins with BOS


def test_long_sequences_are_further_text_and_leave_the_others_as_they_are(text, tokenizer):
    plain, found = (
        load(text, tokenizer, 5, 31, further=10**6, long_length=length) for length in (0, 100)
    )
    assert (len(plain.long), found.long.shape, found.long.dtype) == (0, (4, 100), torch.int64)
    assert torch.equal(found.calibration, plain.calibration)
    assert torch.equal(found.held_out, plain.held_out)
    pieces = [piece.removesuffix("</s>") for piece in decoded(found, tokenizer)]
    places = sorted((text.read_text().index(piece), len(piece)) for piece in pieces)
    assert all(place + length <= after for (place, length), (after, _) in pairwise(places))
    assert (found.long[:, 0] == BOS).all()


@pytest.mark.parametrize("length", [100, 200])
def test_a_text_without_room_for_every_long_sequence_has_none(tmp_path, tokenizer, length):
    """What is left of it has a place for one of 100 tokens."""
    (tmp_path / "short.txt").write_text(numbers(90))
    assert not len(load(tmp_path / "short.txt", tokenizer, 4, 31, long_length=length).long)


@pytest.mark.parametrize(
    ("options", "prefix"), [({}, [BOS]), ({"closes": True}, [BOS]), ({"bos": False}, [])]
)
def test_windows_for_perplexity_begin_with_the_prefix_alone(options, prefix):
    tokenizer = byte_tokenizer(**options)
    words = numbers(100)
    body = 41 - len(prefix)
    assert find_prefix_tokens(tokenizer) == prefix
    found = cut_token_windows(tokenizer, words, 5, 41)
    assert found[:, : len(prefix)].tolist() == [prefix] * 5
    text = "".join(tokenizer.decode(row[len(prefix) :]) for row in found)
    assert text == words[: 5 * body]
    assert cut_token_windows(tokenizer, words, 99, 41).shape == (len(words) // body, 41)


def test_sequences_of_long_documents_stay_inside_them(tmp_path):
    tokenizer = byte_tokenizer(eos=False)
    rows = [{"text": numbers(30, start=1000 * index)} for index in range(10)]
    found = load(write_lines(tmp_path / "rows.jsonl", rows), tokenizer, 10, 61)
    assert all(any(piece in row["text"] for row in rows) for piece in decoded(found, tokenizer))


def test_short_documents_are_packed_with_eos_between(tmp_path, tokenizer):
    rows = [{"text": f"document {index:03d}"} for index in range(60)]
    found = load(write_lines(tmp_path / "rows.jsonl", rows), tokenizer, 6, 41)
    packed = "</s>".join(row["text"] for row in rows) + "</s>"
    for piece in decoded(found, tokenizer):
        assert piece in packed
        assert 2 <= piece.count("</s>") <= 4


def test_messages_go_through_the_chat_template_and_get_one_bos(tmp_path):
    tokenizer = byte_tokenizer(chat=True)
    rows = [{"messages": [{"role": "user", "content": numbers(4, 10 * n)}]} for n in range(40)]
    found = load(write_lines(tmp_path / "chats.jsonl", rows), tokenizer, 10, 21)
    everything = torch.cat([found.calibration, found.held_out])
    assert (everything == BOS).sum(1).tolist() == [1] * 18
    assert any(piece.startswith("[user]") for piece in decoded(found, tokenizer))


@pytest.mark.parametrize("chat", [True, False])
@pytest.mark.parametrize("row", CASES["rows"], ids=lambda row: next(iter(row)))
def test_rows_as_people_have_them_are_chats_of_two_turns(tmp_path, row, chat, refused):
    path = write_lines(tmp_path / "rows.jsonl", [row])
    corpus = open_corpus(str(path), byte_tokenizer(chat=chat), 0)
    if "conversations" in row and not chat:
        with refused():
            corpus.read_documents(1 << 12)
        return
    (text,), _ = corpus.read_documents(1 << 12)
    expected = "[user]hi[assistant]yes" if chat else "hi\n\nyes"
    assert text.replace("<s>", "").replace("</s>", "") == expected


def test_a_template_that_writes_much_is_cut_at_what_is_of_use(tmp_path):
    tokenizer = byte_tokenizer(chat=True)
    tokenizer.chat_template = "{{ 'ab ' * 10**7 }}"
    rows = [{"messages": [{"role": "user", "content": "hi"}]}] * 40
    corpus = open_corpus(str(write_lines(tmp_path / "chats.jsonl", rows)), tokenizer, 0)
    documents, complete = corpus.read_documents(1 << 12)
    assert (sum(map(len, documents)), complete) == (4 << 12, False)


@pytest.mark.parametrize(
    "row",
    [
        b"{broken",
        b"[1, 2]",
        b'{"body": "x"}',
        b'{"text": 3}',
        b'{"messages": [{"role": "user", "content": "hi"}]}',
        b'{"text": "\\ud800"}',
        b'{"messages": ["\\ud800"]}',
        b'{"conversations": [{"from": [], "value": 3}]}',
        b'{"prompt": [], "completion": "x"}',
        b"[" * 100_000,
    ],
    ids=lambda row: row[:30].decode(),
)
def test_a_row_that_gives_no_text_is_named_with_its_line(tmp_path, row, refused):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n' + row + b"\n")
    with refused("line 3"):
        load(path, byte_tokenizer(eos=False), 1, 32)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b'{"text": "a"}\n\ncaf\xe9\n', "offset 18"),
        (b"", "empty"),
        (b'{"text": "short"}\n' * 40, "0 of 9 sequences"),
    ],
    ids=["latin-1", "empty", "short"],
)
def test_files_that_give_no_sequences(tmp_path, content, named, refused):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(content)
    with refused(named):
        load(path, byte_tokenizer(eos=False), 1, 32)


def test_sequences_that_cannot_be(text, tokenizer, refused):
    for work in (
        lambda: load(text, tokenizer, 1, 1),
        lambda: check_seq_len(65, 64, "tiny"),
        lambda: check_vocabulary(torch.tensor([[3, 97]]), 97, "tiny"),
    ):
        with refused():
            work()
    check_seq_len(64, None, "tiny")
    check_vocabulary(torch.tensor([3, 96]), 97, "tiny")


FILES = {
    "some.csv": b"a,\0b",
    "some.json": b"[]",
    "empty.md": b"",
    "utf16.txt": "words".encode("utf-16"),
}


@pytest.mark.parametrize("name", ["no.txt", "a/b", "folder", "some.txt:3", *FILES])
def test_refused_texts_name_the_option_that_gave_them(tmp_path, monkeypatch, text, name, told):
    """Only calibration texts have shares."""
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for file, content in FILES.items():
        (tmp_path / file).write_bytes(content)
    for refuses in (
        lambda: check_text_sources([name], "text"),
        lambda: open_corpus(name, None, 0, option="text"),
    ):
        with pytest.raises(InputError) as raised:
            refuses()
        assert raised.value.field == "text"
    told(raised.value)


def test_plain_text_may_have_any_suffix_and_a_byte_order_mark(tmp_path, tokenizer):
    content = (numbers(200) + " ü" * (1 << 16)).encode()  # a character is cut where the look ends
    (tmp_path / "some.md").write_bytes(content)
    (tmp_path / "some.txt").write_bytes(b"\xef\xbb\xbf" + content)
    plain, other = (load(tmp_path / f"some.{kind}", tokenizer, 3, 31) for kind in ("txt", "md"))
    assert torch.equal(plain.calibration, other.calibration)


@pytest.mark.parametrize(("share", "counts"), [("", (11, 4, 2)), (":3", (16, 6, 3))])
def test_texts_are_mixed_in_their_shares(text, tokenizer, share, counts):
    text.with_name("b:c.txt").write_text(numbers(2000, start=50_000))
    texts = [parse_text_share(name) for name in (f"{text}{share}", f"{text.parent}/b:c.txt")]
    found, again, other = (
        load_calibration(texts, tokenizer, 21, 31, seed, further=4) for seed in (0, 0, 1)
    )
    assert found.source == f"some.txt{share} + b:c.txt"
    for rows, count in zip((found.calibration, found.held_out, found.further), counts, strict=True):
        of_first = [tokenizer.decode(row[1:]) in text.read_text() for row in rows]
        assert sum(of_first) == count
        assert len(rows) < 21 or of_first != sorted(of_first, reverse=True)  # shuffled
    assert torch.equal(again.calibration, found.calibration)
    assert not torch.equal(other.calibration, found.calibration)
    assert other.digest == found.digest != load(text, tokenizer, 1, 31).digest


def test_a_share_is_a_weight_above_zero(text, refused):
    """What follows the colon and is no number belongs to the name."""
    for spec in (f"{text}:x", f"{text}:1e3", f"{text}:0"):
        with refused(field="calibration"):
            check_text_sources([spec])


def test_written_sequences_take_their_share_of_every_set(tmp_path, tokenizer):
    (tmp_path / "a.txt").write_text(numbers(1000))
    asked = []

    def write(count):
        asked.append(count)
        return torch.full((count, 31), 7)

    texts = [(str(tmp_path / "a.txt"), 1.0), ("self", 0.5)]
    found = load_calibration(texts, tokenizer, 20, 31, further=6, write=write)
    written = [(rows == 7).all(1) for rows in (found.calibration, found.held_out, found.further)]
    assert [int(rows.sum()) for rows in written] == [7, 3, 2]
    assert found.source == "a.txt + self:0.5"
    assert [name == "self:0.5" for name in found.held_out_texts] == written[1].tolist()
    # Further sequences are as many as suit those of a short text.
    short = load_calibration(texts, tokenizer, 20, 31, further=10**6, write=write)
    others = int((short.further[:, 1] != 7).sum())
    assert asked[1] == 10 + -(-others // 2)


def test_a_text_that_is_too_short_is_told_with_all_that_was_asked_of_it(tmp_path, tokenizer):
    path = tmp_path / "short.txt"
    path.write_text(numbers(100))
    with pytest.raises(InputError, match=r"of 513 sequences .* lower --polish, or add --repeat"):
        load(path, tokenizer, 100, 8, further=400, fewer=False)


@pytest.fixture
def datasets(monkeypatch):
    """In the place of the datasets package."""
    fake = MagicMock(__spec__="datasets")
    monkeypatch.setitem(sys.modules, "datasets", fake)
    return fake


def test_a_dataset_is_streamed_shuffled_by_the_seed(tokenizer, datasets):
    shuffle = datasets.load_dataset.return_value.shuffle
    shuffle.return_value = [{"text": numbers(20, 100 * n)} for n in range(50)]
    found = load("someone/something:v2", tokenizer, 4, 31, seed=7)
    datasets.load_dataset.assert_called_once_with(
        "someone/something", "v2", split="train", streaming=True
    )
    assert shuffle.call_args.kwargs["seed"] == 7
    assert found.source == "dataset someone/something:v2"
    assert found.calibration.shape == (4, 31)


def test_a_dataset_that_is_not_there_or_has_other_fields(tokenizer, datasets, refused):
    datasets.load_dataset.return_value.shuffle.return_value = [{"body": 1}]
    for error in (None, FileNotFoundError("Couldn't find it\nsecond line")):
        datasets.load_dataset.side_effect = error
        with refused():
            load("someone/something", tokenizer, 1, 8)


@pytest.mark.parametrize("name", ["big.txt", "big.jsonl"])
def test_a_big_file_is_read_in_parts_from_all_over(tmp_path, tokenizer, monkeypatch, name):
    monkeypatch.setattr(corpus, "_CELL", 4096)
    monkeypatch.setattr(windows, "_READ_AT_LEAST", 1 << 14)
    path = tmp_path / name
    rows = [numbers(10, 10 * n) for n in range(4000)]
    lines = rows if name == "big.txt" else [json.dumps({"text": row}) for row in rows]
    path.write_text("\n".join(lines))
    read = open_corpus(str(path), tokenizer, 0).read_documents(1 << 14)[0]
    assert sum(map(len, read)) <= 1 << 14 < path.stat().st_size / 10
    places = [int(number) for number in re.findall(r"\b\d{5}\b", "\n".join(read))]
    assert max(places) - min(places) > 12_000
    assert load(path, tokenizer, 8, 61).calibration.shape == (8, 61)


def test_more_of_a_big_file_is_read_when_the_first_parts_are_too_little(
    tmp_path, tokenizer, monkeypatch
):
    monkeypatch.setattr(corpus, "_CELL", 64)
    monkeypatch.setattr(windows, "_READ_AT_LEAST", 64)
    monkeypatch.setattr(windows, "_BYTES_PER_TOKEN", 0)
    path = tmp_path / "big.txt"
    path.write_text("\n".join(numbers(1, n) for n in range(2000)))
    assert load(path, tokenizer, 40, 31).calibration.shape == (40, 31)


@pytest.mark.parametrize("text", [numbers(100), "x" * 333, "line\n" * 77])
def test_long_texts_are_tokenized_in_blocks_without_loss(text):
    blocks = split_blocks(text, 50)
    assert "".join(blocks) == text
    assert max(map(len, blocks)) <= 50 < len(text) / 6


@pytest.mark.parametrize(("given", "chats", "texts"), CASES["shares"], ids=str)
def test_a_chat_model_writes_a_third_of_the_text_unless_told_otherwise(given, chats, texts):
    assert choose_calibration_texts(given, chats) == [*map(tuple, texts)]

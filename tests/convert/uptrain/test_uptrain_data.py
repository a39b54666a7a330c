"""Text for uptraining: streamed from cells, packed, divided over processes, and found again after a kill."""

import json
from collections import Counter
from itertools import islice

import pytest
import torch

from kvfold.convert.errors import InputError
from kvfold.convert.text.documents import Document
from kvfold.convert.uptrain import text as uptrain_text
from kvfold.convert.uptrain.data import PackedText, Place, Share, held_out, packed, share_of
from kvfold.convert.uptrain.text import open_text

BOS, EOS = 1, 2


class Letters:
    """A token per character, BOS before a text."""

    def __init__(self, eos=EOS, bos=True):
        self.eos_token_id, self.bos = eos, bos

    def __call__(self, texts, add_special_tokens=True, verbose=True):
        if isinstance(texts, str):
            ids = [ord(letter) + 10 for letter in texts]
            return {"input_ids": [BOS, *ids] if add_special_tokens and self.bos else ids}
        return {"input_ids": [self(text, add_special_tokens)["input_ids"] for text in texts]}


def read(tokens):
    return "".join({BOS: "<", EOS: ">"}.get(token) or chr(token - 10) for token in tokens.flatten().tolist())


def numbered(folder, lines=3000):
    path = folder / "numbered.jsonl"
    path.write_text("".join(json.dumps({"text": f"[{n:06d}]"}) + "\n" for n in range(lines)))
    return path


def stream(path, share, seed=0, start=None, length=32):
    return PackedText(open_text(str(path), None, seed), Letters(), length, seed, share, start)


def taken(path, count, **options):
    return torch.stack(list(islice(stream(path, Share(1, 1), **options).sequences(), count)))


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(uptrain_text, "BLOCK", 8192)


def test_documents_are_packed_with_what_begins_and_ends_them():
    documents = [Document("abc"), Document("de"), Document("fghi")]
    assert read(packed(documents, Letters(), [BOS], 5)) == "<abc><de><fghi>"
    assert read(packed(documents, Letters(), [], 4)) == "abc>de>fghi>"[:12]


def test_a_template_that_ends_a_text_itself_gets_no_second_end():
    class Templated(Letters):
        def __call__(self, texts, **_):
            return {"input_ids": [[BOS, 75, EOS] for _ in texts]}

    rendered = [Document("x", rendered=True)] * 3
    assert read(packed(rendered, Templated(), [BOS], 3)) == "<A><A><A>"


def test_without_an_end_token_no_sequence_holds_two_documents():
    found = packed([Document("aaaaaaa"), Document("bbbbb"), Document("c")], Letters(eos=None), [BOS], 3)
    assert [read(row) for row in found] == ["<aa", "aaa", "<bb", "bbb"]


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_cells_hold_every_line_once(tmp_path, suffix):
    path = tmp_path / f"text{suffix}"
    texts = [f"{n} häß€𝄞 " + "x" * (n * 37 % 500) for n in range(400)] + ["€" * 6000, "end"]
    rows = texts if suffix == ".txt" else [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    path.write_text("\n".join(rows), encoding="utf-8")
    text = open_text(str(path), None, 3)
    assert len(text.cells) > 10
    cells = [text.documents(cell) for cell in sorted(text.cells)]
    if suffix == ".txt":
        assert "".join(document.text for cell in cells for document in cell) == path.read_text(encoding="utf-8")
    else:
        assert [document.text for cell in cells for document in cell] == texts


def test_a_pass_reads_all_of_the_text_and_the_next_one_in_another_order(tmp_path, small_blocks):
    text = open_text(str(numbered(tmp_path)), None, 0)
    per_pass = text.blocks_per_pass
    assert per_pass > 3
    blocks = list(islice(text.blocks(0), 2 * per_pass))
    passes = [[d.text for block in part for d in block] for part in (blocks[:per_pass], blocks[per_pass:])]
    assert Counter(passes[0]) == Counter(passes[1]) == Counter(f"[{n:06d}]" for n in range(3000))
    assert passes[0] != passes[1]
    assert [d.text for d in next(text.blocks(per_pass + 1))] == [d.text for d in blocks[per_pass + 1]]


def test_a_file_is_not_read_whole(tmp_path, monkeypatch):
    path = tmp_path / "long.txt"
    path.write_text(("word " * 20 + "\n") * 400_000)
    seen, parse = [], uptrain_text.parse_stretch
    monkeypatch.setattr(
        uptrain_text,
        "parse_stretch",
        lambda path, render, start, raw: seen.append(len(raw)) or parse(path, render, start, raw),
    )
    assert len(taken(path, 50)) == 50
    assert sum(seen) < 1.5 * uptrain_text.BLOCK < path.stat().st_size / 5


def test_the_seed_alone_decides_the_order(tmp_path, small_blocks):
    path = numbered(tmp_path)
    assert torch.equal(taken(path, 900), taken(path, 900))
    assert not torch.equal(taken(path, 900), taken(path, 900, seed=1))
    lines = Counter(part for part in read(taken(path, 100)).split(">") if len(part) == 9)
    assert len(lines) > 200
    places = [int(line[2:8]) for line in lines]
    assert max(places) - min(places) > 1000  # a batch is from all over a block, not one stretch


@pytest.mark.parametrize(("world", "micro"), [(1, 8), (2, 4), (2, 2), (4, 1)])
def test_processes_share_the_global_batch_of_one(tmp_path, world, micro):
    path = numbered(tmp_path)
    whole = taken(path, 24).view(3, 8, 32)
    shares = [share_of(8, micro, rank, world) for rank in range(world)]
    batches = [
        torch.cat([batch["input_ids"] for batch in islice(stream(path, share), 3 * share.accumulation)])
        for share in shares
    ]
    steps = torch.cat([part.view(3, 8 // world, 32) for part in batches], dim=1)
    assert torch.equal(steps, whole)


@pytest.mark.parametrize("behind", [0, 1, 77, 500, 1100])
def test_a_stream_goes_on_where_it_was(tmp_path, small_blocks, behind):
    path = numbered(tmp_path)
    whole = taken(path, 1300)
    first = stream(path, Share(1, 1))
    list(islice(first.sequences(), behind + 9))  # what was fetched beyond does not matter
    place = first.place(behind)
    assert place.block > 0 or behind < 300
    again = stream(path, Share(1, 1), start=Place(**json.loads(json.dumps(place.to_dict()))))
    assert torch.equal(torch.stack(list(islice(again.sequences(), 1300 - behind))), whole[behind:])
    assert again.place(behind) == place


def test_what_is_kept_aside_is_never_trained_on(tmp_path):
    path = numbered(tmp_path)
    aside, rest = held_out(open_text(str(path), None, 0), Letters(), 32, 40)
    assert aside.shape == (40, 32)
    kept = {part for part in read(aside).split(">") if len(part) == 9}
    blocks = islice(rest.blocks(0), 2 * rest.blocks_per_pass)
    trained = {f"<{document.text}" for block in blocks for document in block}
    assert len(kept) > 100
    assert not kept & trained
    assert len(trained) > 0.8 * 3000


@pytest.mark.parametrize(
    ("total", "micro", "world", "expected"),
    [(16, 4, 1, (4, 4)), (12, 5, 2, (3, 2)), (7, 4, 1, (1, 7)), (8, 99, 2, (4, 1))],
)
def test_a_global_batch_is_divided(total, micro, world, expected):
    share = share_of(total, micro, 0, world)
    assert (share.micro, share.accumulation) == expected


def test_a_global_batch_that_does_not_divide():
    with pytest.raises(InputError, match="--batch-tokens: 6 sequences a step do not divide over 4 processes"):
        share_of(6, 1, 0, 4)


def test_text_that_is_too_short(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("a few words")
    with pytest.raises(InputError, match=r"short.txt: too little text: expected at least 1 sequence of 32 tokens"):
        taken(path, 1)
    with pytest.raises(InputError, match=r"too little text to keep 4 sequences of 32 tokens aside .*, found 0; give"):
        held_out(open_text(str(path), None, 0), Letters(), 32, 4)
    with pytest.raises(InputError, match="expected at least 4 sequences of 32 tokens"):
        held_out(open_text(str(path), None, 0), Letters(), 32, 4, whole=True)


def test_tokens_that_the_model_does_not_know(tmp_path):
    path = numbered(tmp_path, 400)
    text = open_text(str(path), None, 0)
    wrong = PackedText(text, Letters(), 32, 0, Share(1, 1), vocabulary=103)
    with pytest.raises(
        InputError, match=r"numbered.jsonl: its tokenizer gives token 103, but the model knows 103 tokens"
    ):
        next(iter(wrong))
    assert len(next(iter(PackedText(text, Letters(), 32, 0, Share(1, 1), vocabulary=104)))["input_ids"]) == 1


def test_texts_that_cannot_be_read(tmp_path):
    with pytest.raises(InputError, match=r"--eval-text: no file nothing\.txt"):
        open_text("nothing.txt", None, 0, "--eval-text")
    (tmp_path / "text.md").write_text("x")
    with pytest.raises(InputError, match=r"expected a .txt or .jsonl file or the name of a dataset"):
        open_text(str(tmp_path / "text.md"), None, 0)
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "fine"}\n{"text": 3}\n')
    with pytest.raises(InputError, match=r"bad.jsonl, line 2: expected an object with a string `text`"):
        next(open_text(str(path), None, 0).blocks(0))


def test_a_dataset_streams_and_begins_anew(monkeypatch, small_blocks):
    rows = [Document(f"[{n:06d}]" * 8) for n in range(500)]
    monkeypatch.setattr(uptrain_text, "dataset_documents", lambda *_: iter(rows))
    text = open_text("some/name", None, 0)
    assert text.name == "dataset some/name"
    aside, rest = held_out(text, Letters(), 32, 10)
    assert read(aside).startswith("<[000000]")
    few = list(islice(rest.blocks(0), 12))
    assert [d.text for d in few[7]] == [d.text for d in next(rest.blocks(7))]
    seen = [document.text for block in few for document in block]
    first = rest.skipped
    assert first > 4
    assert seen[: 500 - first] == [row.text for row in rows[first:]]
    assert seen[500 - first : 510 - first] == [row.text for row in rows[first : first + 10]]

"""The folder of a run: its tokens, read from all over the text, packed, held out, permuted and
divided, and what an interrupted run left, which is believed only where it is what was written.
"""

import json
import os
import re
import time
from collections import Counter, namedtuple
from dataclasses import replace
from datetime import timedelta
from itertools import islice
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from accelerate.data_loader import BatchSamplerShard, skip_first_batches
from helpers import forked
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from kvfold.convert.checkpoint import atomic
from kvfold.convert.checkpoint.atomic import output_lock
from kvfold.convert.data import demo_folder
from kvfold.convert.errors import InputError
from kvfold.convert.processes import destroy_process_group, on_rank0
from kvfold.convert.text import corpus as texts
from kvfold.convert.text.corpus import Document, open_corpus
from kvfold.convert.text.tokenizer import tokenize
from kvfold.convert.uptrain import work
from kvfold.convert.uptrain.request import UptrainRequest
from kvfold.convert.uptrain.run import uptrain_checkpoint
from kvfold.convert.uptrain.trainer import divide_batch
from kvfold.convert.uptrain.work import (
    COMPLETE,
    TokenPlan,
    TrainingOrder,
    last_checkpoint,
    make_tokens,
    mark_complete,
    open_tokens,
    packed,
)

BOS = 1
EOS = 2


class Letters:
    """A token per character, BOS before a text."""

    def __init__(self, eos=EOS, bos=True):
        self.eos_token_id = eos
        self.bos = bos

    def __call__(self, texts, add_special_tokens=True, verbose=True):
        if isinstance(texts, str):
            ids = [ord(letter) + 10 for letter in texts]
            return {"input_ids": [BOS, *ids] if add_special_tokens and self.bos else ids}
        return {"input_ids": [self(text, add_special_tokens)["input_ids"] for text in texts]}


def read(tokens):
    return "".join(
        {BOS: "<", EOS: ">"}.get(token) or chr(token - 10) for token in tokens.flatten().tolist()
    )


def numbered(folder, lines=3000):
    path = folder / "numbered.jsonl"
    path.write_text("".join(json.dumps({"text": f"[{n:06d}]"}) + "\n" for n in range(lines)))
    return path


def plan_of(path, training=100, held_out=0, eval_text=None, seed=0, length=32, vocabulary=999):
    text, other = (
        None if spec is None else open_corpus(str(spec), None, seed, option=option)
        for spec, option in ((path, "--text"), (eval_text, "--eval-text"))
    )
    return TokenPlan(text, other, Letters(), "tiny", vocabulary, length, training, held_out, seed)


def made(folder, plan):
    folder.mkdir(exist_ok=True)
    make_tokens(plan, folder)
    return open_tokens(plan, folder)


def rows_of(documents, tokenizer, prefix, length):
    return torch.cat(
        [*packed(tokenize(tokenizer, prefix, documents), prefix, tokenizer.eos_token_id, length)]
    )


def whole_lines(tokens):
    return {part for part in read(tokens).split(">") if len(part) == 9}


def test_documents_are_packed_with_what_begins_and_ends_them():
    class Templated(Letters):
        def __call__(self, texts, **_):
            return {"input_ids": [[BOS, 75, EOS] for _ in texts]}

    documents = [Document("abc"), Document("de"), Document("fghi")]
    assert read(rows_of(documents, Letters(), [BOS], 5)) == "<abc><de><fghi>"
    assert read(rows_of(documents, Letters(), [], 4)) == "abc>de>fghi>"
    rendered = [Document("x", rendered=True)] * 3
    assert (
        read(rows_of(rendered, Templated(), [BOS], 3)) == "<A><A><A>"
    )  # the template ends the text itself
    found = rows_of(
        [Document("aaaaaaa"), Document("bbbbb"), Document("c")], Letters(eos=None), [BOS], 3
    )
    assert [read(row) for row in found] == [
        "<aa",
        "aaa",
        "<bb",
        "bbb",
    ]  # without an end token documents stay apart


@pytest.mark.parametrize("suffix", [".txt", ".jsonl"])
def test_parts_hold_every_line_once(tmp_path, suffix):
    path = tmp_path / f"text{suffix}"
    texts = [f"{n} häß€𝄞 " + "x" * (n * 37 % 500) for n in range(400)] + ["€" * 6000, "end"]
    rows = (
        texts
        if suffix == ".txt"
        else [json.dumps({"text": text}, ensure_ascii=False) for text in texts]
    )
    path.write_text("\n".join(rows), encoding="utf-8")
    count, parts = open_corpus(str(path), None, 3).parts()
    found = [[document.text for document in part] for part in parts]
    assert len(found) == count > 10
    if suffix == ".txt":
        pieces = [piece for part in found for piece in part]
        content = path.read_text(encoding="utf-8")
        assert sum(map(len, pieces)) == len(content)
        assert "".join(sorted(pieces, key=content.index)) == content
    else:
        assert Counter(text for part in found for text in part) == Counter(texts)


def test_an_epoch_takes_every_sequence_once_in_an_order_that_the_seed_decides(tmp_path):
    path = numbered(tmp_path)
    first, again, other = (
        made(tmp_path / name, plan_of(path, training=5000, seed=seed)).training
        for name, seed in (("first", 0), ("again", 0), ("other", 1))
    )
    count = len(first)
    assert 930 < count < 940  # all the text: 3000 documents of 10 tokens
    assert len(whole_lines(first)) > 0.7 * 3000
    assert torch.equal(first, again)
    assert not torch.equal(first[:100], other[:100])
    order, same, drawn = (
        TrainingOrder(*each) for each in ((first, 5000, 0), (again, 5000, 0), (first, 5000, 1))
    )
    assert len(order) == 5000
    epochs = [
        [tuple(order[i]["input_ids"].tolist()) for i in range(begin, begin + count)]
        for begin in (0, count)
    ]
    assert Counter(epochs[0]) == Counter(epochs[1]) == Counter(map(tuple, first.tolist()))
    assert epochs[0] != epochs[1]
    assert tuple(order[7]["input_ids"].tolist()) == epochs[0][7]  # back in the epoch before
    assert all(torch.equal(order[i]["input_ids"], same[i]["input_ids"]) for i in range(100))
    assert not all(torch.equal(order[i]["input_ids"], drawn[i]["input_ids"]) for i in range(100))
    numbers = [int(line[2:8]) for line in whole_lines(torch.tensor(epochs[0][:100]))]
    assert max(numbers) - min(numbers) > 1000  # a batch is from all over the text


def test_a_large_file_is_not_read_whole(tmp_path, monkeypatch):
    path = tmp_path / "long.txt"
    path.write_text("".join(f"{n:07d} " + "word " * 18 + "\n" for n in range(100_000)))
    sizes = []
    parse = texts.TextFile._parse
    monkeypatch.setattr(
        texts.TextFile,
        "_parse",
        lambda self, start, raw: sizes.append(len(raw)) or parse(self, start, raw),
    )
    tokens = made(tmp_path / "run", plan_of(path, training=6_000, length=64))
    assert len(tokens.training) == 6_000
    assert sum(sizes) < 2 * 6_000 * 64 < path.stat().st_size / 9
    lines = [
        int(line[:7])
        for line in read(tokens.training[::10]).split("\n")
        if len(line) > 90 and line[0] != "<"
    ]
    assert max(lines) - min(lines) > 30_000  # from all over the file


@pytest.mark.parametrize(("world", "micro"), [(1, 8), (1, 5), (2, 99), (2, 2), (4, 1)])
@pytest.mark.parametrize("behind", [0, 2])
def test_processes_share_the_global_batch_of_one(world, micro, behind):
    """As Trainer and accelerate divide it, from the start and resumed after ``behind`` steps."""
    order = TrainingOrder(torch.arange(24).view(24, 1), 24, seed=3)
    expected = torch.stack([order[i]["input_ids"] for i in range(24)]).view(3, 8)[behind:]
    micro, accumulation = divide_batch(8, micro, world)
    assert not torch.equal(expected.flatten(), expected.flatten().sort().values)
    parts = []
    for rank in range(world):
        batches = BatchSampler(SequentialSampler(order), micro, drop_last=False)
        shard = DataLoader(order, batch_sampler=BatchSamplerShard(batches, world, rank))
        rows = [batch["input_ids"] for batch in skip_first_batches(shard, behind * accumulation)]
        parts.append(torch.cat(rows).view(3 - behind, accumulation, micro))
    assert torch.equal(
        torch.stack(parts, dim=2).view(3 - behind, 8), expected
    )  # processes take turns


def test_a_batch_that_does_not_divide():
    with pytest.raises(
        InputError, match="--batch-tokens: 6 sequences per step cannot be divided evenly among 4"
    ):
        divide_batch(6, 1, 4)


def test_held_out_text_is_never_trained_on(tmp_path):
    path = numbered(tmp_path)
    other = tmp_path / "other.txt"
    tokens = made(tmp_path / "run", plan_of(path, training=5000, held_out=40))
    assert tokens.held_out.shape == (40, 32)
    held_out = whole_lines(tokens.held_out)
    trained = whole_lines(tokens.training)
    assert len(held_out) > 100
    assert not held_out & trained
    assert len(tokens.training) * 32 > 0.95 * (
        30_000 - 40 * 32
    )  # only the document at the border is lost
    other.write_text("something else entirely, " * 20)
    tokens = made(tmp_path / "other", plan_of(path, training=900, held_out=15, eval_text=other))
    assert tokens.held_out.shape == (15, 32)
    assert read(tokens.held_out)[1:] in other.read_text()
    assert len(tokens.training) == 900


def test_too_little_text(tmp_path, told):
    short = tmp_path / "short.txt"
    long = numbered(tmp_path)
    short.write_text("a few words")
    for plan in (
        plan_of(short),
        plan_of(long, held_out=4, eval_text=short),
        plan_of(short, held_out=4),
        plan_of(long, held_out=400),  # at most a fifth of a file is held out: 187 of 938 sequences
    ):
        with pytest.raises(InputError) as raised:
            made(tmp_path / "run", plan)
        told(raised.value)


def test_tokens_that_the_model_does_not_know(tmp_path):
    path = numbered(tmp_path, 400)
    with pytest.raises(
        InputError, match=r"tiny: its tokenizer produces token id 103, but .* has only 103 tokens"
    ):
        made(tmp_path / "run", plan_of(path, vocabulary=103))
    assert made(tmp_path / "run", plan_of(path, vocabulary=104)).training.shape == (100, 32)


def test_a_dataset_is_streamed_and_read_no_further_than_needed(tmp_path, monkeypatch):
    taken = []

    def documents(*_):
        for n in range(1_000_000):
            taken.append(n)
            yield Document(f"[{n:06d}]" * 8)

    monkeypatch.setattr(texts, "find_spec", lambda name: name)
    monkeypatch.setattr(texts, "_dataset_documents", documents)
    monkeypatch.setattr("kvfold.convert.text.tokenizer._BATCH_CHARS", 1000)
    plan = plan_of("some/name", training=200, held_out=10)
    tokens = made(tmp_path / "run", plan)
    held_out, trained = (
        set(re.findall(r"\[\d{6}\]", read(part))) for part in (tokens.held_out, tokens.training)
    )
    assert (min(held_out), max(held_out)) == ("[000000]", "[000004]")
    assert min(trained) == "[000005]"
    assert len(tokens.training) == 200
    assert len(taken) < 140  # 66 tokens each
    rows = [Document(f"[{n:06d}]" * 8) for n in range(20)]
    monkeypatch.setattr(texts, "_dataset_documents", lambda *_: iter(rows))
    assert len(made(tmp_path / "all", plan_of("some/name", training=200)).training) == 20 * 66 // 32


def test_tokens_are_opened_only_for_the_run_they_were_made_for(tmp_path):
    path = numbered(tmp_path)
    plan = plan_of(path, training=50, held_out=4)
    assert open_tokens(plan, tmp_path) is None
    tokens = made(tmp_path / "run", plan)
    again = open_tokens(plan_of(path, training=50, held_out=4), tmp_path / "run")
    assert torch.equal(again.training, tokens.training)
    assert torch.equal(again.held_out, tokens.held_out)
    for change in (
        {"seed": 1},
        {"training": 51},
        {"length": 16},
        {"vocabulary": 998},
        {"tokenizer": Letters(bos=False)},
    ):
        assert open_tokens(replace(plan, **change), tmp_path / "run") is None, change
    content = path.read_bytes()
    with path.open("a") as file:
        file.write('{"text": "more"}\n')
    assert open_tokens(plan_of(path, training=50, held_out=4), tmp_path / "run") is None
    path.write_bytes(content.replace(b"[000700]", b"[000701]"))
    assert open_tokens(plan, tmp_path / "run") is None
    path.write_bytes(content)
    assert open_tokens(plan, tmp_path / "run") is not None
    file = tmp_path / "run" / "tokens.bin"
    file.write_bytes(file.read_bytes()[:-4])
    assert open_tokens(plan, tmp_path / "run") is None


def test_the_digest_of_a_large_file_is_of_cells_from_its_first_to_its_last_byte(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(texts, "_CELL", 1000)
    monkeypatch.setattr(texts, "_LARGEST_WHOLE", 1 << 20)
    path = tmp_path / "long.txt"
    content = b"a" * (63 * 20_000 + 1000)
    path.write_bytes(content)
    text = open_corpus(str(path), None, 0)
    before = text.digest(sampled=True)
    for place in (0, 1_000_000, len(content) - 1):
        path.write_bytes(content[:place] + b"b" + content[place + 1 :])
        assert text.digest(sampled=True) != before, place


def test_a_text_edited_while_it_is_tokenized_is_another_one(tmp_path, monkeypatch):
    path = numbered(tmp_path)
    content = path.read_bytes()

    def edited(*arguments):
        yield from tokenize(*arguments)
        path.write_bytes(content.replace(b"[000700]", b"[000701]"))

    monkeypatch.setattr("kvfold.convert.uptrain.work.tokenize", edited)
    plan = plan_of(path, training=5000)
    make_tokens(plan, tmp_path)
    assert open_tokens(plan, tmp_path) is None
    path.write_bytes(content)
    assert open_tokens(plan, tmp_path) is not None


def test_a_kill_while_tokenizing_leaves_no_tokens(tmp_path, monkeypatch):
    def killed(*_):
        yield from islice(tokenize(Letters(), [BOS], [Document("x" * 64)]), 1)
        raise KeyboardInterrupt

    plan = plan_of(numbered(tmp_path))
    monkeypatch.setattr("kvfold.convert.uptrain.work.tokenize", killed)
    with pytest.raises(KeyboardInterrupt):
        make_tokens(plan, tmp_path)
    assert open_tokens(plan, tmp_path) is None
    assert not (tmp_path / "tokens.bin").exists()


class Alone:
    """The part of TrainingArguments that ``prepare`` uses, of a single process."""

    class distributed_state:
        wait_for_everyone = staticmethod(lambda: None)


def test_a_run_killed_before_its_first_checkpoint_keeps_its_tokens_for_the_same_text(
    tmp_path, monkeypatch
):
    path = numbered(tmp_path)
    request = UptrainRequest(
        model="m", out=str(tmp_path / "out"), text=str(path), seq_len=32, batch_tokens=64
    )
    first = work.prepare(request, [], None, plan_of(path, training=20), Alone())
    monkeypatch.setattr(work, "make_tokens", None)
    again = work.prepare(request, [], None, plan_of(path, training=20), Alone())
    assert torch.equal(first.training, again.training)
    for changed, files in ((replace(request, fresh=True), []), (request, [path])):
        with pytest.raises(TypeError):  # makes them again
            work.prepare(changed, files, None, plan_of(path, training=20), Alone())
    monkeypatch.undo()
    work.prepare(request, [], None, plan_of(path, training=20), Alone())
    with path.open("a") as file:
        file.write('{"text": "more"}\n')
    with pytest.raises(
        InputError, match="the text or the tokenizer has changed since the interrupted run"
    ):
        work.prepare(request, [], Path("checkpoint-8"), plan_of(path, training=20), Alone())


@pytest.mark.parametrize(("training", "most"), [(20, 4 * 24 * 32), (10**9, 4 * (4 * 32 + 63_000))])
def test_the_room_for_the_tokens_is_looked_for_before_they_are_made(
    tmp_path, monkeypatch, training, most
):
    usage = namedtuple("usage", "total used free")
    path = numbered(tmp_path)
    assert path.stat().st_size == 63_000
    request = UptrainRequest(
        model="m", out=str(tmp_path / "out"), text=str(path), seq_len=32, batch_tokens=64
    )
    plan = plan_of(path, training=training, held_out=4)
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda _: usage(10**12, 0, most - 1))
    message = (
        rf"too little disk space: .*\({most} bytes\) needed for the tokens of the run, 4 bytes"
        r" each; free some"
    )
    with pytest.raises(InputError, match=message):
        work.prepare(request, [], None, plan, Alone())
    assert [entry.name for entry in tmp_path.iterdir()] == ["numbered.jsonl"]
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda _: usage(10**12, 0, most))
    work.prepare(request, [], None, plan, Alone())
    assert (request.work / "tokens.bin").stat().st_size <= most
    plan.text.path.write_text("a few words")
    with pytest.raises(InputError, match="too little text"):
        work.prepare(replace(request, fresh=True), [], None, plan, Alone())
    assert not request.work.exists()


@pytest.fixture
def request_(tmp_path):
    request = UptrainRequest(model="m", out=str(tmp_path / "out"), text="t")
    request.work.mkdir()
    (request.work / "request.json").write_text(json.dumps(work.started_with(request, [])))
    for step in (4, 8):
        checkpoint = request.work / f"checkpoint-{step}"
        (checkpoint / "optimizer").mkdir(parents=True)
        for name in ("model.safetensors", "trainer_state.json", "optimizer/0.distcp"):
            (checkpoint / name).write_bytes(os.urandom(100))
        mark_complete(checkpoint)
    return request


@pytest.mark.parametrize("name", ["optimizer/0.distcp", COMPLETE])
@pytest.mark.parametrize("damage", ["cut", "empty", "other bytes", "removed", "folder"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(request_, capsys, name, damage):
    file = request_.work / "checkpoint-8" / name
    data = file.read_bytes()
    file.unlink()
    if damage == "folder":
        file.mkdir()
    elif damage != "removed":
        file.write_bytes(
            {"cut": data[:-1], "empty": b"", "other bytes": bytes([data[0] ^ 1]) + data[1:]}[damage]
        )
    assert last_checkpoint(request_, []).name == "checkpoint-4"
    half_written = name == COMPLETE and damage == "removed"  # as a killed run leaves it
    assert ("skipping checkpoint-8, which is damaged" in capsys.readouterr().err) != half_written


@pytest.mark.parametrize(
    "name", [".", "log.jsonl", "checkpoint-8", "checkpoint-8/model.safetensors"]
)
def test_nothing_is_written_through_links(request_, name, refused):
    file = request_.work / name
    if file.exists():
        file.rename(request_.work.parent / "elsewhere")
    file.symlink_to(request_.work.parent / "elsewhere")
    with refused():
        last_checkpoint(request_, [])


def test_without_a_sound_checkpoint_the_run_starts_over(request_):
    assert last_checkpoint(request_, []).name == "checkpoint-8"
    for step in (4, 8):
        (request_.work / f"checkpoint-{step}" / "model.safetensors").unlink()
    assert last_checkpoint(request_, []) is None


def test_a_checkpoint_written_where_a_kill_left_half_of_one_is_sound(request_):
    (request_.work / "checkpoint-8" / f"{COMPLETE}.new").write_text("{")
    mark_complete(request_.work / "checkpoint-8")
    assert last_checkpoint(request_, []).name == "checkpoint-8"


def test_other_files_of_the_model_start_over_and_a_fresh_run_too(request_, tmp_path, capsys):
    (tmp_path / "model.safetensors").touch()
    assert last_checkpoint(request_, [tmp_path / "model.safetensors"]) is None
    assert "model.safetensors changed since then; training starts over" in capsys.readouterr().err
    assert last_checkpoint(replace(request_, fresh=True), []) is None


def test_a_folder_that_holds_no_options_of_a_run_is_left_alone(request_):
    (request_.work / "request.json").write_bytes(b"[")
    with pytest.raises(InputError, match=r"request.json: not valid JSON"):
        last_checkpoint(request_, [])
    (request_.work / "request.json").unlink()
    with pytest.raises(InputError, match="the run needs this folder, but it contains other files"):
        last_checkpoint(request_, [])


def test_two_runs_to_one_output(tmp_path):
    (tmp_path / "text.txt").write_text("text")
    request = UptrainRequest(
        model=str(demo_folder()), out=str(tmp_path / "out"), text=str(tmp_path / "text.txt")
    )
    expected = "out.training is being written by another run; wait until it ends"
    with output_lock(request.work), pytest.raises(InputError, match=expected):
        uptrain_checkpoint(request)
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def two_of_them():
    """Both wait longer for the first one's work than the training's timeout, and both get its
    error.
    """
    dist.init_process_group("gloo", timeout=timedelta(seconds=1))
    begin = time.monotonic()

    def slow():
        time.sleep(1.5)
        return int(os.environ["RANK"])

    def wrong():
        raise InputError("no text", ["a detail"])

    result = on_rank0(slow)
    seconds = time.monotonic() - begin
    try:
        on_rank0(wrong)
    except InputError as error:
        print(json.dumps([result, seconds > 1.2, str(error)]))
    destroy_process_group()
    assert not dist.is_initialized()


@pytest.mark.slow
def test_the_others_wait_longer_than_the_timeout_of_the_training_and_share_its_error(tmp_path):
    torch.set_num_threads(1)  # a fork has one thread
    ended = forked.run_ranks(tmp_path, two_of_them)
    assert [each.status for each in ended] == [0, 0], ended
    assert [json.loads(each.stdout) for each in ended] == [
        [first, True, "no text\n  a detail"] for first in (0, None)
    ]

"""Interrupted runs go on at their last finished layer and give the bytes of an unbroken run."""

import os
import shutil
import signal
import time
from contextlib import contextmanager
from unittest.mock import Mock

import pytest
import torch
from helpers import forked
from helpers.cases import mostly_slow, read_cases
from helpers.checkpoints import run_conversion

from kvfold.convert import InputError
from kvfold.convert.checkpoint import writer
from kvfold.convert.cli import main
from kvfold.convert.conversion import calibration, journal, layers, output, polishing
from kvfold.convert.data import demo_folder
from kvfold.convert.training.polish import PolishTask
from kvfold.convert.walk import walk

CASES = read_cases(__file__)


@pytest.fixture
def child(tmp_path_factory):
    """``child(options, layers)``: a conversion in a fork, and how it ended.

    It kills itself when it has noted so many layers, for 2 (all of them) while it copies the rest.
    """

    def run(options, layers):
        def work():
            note = journal.Journal.add_layer
            made = [0]

            def noted(self, *layer):
                if made[0] == layers:
                    os.kill(os.getpid(), signal.SIGKILL)
                note(self, *layer)
                made[0] += 1
                print("layer", self.finished_count - 1, flush=True)

            journal.Journal.add_layer = noted
            if layers == 2:
                writer.ShardWriter.finish = lambda self: os.kill(os.getpid(), signal.SIGKILL)
            if list(tmp_path_factory.getbasetemp().glob("*/.out.kvfold-*/.text.pt")):
                calibration.sample_sequences = lambda *_: pytest.fail("the text was written again")
            run_conversion(**options)

        return forked.run(tmp_path_factory.mktemp("log"), work)

    return run


@pytest.fixture
def request_of(tiny_reader, out):
    """``request_of("mqa")``: options of a run of some seconds that writes ``out``."""
    fixed = {"model": tiny_reader, "out": out, "samples": 4, "seq_len": 24}
    return lambda name, **options: {**fixed, **CASES["options"][name], **options}


@contextmanager
def fail_at_the_end():
    """The run in the block fails after its last layer; what else is patched is undone."""
    with pytest.MonkeyPatch.context() as patch:
        failure = RuntimeError("the disk went away")
        patch.setattr(output, "render_model_card", Mock(side_effect=failure))
        with pytest.raises(RuntimeError, match="went away"):
            yield patch


@pytest.mark.slow
@pytest.mark.parametrize("name", mostly_slow(CASES["options"], 3))
def test_a_killed_run_goes_on_at_its_last_finished_layer(
    tmp_path, out, tmp_path_factory, request_of, child, name
):
    options = request_of(name)
    unbroken = tmp_path_factory.mktemp("unbroken") / "out"
    run_conversion(**options | {"out": unbroken})
    for count, made in CASES["kills"][name]:
        killed = child(options, count)
        assert killed.status == -signal.SIGKILL, killed.stderr
        assert killed.stdout.splitlines() == made
        assert not out.exists()
    done = child(options, 99)
    assert done.status == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert forked.snapshot(out) == forked.snapshot(unbroken)


def test_only_an_equal_request_for_the_same_model_goes_on(
    tmp_path, request_of, monkeypatch, capsys
):
    options = request_of("mqa", quiet=False)
    note = journal.Journal.add_layer
    options["model"] = shutil.copytree(options["model"], tmp_path / "model")

    def stop(self, *layer):
        note(self, *layer)
        raise RuntimeError(f"after layer {self.finished_count}")

    monkeypatch.setattr(journal.Journal, "add_layer", stop)

    def refused(used, **other):
        way_out = "use the same to continue after its layer 1, or --fresh to discard it"
        with pytest.raises(InputError, match=f"the interrupted run in .* used {used}; {way_out}"):
            run_conversion(**options | other)

    def stopped(layer, **changes):
        with pytest.raises(RuntimeError, match=f"after layer {layer}") as raised:
            run_conversion(**options | changes)
        (note,) = raised.value.__notes__
        assert note.startswith(f"finished layers kept for the same request: {layer}, in ")
        assert len(list(tmp_path.glob(".out.kvfold-*"))) == 1
        return capsys.readouterr().err

    stopped(1)
    refused("--seed 0, not --seed 1", seed=1)
    refused("--method principal, not --method mean", method="mean", refine=0)
    assert "resuming after layer 1 of 2 of the interrupted run (--fresh starts over)" in stopped(2)
    assert "resuming" not in stopped(1, fresh=True, seed=1)
    other = shutil.copytree(tmp_path / "model", tmp_path / "other")
    refused(f"the model {tmp_path / 'model'}, not the model {other}", model=str(other), seed=1)
    (tmp_path / "model" / "generation_config.json").unlink()
    assert "model/generation_config.json changed since then; starting over" in stopped(1, seed=1)
    with (tmp_path / "model" / "model.safetensors").open("r+b") as weights:
        weights.seek(-1, os.SEEK_END)
        weights.write(b"\0")
    assert "model.safetensors changed since then; starting over" in stopped(1, seed=1)
    for name, said in ((".precision", "precision changed"), (".journal.json", "is damaged")):
        (path,) = tmp_path.glob(f".out.kvfold-*/{name}")
        path.write_bytes(path.read_bytes()[:-1] + b"\xff")
        assert f"{said}" in stopped(1, seed=1)


def test_a_setting_that_is_no_option_is_named_too(request_of, refused):
    versions = journal.get_package_versions()
    with fail_at_the_end() as patch:
        patch.setattr(journal, "get_package_versions", lambda: {**versions, "torch": "1.0"})
        run_conversion(**request_of("mqa"))
    with refused("used torch 1.0, not torch ", "; use the same", "--fresh"):
        run_conversion(**request_of("mqa"))


def test_a_resumed_run_computes_with_as_many_threads_as_before(request_of, monkeypatch, capsys):
    options = request_of("mqa", refine=0)
    with fail_at_the_end() as patch:
        patch.setattr(torch, "get_num_threads", lambda: 2)
        run_conversion(**options)
    chosen = [1]
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: chosen[-1])
    run_conversion(**options)
    assert chosen == [1, 2]
    assert "computing with 2 threads, as the interrupted run did" in capsys.readouterr().err


@pytest.mark.parametrize("truncated", [False, True])
def test_a_run_that_failed_at_its_end_fits_no_layer_again_but_of_truncated_files(
    tmp_path, out, request_of, capsys, truncated
):
    options = request_of("mqa") | {"refine": 0}
    with fail_at_the_end():
        run_conversion(**options)
    assert not out.exists()
    if truncated:
        (left,) = tmp_path.glob(".out.kvfold-*/model.safetensors")
        os.truncate(left, left.stat().st_size - 1)
    capsys.readouterr()
    fitted = []
    gather = walk.gather_statistics
    walks = Mock(wraps=layers.make_walk)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "make_walk", walks)
        patch.setattr(
            walk,
            "gather_statistics",
            lambda *given: fitted.append(given[1].index) or gather(*given),
        )
        run_conversion(**options)
    assert fitted == ([0, 1] if truncated else [])
    assert walks.called == truncated  # else no layer runs again either
    assert ("model.safetensors changed since then" in capsys.readouterr().err) == truncated
    run_conversion(**options | {"out": tmp_path / "unbroken"})
    assert forked.snapshot(out) == forked.snapshot(tmp_path / "unbroken")


class Torn(writer.ShardWriter):
    """Fails after the first tensor."""

    def write(self, tensors):
        super().write(dict(list(tensors.items())[:1]))
        raise RuntimeError("the disk went away")


@pytest.mark.slow
@pytest.mark.parametrize("torn", [False, True])
def test_a_run_that_failed_after_polishing_takes_the_weights_of_its_state(
    tmp_path, request_of, torn
):
    options = request_of("mqa", polish=3, repeat_text=True)
    with fail_at_the_end() as patch:
        if torn:
            patch.setattr(polishing, "ShardWriter", Torn)
        run_conversion(**options)
    (state,) = tmp_path.glob(".out.kvfold-*/.polish.pt")
    assert (
        torch.load(state, weights_only=True)["best_step"] > 0
    )  # else the files have the layers as they were fitted
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PolishTask, "backward", lambda *_: pytest.fail("trained again"))
        run_conversion(**options)
    run_conversion(**options | {"out": tmp_path / "unbroken"})
    assert forked.snapshot(tmp_path / "out") == forked.snapshot(tmp_path / "unbroken")


@pytest.mark.parametrize(
    ("pattern", "kept"), mostly_slow([(".out.kvfold-*", 0), (".out.kvfold-*/.journal.json", 1)], 2)
)
def test_sigterm_leaves_nothing_but_finished_layers_to_resume(
    tmp_path, tmp_path_factory, pattern, kept
):
    log = tmp_path_factory.mktemp("log")
    text = "--to mqa --group contiguous --samples 12 --seq-len 48 --refine 100"
    child = forked.start(
        log, lambda: main(["convert", str(demo_folder()), str(tmp_path / "out"), *text.split()])
    )
    until = time.monotonic() + forked.PATIENCE
    while not list(tmp_path.glob(pattern)):
        assert os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None, (
            forked.ended(log, child)
        )
        assert time.monotonic() < until
        time.sleep(0.01)
    os.kill(child, signal.SIGTERM)
    end = forked.ended(log, child)
    assert end.status == 1
    assert end.stderr.splitlines()[-1].startswith(
        "error: interrupted: "
        + (
            "finished layers kept for the same request: 1, in "
            if kept
            else "nothing was left behind"
        )
    )
    assert "Traceback" not in end.stderr
    assert len(list(tmp_path.iterdir())) == kept
    assert len(list(tmp_path.glob(".out.kvfold-*/.journal.json"))) == kept


@pytest.mark.parametrize("content", ["", "[]", "{}", '0\n{"run": 1, "layers": [{}]}', "[" * 9000])
def test_a_damaged_journal_counts_as_none(tmp_path, content):
    (tmp_path / ".journal.json").write_text(content)
    assert journal.count_finished_layers(tmp_path) == 0

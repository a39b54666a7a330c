"""Fits keep to the device of the layer's statistics, and the CPU fits what a card cannot."""

import pytest
import torch
from helpers import forked
from helpers.checkpoints import assert_same_tensors, read_json, run_conversion

from kvfold.convert import device
from kvfold.convert.conversion import layers

FEW = {"samples": 2, "seq_len": 32, "positions": False}
LATENT = {"to": "mla", "kv_rank": 12, "rope_dim": 4}


CONVERSIONS = [
    ("llama", {"to": "mqa"}),
    ("llama", {**LATENT, "layout": "engine"}),
    ("qwen3", {"to": "mqa"}),
    ("gemma3_text", {**LATENT, "layout": "kvfold"}),
]


@pytest.mark.slow
def test_fits_compute_on_one_device_and_give_the_same_losses(tiny_family, tmp_path):
    def convert_all(device):
        for number, (family, options) in enumerate(CONVERSIONS):
            plain = {"attention_bias": False, "mlp_bias": False} if family == "llama" else {}
            source = tiny_family(family, vocab_size=2048, num_hidden_layers=1, **plain)
            run_conversion(source, tmp_path / device / str(number), **FEW, **options)

    def convert_on_card():
        # Registers the card with torch for the whole process: a child of its own.
        from helpers.card import fit_on_card

        fit_on_card()
        convert_all("card")

    convert_all("cpu")
    ended = forked.run(tmp_path / "child", convert_on_card)
    assert ended.status == 0, ended.stderr
    # Strides differ, with them the order of sums, and with it the signs of eigenvectors.
    on_cpu, on_card = (
        [
            read_json(tmp_path / device / str(number) / "kvfold.json")["drift"]["kl"]["value"]
            for number in range(len(CONVERSIONS))
        ]
        for device in ("cpu", "card")
    )
    assert on_card == pytest.approx(on_cpu, rel=1e-4)


def test_the_cpu_fits_what_the_card_cannot_and_says_so_once(
    tiny_reader, tmp_path, monkeypatch, capsys
):
    run_conversion(tiny_reader, tmp_path / "cpu", **FEW, **LATENT)
    with monkeypatch.context() as patch:
        # No decomposition runs on it.
        patch.setattr(layers, "choose_fit_device", lambda device: torch.device("meta"))
        run_conversion(tiny_reader, tmp_path / "card", quiet=False, **FEW, **LATENT)
    assert_same_tensors(tmp_path / "cpu", tmp_path / "card")
    assert capsys.readouterr().err.count("so the CPU does") == 1


@pytest.mark.parametrize(("speed", "name"), [(1 / 64, "cpu"), (1 / 2, "cuda")])
def test_a_card_that_is_slow_in_float64_leaves_fits_to_the_cpu(speed, name, monkeypatch):
    monkeypatch.setattr(device, "measure_speedup", lambda *timed: speed)
    assert device.choose_fit_device(torch.device("cuda")).type == name
    assert device.choose_fit_device(torch.device("cpu")).type == "cpu"

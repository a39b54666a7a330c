"""Files beside the weights: code that stays behind, adapters that are not applied, tokenizers of
other kinds.
"""

import logging
import shutil

import pytest
import torch
from helpers.checkpoints import convert, edit_json, read_json, run_conversion
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvfold.convert import DriftRequest, SweepRequest, inspect_checkpoint, sweep_checkpoint
from kvfold.convert.measure.drift import drift_checkpoints
from kvfold.convert.text import tokenizer as tokenizers


@pytest.fixture
def source(tiny_family, tmp_path):
    """A copy of a tiny Llama that reads text."""
    return shutil.copytree(tiny_family("llama", vocab_size=2048), tmp_path / "source")


def test_code_stays_behind_and_is_not_named(source, tmp_path):
    edit_json(source / "config.json", auto_map={"AutoModelForCausalLM": "modeling_x.X"})
    auto_map = {"AutoTokenizer": ["tokenization_x.XTokenizer", None]}
    edit_json(source / "tokenizer_config.json", auto_map=auto_map, tokenizer_class="XTokenizer")
    edit_json(
        source / "processor_config.json", auto_map={"AutoProcessor": "processing_x.X"}, size=3
    )
    for name in ("modeling_x", "tokenization_x", "processing_x"):
        (source / f"{name}.py").write_text("raise SystemExit('run')\n")
    out = convert(source, tmp_path / "out", 2)
    assert not list(out.glob("*.py"))
    for name in ("config.json", "tokenizer_config.json", "processor_config.json"):
        assert "auto_map" not in read_json(out / name)
    assert read_json(out / "processor_config.json") == {"size": 3}
    assert AutoTokenizer.from_pretrained(out)("a")["input_ids"]
    AutoModelForCausalLM.from_pretrained(out)


def test_an_adapter_beside_the_model_is_one_warning(source, tmp_path, capsys):
    edit_json(source / "adapter_config.json", peft_type="LORA", base_model_name_or_path="org/base")
    save_file({"x.lora_A.weight": torch.ones(1)}, source / "adapter_model.safetensors")
    (note,) = inspect_checkpoint(source).notes
    assert "adapter_config.json" in note
    out = convert(source, tmp_path / "out", 2, quiet=False)
    warning = f"warning: {note}\n"
    assert capsys.readouterr().err.count(warning) == 1
    assert not list(out.glob("adapter*"))
    small = {"samples": 2, "seq_len": 16, "quiet": True}
    run_conversion(source, tmp_path / "quiet", to="mqa", **small)
    sweep_checkpoint(SweepRequest(source, "mqa", **small))
    drift_checkpoints(DriftRequest(source, out, **small))
    assert capsys.readouterr().err == 3 * warning


def test_a_cache_that_is_switched_off_is_one_warning(source):
    """As training with gradient checkpointing leaves it."""
    edit_json(source / "config.json", use_cache=False)
    (note,) = inspect_checkpoint(source).notes
    assert "use_cache" in note


def test_the_packages_that_a_sentencepiece_model_needs_are_named(source, out, monkeypatch, refused):
    (source / "tokenizer.json").unlink()
    (source / "tokenizer.model").write_bytes(b"\n\x0e\n\x05<unk>\x15\0\0\0\0\x18\x02")
    monkeypatch.setattr(tokenizers, "distributions", lambda name: [])
    logged = []
    logger = logging.getLogger("transformers.tokenization_utils_tokenizers")
    monkeypatch.setattr(logger, "handle", logged.append)
    with refused("pip install 'kvfold[sentencepiece]'"):
        run_conversion(source, out, to="mqa", samples=2, seq_len=16)
    assert not logged

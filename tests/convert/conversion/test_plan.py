"""Plans that are refused from headers alone."""

from dataclasses import replace

from kvfold.convert import processes
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.conversion.plan import make_plan
from kvfold.convert.request import ConvertRequest


def test_weights_of_whole_numbers_are_refused(tiny_family, refused):
    checkpoint = open_checkpoint(tiny_family("llama"))
    name = "model.layers.1.self_attn.k_proj.weight"
    checkpoint.tensors[name] = replace(checkpoint.tensors[name], dtype="I16")
    with refused():
        make_plan(ConvertRequest("m", "o", "gqa", kv_heads=2), checkpoint)


def test_fewer_sequences_than_processes_are_refused(tiny_family, monkeypatch, refused):
    request = ConvertRequest(model="m", out="o", to="mqa", samples=3, seq_len=64)
    checkpoint = open_checkpoint(tiny_family("llama"))
    make_plan(request, checkpoint)
    monkeypatch.setattr(processes, "world_size", lambda: 4)
    with refused():
        make_plan(request, checkpoint)

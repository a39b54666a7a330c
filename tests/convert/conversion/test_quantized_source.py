"""Quantized sources: each gives what its dense twin gives, to the last bit; with --keep-quantized
what is only copied stays as the source holds it, in stock transformers.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import stock_model, tensors
from helpers.processes import run_python
from helpers.quantized import fp8_blocks, fp8_settings, mxfp4_experts, quantized_copy

from kvfold.convert import ConvertRequest, convert_checkpoint
from kvfold.convert.errors import InputError
from kvfold.convert.measure.inspect import inspect_checkpoint
from kvfold.convert.measure.verify import verify_checkpoint

MLA: dict[str, Any] = {
    "to": "mla",
    "kv_rank": 24,
    "rope_dim": 4,
    "samples": 2,
    "seq_len": 8,
    "quiet": True,
}


def check_equal(ours: Path, others: Path) -> None:
    """Equal tensors and configs; their order in the file is the source's."""
    found = tensors(ours)
    expected = tensors(others)
    assert {*found} == {*expected}
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor), name
    assert json.loads((ours / "config.json").read_text()) == json.loads(
        (others / "config.json").read_text()
    )


@pytest.mark.parametrize(
    "options", [MLA, {"to": "gqa", "kv_heads": 2, "method": "mean"}], ids=["mla", "gqa"]
)
def test_fp8_gives_what_its_twin_gives(
    tiny_reader: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    twin = quantized_copy(
        tiny_reader, tmp_path / "fp8", fp8_settings((24, 40)), fp8_blocks((24, 40))
    )
    for source, name in ((tmp_path / "fp8", "ours"), (twin, "expected")):
        convert_checkpoint(ConvertRequest(source, tmp_path / name, **options))
    ours = tmp_path / "ours"
    expected = tmp_path / "expected"
    check_equal(ours, expected)
    record = json.loads((ours / "kvfold.json").read_text())
    card = (ours / "README.md").read_text()
    line = "14 weights stored as FP8 in blocks of 24 x 40, dequantized to bfloat16"
    assert record["source"]["made_of"] == [line]
    assert record["tensors"]["model.layers.0.mlp.up_proj.weight"]["origin"] == "dequantized"
    assert record["tensors"]["model.norm.weight"]["origin"] == "copied"
    assert f"The source: {line}." in card
    assert "Everything else comes from the source, stored as bfloat16." in card
    other = json.loads((expected / "kvfold.json").read_text())
    assert "made_of" not in other["source"]
    assert record.get("drift") == other.get("drift")


def test_the_older_key_of_the_dtype_is_enough(tiny_reader: Path, tmp_path: Path) -> None:
    """Configs from before transformers 5 have ``torch_dtype``."""
    source = tmp_path / "fp8"
    quantized_copy(tiny_reader, source, fp8_settings((24, 40)), fp8_blocks((24, 40)))
    config = json.loads((source / "config.json").read_text())
    config["torch_dtype"] = config.pop("dtype")
    (source / "config.json").write_text(json.dumps(config))
    convert_checkpoint(
        ConvertRequest(source, tmp_path / "out", to="mqa", method="mean", quiet=True)
    )
    assert "stored as bfloat16." in (tmp_path / "out" / "README.md").read_text()


_PEAK = (
    "import resource, sys; from kvfold.convert.cli import kvfold\nkvfold(sys.argv[1:],"
    " standalone_mode=False); print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
)


@pytest.mark.slow
def test_fp8_takes_about_the_memory_of_its_twin(reference: Path, tmp_path: Path) -> None:
    """30 MB more on the reference model for what is dequantized at a time."""
    twin = quantized_copy(
        reference / "llama-mha", tmp_path / "fp8", fp8_settings((128, 128)), fp8_blocks((128, 128))
    )
    peaks = []
    for source in (tmp_path / "fp8", twin):
        options = ["--to", "gqa", "--kv-heads", 2, "--method", "mean", "--quiet"]
        ran = run_python("-c", _PEAK, "convert", source, tmp_path / f"{source.name}-out", *options)
        peaks.append(int(ran.stdout.split()[-1]))  # KiB
    check_equal(tmp_path / "fp8-out", tmp_path / "fp8-twin-out")
    assert peaks[0] < peaks[1] + 30_000, peaks


BLOCK = (16, 16)
CUT = (16, 20)  # no side of 48 or 64 has whole blocks of 20
CASES: dict[str, tuple[str, dict[str, Any], int]] = {  # source, request, weights that are kept
    "gqa": ("llama", {"to": "gqa", "kv_heads": 2, "method": "mean"}, 2 * 3),
    "mla": ("llama", {"to": "mla", "kv_rank": 32, "rope_dim": 8, "method": "svd"}, 2 * 3),
    "experts": ("qwen3_moe", {"to": "mqa", "method": "mean"}, 3 * 4 + 3),
    "mxfp4": ("gpt_oss", {"to": "mqa", "method": "mean"}, 2 * 2),
}


@torch.no_grad()
def logits(folder: Path) -> torch.Tensor:
    return stock_model(folder, dtype=torch.bfloat16)(torch.arange(3, 27)[None]).logits


@pytest.fixture(scope="module")
def sources(tiny_family, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("quantized")
    plain = tiny_family("llama", attention_bias=False, mlp_bias=False)
    experts = tiny_family(
        "qwen3_moe", moe_intermediate_size=32, decoder_sparse_step=1, num_hidden_layers=2
    )
    for name, folder in (("llama", plain), ("qwen3_moe", experts)):
        quantized_copy(folder, place / name, fp8_settings(BLOCK), fp8_blocks(BLOCK))
    quantized_copy(plain, place / "cut", fp8_settings(CUT), fp8_blocks(CUT))
    mxfp4_experts(tiny_family("gpt_oss", intermediate_size=64), place / "gpt_oss")
    return {path.name: path for path in place.iterdir()}


@pytest.fixture(scope="module")
def made(sources: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case kept and dense."""
    place = tmp_path_factory.mktemp("made")
    for name, (source, options, _) in CASES.items():
        for keep in (True, False):
            out = str(place / (name if keep else f"{name}-dense"))
            convert_checkpoint(
                ConvertRequest(
                    str(sources[source]), out, keep_quantized=keep, quiet=True, **options
                )
            )
    return place


@pytest.mark.parametrize("name", CASES)
def test_kept_weights_have_the_bytes_of_the_source(
    name: str, sources: dict[str, Path], made: Path
) -> None:
    source, _, count = CASES[name]
    record = json.loads((made / name / "kvfold.json").read_text())
    assert record["source"]["made_of"][-1] == f"{count} of these weights kept as they are stored"
    stored = tensors(sources[source])
    dense = tensors(made / f"{name}-dense")
    found = tensors(made / name)
    kept = {key for key in found if key not in dense or found[key].dtype != dense[key].dtype}
    assert len(kept) == 2 * count
    assert all(
        torch.equal(found[key].view(torch.uint8), stored[key].view(torch.uint8)) for key in kept
    )
    assert all(torch.equal(found[key], dense[key]) for key in found.keys() - kept)
    assert not any(".self_attn." in key for key in kept)
    # transformers gives the logits of the dense result
    assert torch.equal(logits(made / name), logits(made / f"{name}-dense"))


def test_the_result_verifies_and_its_engines_are_those_that_inspect_finds(made: Path) -> None:
    assert verify_checkpoint(made / "mla").problems == []
    card = (made / "mla" / "README.md").read_text()
    assert " --keep-quantized\n" in card
    assert "kvfold uptrain" not in card  # it trains dense weights
    for name in ("mla", "mla-dense"):
        recorded = json.loads((made / name / "kvfold.json").read_text())["engines"]
        found = {
            verdict.engine: verdict.serves for verdict in inspect_checkpoint(made / name).engines
        }
        assert found == {each["engine"]: each["serves"] for each in recorded}
        assert name != "mla" or not found["mlx-lm"]


def test_parts_of_blocks_and_dense_sources_are_refused(
    sources: dict[str, Path], tiny_family, tmp_path: Path
) -> None:
    for source in (sources["cut"], tiny_family("llama")):
        request = ConvertRequest(
            str(source), str(tmp_path / "out"), to="mqa", method="mean", keep_quantized=True
        )
        with pytest.raises(
            InputError, match="--keep-quantized needs FP8 weights outside the attention"
        ):
            convert_checkpoint(request)
    with pytest.raises(InputError, match="--keep-quantized needs --dtype bfloat16"):
        ConvertRequest("MODEL", "OUT", to="mqa", dtype="float32", keep_quantized=True)

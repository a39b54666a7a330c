"""Encoder-decoders in layout ``kvfold``: their decoders share heads or read latents, of themselves and the encoder."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import precision
from helpers.processes import run_python
from safetensors.torch import load_file, save_file
from tiny_models import SEQ2SEQ
from transformers import AutoTokenizer

import kvfold.convert.data
from kvfold.attention.checkpoints import registered
from kvfold.convert import ConvertRequest, convert_checkpoint, inspect_checkpoint
from kvfold.convert.conversion.record import cost_text
from kvfold.convert.errors import InputError
from kvfold.convert.families.family import check_decodes, seq2seq
from kvfold.convert.families.layout import read_layer, write_layer
from kvfold.convert.families.model import model_of
from kvfold.convert.inspection.text import summary
from kvfold.convert.measure.drift import drift_checkpoints
from kvfold.convert.measure.page import totals
from kvfold.convert.measure.table import drift_table
from kvfold.convert.measure.verify import verify_checkpoint
from kvfold.convert.transforms.fold import pool

DEMO = Path(kvfold.convert.data.__file__).parent / "demo"
LATENT = {"to": "mla", "kv_rank": 64, "rope_dim": 0, "method": "svd", "allow_growth": True}  # as wide as the model
GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}  # as flan-t5
USE = """
import json, sys, torch
from transformers import AutoModel, AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

pairs, remote, saved = json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
if not remote:
    from kvfold.attention import register_models
    register_models()
tokens = torch.randint(3, 97, (2, 20), generator=torch.Generator().manual_seed(5))
mask = torch.ones_like(tokens)
mask[0, 13:] = 0
text = dict(input_ids=tokens, attention_mask=mask)
sound = dict(input_features=torch.randn(2, 16, 20, generator=torch.Generator().manual_seed(5)))

def hears(folder):
    return json.load(open(f"{folder}/config.json"))["model_type"].endswith("whisper")

def load(folder, auto=None, **options):
    auto = auto or (AutoModelForSpeechSeq2Seq if hears(folder) else AutoModelForSeq2SeqLM)
    model, info = auto.from_pretrained(folder, trust_remote_code=remote, output_loading_info=True, **options)
    assert not any([info["missing_keys"], info["mismatched_keys"]]), (folder, info)
    return model.eval()

def gradient(model, inputs):
    torch.manual_seed(3)  # of dropout
    model.zero_grad()
    model.train()(**inputs, labels=tokens[:, :7].contiguous()).loss.backward()
    model.eval()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

def largest(a, b):
    return float((a - b).detach().abs().max())

def differences(source, out, at):
    stock, model = load(source), load(out)
    assert type(model).__module__.startswith("transformers_modules." if remote else "kvfold."), type(model)
    inputs = sound if hears(out) else text
    read = dict(inputs, decoder_input_ids=tokens[:, :7])
    expected = model(**read).logits
    greedy = dict(inputs, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    cached, uncached = (model.generate(**greedy, use_cache=use_cache) for use_cache in (True, False))
    plain = gradient(model, inputs)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    checkpointed = gradient(model, inputs)
    model.save_pretrained(f"{saved}/{at}")
    base = {**read, "use_cache": True}
    kept = load(out, AutoModel)(**base).past_key_values
    caches = [each.layers[1] for each in (kept.self_attention_cache, kept.cross_attention_cache)]
    elements = {(each.keys.numel() + each.values.numel()) // each.keys[:, 0, :, 0].numel() for each in caches}
    return {
        "logits": largest(stock(**read).logits, expected),
        "eager": largest(load(out, attn_implementation="eager")(**read).logits, expected),
        "generated": largest(cached.float(), uncached.float()),
        "source's": largest(cached.float(), stock.generate(**greedy).float()),
        "gradient": largest(plain, checkpointed),
        "saved": largest(load(f"{saved}/{at}")(**read).logits, expected),
    }, sorted(elements)

print(json.dumps([differences(*pair, at) for at, pair in enumerate(pairs)]))
"""


def convert(source: Path, out: Path, **options) -> Path:
    convert_checkpoint(ConvertRequest(model=str(source), out=str(out), quiet=True, **options))
    return out


def test_the_registered_encoder_decoders_are_those_with_a_file():
    assert registered.SEQ2SEQ == seq2seq() == tuple(sorted(SEQ2SEQ))


@torch.no_grad()
def repeated_means(source: Path, out: Path, kv_heads: int, encoder: bool = False) -> Path:
    """The stock model whose heads are those of a fold to ``kv_heads``, each as often as it is shared."""
    model, tensors = model_of(json.loads((source / "config.json").read_text())), load_file(source / "model.safetensors")
    model = model.with_encoder() if encoder else model
    for layer in range(model.geometry.layers):
        weights = pool.mean(read_layer(model, layer, tensors.__getitem__), kv_heads)
        parts = {role: getattr(weights, role) for role in ("k", "v", "k_bias", "v_bias")}
        repeated = {
            role: part.repeat_interleave(model.geometry.heads // kv_heads, 0)
            for role, part in parts.items()
            if part is not None
        }
        tensors |= write_layer(model, layer, replace(weights, **repeated))
    shutil.copytree(source, out)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


@pytest.mark.slow  # two fresh processes, which import transformers and load every encoder-decoder
@pytest.mark.parametrize("remote", [True, False])
def test_shared_heads_are_the_stock_model_with_repeated_ones(remote, tiny_family, tmp_path):
    """As many heads as the source's, two, and a full latent; by the checkpoint's own code, and the package's."""
    sources = [tiny_family("t5"), tiny_family("t5", **GATED), tiny_family("bart"), tiny_family("whisper")]
    pairs, cached = [], []
    for at, source in enumerate(sources):
        for kv_heads in (2,) if at == 1 else (8, 2):
            out = convert(
                source, tmp_path / f"{at}-{kv_heads}", to="gqa", kv_heads=kv_heads, method="mean", allow_growth=True
            )
            twin = source if kv_heads == 8 else repeated_means(source, tmp_path / f"{at}-twin", 2)
            pairs.append((str(twin), str(out)))
            cached.append([kv_heads * 2 * (16 if at < 2 else 8)])
        pairs.append((str(source), str(convert(source, tmp_path / f"{at}-latent", **LATENT))))
        cached.append([64])
    source, options = sources[0], {"to": "gqa", "method": "mean", "allow_growth": True, "encoder": True}
    for kv_heads in (8, 2):
        twin = source if kv_heads == 8 else repeated_means(source, tmp_path / "encoder-twin", 2, encoder=True)
        pairs.append((str(twin), str(convert(source, tmp_path / f"encoder-{kv_heads}", kv_heads=kv_heads, **options))))
        cached.append([kv_heads * 2 * 16])
    pairs.append((str(source), str(convert(source, tmp_path / "encoder-latent", **LATENT, encoder=True))))
    cached.append([64])
    (tmp_path / "saved").mkdir()
    done = json.loads(run_python("-c", USE, json.dumps(pairs), json.dumps(remote), tmp_path / "saved").stdout)
    for (found, elements), expected in zip(done, cached, strict=True):
        assert {name: value for name, value in found.items() if not value < precision.CONVERTED} == {}
        assert elements == expected


def test_the_encoder_keeps_its_bytes_and_the_result_is_described(tiny_family, tmp_path):
    source = tiny_family("t5")
    out = convert(source, tmp_path / "out", to="mqa", method="mean")
    before, after = (load_file(folder / "model.safetensors") for folder in (source, out))
    changed = {name for name in before if before[name].shape != after[name].shape}
    assert changed == {
        f"decoder.block.{layer}.layer.{place}.{role}.weight"
        for layer in range(2)
        for place in ("0.SelfAttention", "1.EncDecAttention")
        for role in ("k", "v")
    }
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items() if name not in changed)
    assert verify_checkpoint(str(out)).problems == []
    record, card = json.loads((out / "kvfold.json").read_text()), (out / "README.md").read_text()
    assert record["cache_elements_per_token_per_layer"] == {"from": 256, "to": 32}
    assert "modeling_kvfold_seq2seq.py" in record["files"]
    assert "AutoModelForSeq2SeqLM.from_pretrained" in card
    assert "text2text-generation" in card
    facts = inspect_checkpoint(str(out))
    assert (facts.family, facts.attention, facts.kv_heads) == ("kvfold_t5", "MQA", 1)


def test_the_encoder_changes_too_where_that_is_asked_for(tiny_family, tmp_path):
    source = tiny_family("t5")
    for name, options in {"mqa": {"to": "mqa", "method": "mean"}, "mla": {**LATENT, "kv_rank": 24}}.items():
        out = convert(source, tmp_path / name, **options, encoder=True)
        assert verify_checkpoint(str(out)).problems == []
        facts = inspect_checkpoint(str(out))
        assert (facts.layers, facts.decoder_layers, facts.attention) == (4, 2, name.upper())
        before, after = (load_file(folder / "model.safetensors") for folder in (source, out))
        keys = [key for key in after if key.endswith("SelfAttention.k.weight") and key.startswith("encoder.")]
        assert [tuple(after[key].shape) for key in keys] == 2 * [(16, 64) if name == "mqa" else (128, 24)]
        biases = "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        assert torch.equal(before[biases], after[biases])
        assert " --encoder" in (out / "README.md").read_text()


def test_a_latent_is_cached_of_the_text_and_of_the_encoder(tiny_family, tmp_path):
    source = tiny_family("t5")
    out = convert(source, tmp_path / "out", to="mla", kv_rank=24, rope_dim=0, method="svd")
    assert verify_checkpoint(str(out)).problems == []
    facts = inspect_checkpoint(str(out))
    assert (facts.attention, facts.kv_rank, facts.cache.numbers_per_token_and_layer) == ("MLA", 24, 24)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, out))
    made = {name for name in after if "Attention" in name and name not in before}
    assert len(made) == 4 * len(("kv_down_proj.weight", "kv_down_proj.bias", "o.bias"))
    biases = "decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    assert torch.equal(before[biases], after[biases])


def test_inspect_tells_decoder_layers_from_attentions(tiny_family):
    facts = inspect_checkpoint(str(tiny_family("t5")))
    assert (facts.layers, facts.decoder_layers, facts.to_dict()["decoder_layers"]) == (4, 2, 2)
    assert any("--to mla" in target.options for target in facts.targets)
    text = summary(facts)
    assert "2 in the decoder, each with two attentions (to itself and to the encoder)" in text
    assert "256 elements per token per attention, 2.0 kB per token written and 2.0 kB per token of the" in text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"to": "mqa", "polish": 5}, "--polish: trains on what comes next in a text, t5 is an encoder-decoder, which"),
        ({"to": "mqa", "calibration": "self"}, "--calibration self: needs a model that writes texts from their begin"),
        (
            {"to": "mqa", "method": "mean", "refine": 5, "family": "whisper"},
            "--refine: calibration reads text, whisper reads sound; use --method mean alone, and train",
        ),
        (
            {"to": "mqa", "family": "whisper"},
            "--method principal: calibration reads text, whisper reads sound; use",
        ),
        (
            {"to": "mqa", "method": "mean", "encoder": True, "family": "bart"},
            "--encoder: expected an encoder-decoder whose encoder's attention can change too (t5), found bart; leave",
        ),
        ({**LATENT, "rope_dim": 4}, "--rope-dim 4: the model has no rotary embedding"),
    ],
)
def test_what_is_not_written_is_refused(options, message, tiny_family, tmp_path):
    source = tiny_family(options.pop("family", "t5"))
    with pytest.raises(InputError) as caught:
        convert(source, tmp_path / "out", **options)
    assert str(caught.value).startswith(message)


def test_drift_of_whisper_is_on_synthetic_sound_which_it_names(tiny_family, tmp_path):
    source = tmp_path / "whisper"
    shutil.copytree(tiny_family("whisper", vocab_size=2200), source)
    AutoTokenizer.from_pretrained(DEMO).save_pretrained(source)
    full = {"to": "gqa", "kv_heads": 8, "method": "mean", "allow_growth": True}
    assert drift_checkpoints(source, convert(source, tmp_path / "same", **full), samples=3).measured.kl < 1e-9
    out = convert(source, tmp_path / "out", to="mqa", method="mean")
    report = drift_checkpoints(source, out, samples=3, quiet=False)
    assert report.length == 10 + 128  # the encoder's positions, the most that the decoder writes
    assert report.about["text"]["name"].endswith(", beside synthetic sound (no speech, none that belongs to the text)")
    assert "\nloss of text, nats per token " in drift_table(report)
    assert report.measured.kl > 0.01
    card = out / "README.md"
    assert "AutoProcessor.from_pretrained" in card.read_text()
    assert "AutoModelForSpeechSeq2Seq.from_pretrained" in card.read_text()
    assert "automatic-speech-recognition" in card.read_text()


def test_other_commands_name_those_that_work(tiny_family):
    source = tiny_family("t5")
    config = json.loads((source / "config.json").read_text())
    for command, instead in {"eval": "kvfold drift", "sweep": "run kvfold conv", "uptrain": "train it with"}.items():
        found = rf"kvfold {command} runs models that go on with one text, found .* \(t5\), which .*; {instead}"
        with pytest.raises(InputError, match=found):
            check_decodes(config, "t5", f"kvfold {command}")


@pytest.fixture(scope="module")
def reads_text(tiny_family, tmp_path_factory) -> Callable[[str], Path]:
    """``reads_text("t5")``: a tiny random model with a tokenizer that has what its denoising task needs."""

    def folder(name: str) -> Path:
        out = tmp_path_factory.mktemp(f"{name}-text") / name
        shutil.copytree(tiny_family(name, vocab_size=2200), out)
        tokenizer = AutoTokenizer.from_pretrained(DEMO)
        sentinels = {"additional_special_tokens": [f"<extra_id_{number}>" for number in range(100)]}
        tokenizer.add_special_tokens(sentinels if name == "t5" else {"mask_token": "<mask>"})
        tokenizer.save_pretrained(out)
        return out

    return folder


def test_principal_loses_less_than_the_mean(reads_text, tmp_path):
    source = reads_text("t5")
    mean = convert(source, tmp_path / "mean", to="gqa", kv_heads=4, method="mean")
    report = drift_checkpoints(source, mean, samples=4, seq_len=64, quiet=False)
    measured = report.measured
    principal = convert(source, tmp_path / "principal", to="gqa", kv_heads=4, samples=8, seq_len=64)
    record = json.loads((principal / "kvfold.json").read_text())
    assert 0 < record["drift"]["kl"]["value"] < 0.5 * measured.kl
    assert len(record["drift"]["layers"]) == len(measured.layers) == 4
    assert 0 < record["calibration"]["of_them_encoded"] < record["calibration"]["tokens_each"]
    assert verify_checkpoint(str(principal)).problems == []
    loss, card, line = record["drift"]["loss"], (principal / "README.md").read_text(), cost_text(record)
    assert loss["student"] - loss["source"] == pytest.approx(record["drift"]["excess"]["value"])
    assert f"| denoising loss, nats per token | {loss['source']:.3f} | {loss['student']:.3f} |" in card
    assert f": denoising loss {loss['source']:.4f} -> {loss['student']:.4f} nats per token (" in line
    assert totals(record["drift"])[1][0] == "denoising loss, nats per token"
    assert not any("perplexity" in text for text in (card, line, drift_table(report), repr(report)))
    assert drift_table(report).splitlines()[0].startswith("drift over 4 sequences of 71 positions (13 predicted), ")
    assert "\ndenoising loss, nats per token " in drift_table(report)


@pytest.mark.slow  # two calibrated conversions
def test_the_encoder_is_calibrated_too(reads_text, tmp_path):
    source = reads_text("t5")
    full = {**LATENT, "method": "principal", "encoder": True, "samples": 4, "seq_len": 32}
    record = json.loads((convert(source, tmp_path / "mla", **full) / "kvfold.json").read_text())
    assert record["drift"]["kl"]["value"] < 1e-6
    assert len(record["drift"]["layers"]) == 2 + 4
    options, size = {"to": "gqa", "kv_heads": 4, "encoder": True}, {"samples": 8, "seq_len": 32}
    mean = drift_checkpoints(source, convert(source, tmp_path / "mean", method="mean", **options), **size)
    fitted = convert(source, tmp_path / "gqa", **options, **size, refine=20)
    record = json.loads((fitted / "kvfold.json").read_text())
    assert 0 < record["drift"]["kl"]["value"] < 0.5 * mean.measured.kl
    assert all(layer["after"] <= layer["before"] for layer in record["refinement"])
    assert record["drift"]["cache_bytes_per_token"]["source"] == 2 * record["drift"]["cache_bytes_per_token"]["student"]


def test_refinement_brings_shared_heads_closer(reads_text, tmp_path):
    options = {"to": "gqa", "kv_heads": 4, "method": "mean", "refine": 40, "samples": 16, "seq_len": 32}
    record = json.loads((convert(reads_text("bart"), tmp_path / "out", **options) / "kvfold.json").read_text())
    errors = [(layer["before"], layer["after"]) for layer in record["refinement"]]
    assert len(errors) == 4
    assert all(after < 0.8 * before for before, after in errors)


def test_a_full_latent_that_is_calibrated_loses_nothing(reads_text, tmp_path):
    options = {**LATENT, "method": "principal", "samples": 8, "seq_len": 64}
    out = convert(reads_text("bart"), tmp_path / "out", **options)
    record = json.loads((out / "kvfold.json").read_text())
    assert record["drift"]["kl"]["value"] < 1e-6
    assert record["drift"]["agreement"]["value"] == 1

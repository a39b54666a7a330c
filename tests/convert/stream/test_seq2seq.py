"""Encoder-decoders as streams of their decoders' attentions."""

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.errors import InputError
from kvfold.convert.stream.seq2seq import Seq2SeqStream, checkpoint_stream, stream_class
from kvfold.convert.stream.sound import synthetic_sound
from kvfold.convert.walk.statistics import StatisticsAccumulator

SOURCE, TARGET = 12, 8
GATED = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, "num_layers": 1, "num_decoder_layers": 3}


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(3, 97, (3, SOURCE + TARGET), generator=torch.Generator().manual_seed(5))


def stream_of(folder, **options) -> Seq2SeqStream:
    checkpoint = open_checkpoint(str(folder))
    assert stream_class(checkpoint.config) is Seq2SeqStream
    return Seq2SeqStream(checkpoint.config, checkpoint.read, list(checkpoint.tensors), encoded=SOURCE, **options)


@pytest.mark.parametrize(("name", "changes"), [("t5", {}), ("t5", GATED), ("bart", {"decoder_layers": 3})])
@torch.no_grad()
def test_the_halves_in_order_are_the_stock_model(name, changes, tiny_family, tokens):
    folder = tiny_family(name, **changes)
    stream = stream_of(folder)
    states = stream.embed(tokens)
    for index in range(stream.layers):
        with stream.open_layer(index) as layer:
            assert torch.equal(layer.attend(states).attention, layer(states).attention)
            states = layer(states).states
    stock = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    expected = stock(input_ids=tokens[:, :SOURCE], decoder_input_ids=tokens[:, SOURCE:]).logits
    assert torch.equal(stream.logits(states[:, SOURCE:]), expected)
    assert stream.layers == 2 * len(stock.get_decoder().get_submodule("block" if name == "t5" else "layers"))


@pytest.mark.parametrize("changes", [{}, GATED])
@torch.no_grad()
def test_the_layers_of_the_encoder_come_first_where_they_count(changes, tiny_family, tokens):
    folder = tiny_family("t5", **changes)
    checkpoint = open_checkpoint(str(folder))
    cpu = torch.device("cpu")
    stream, halves = (checkpoint_stream(checkpoint, cpu, torch.float32, SOURCE, whole) for whole in (True, False))
    states = stream.embed(tokens)
    for index in range(stream.layers):
        with stream.open_layer(index) as layer:
            output = layer(states)
            assert torch.equal(layer.attend(states).attention, output.attention)
            states = output.states
            if index == 0:
                assert (output.causal, output.crosses, output.attention.shape[1]) == (False, False, SOURCE)
    stock = AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    expected = stock(input_ids=tokens[:, :SOURCE], decoder_input_ids=tokens[:, SOURCE:]).logits
    torch.testing.assert_close(stream.logits(states[:, SOURCE:]), expected, rtol=1e-6, atol=1e-6)
    assert stream.layers == halves.layers + len(stock.get_encoder().block)
    assert stream.cache_bytes_per_token() == halves.cache_bytes_per_token()


@torch.no_grad()
def test_each_half_shows_its_attention(tiny_family, tokens):
    stream = stream_of(tiny_family("bart"))
    states = stream.embed(tokens)
    outputs = []
    for index in range(2):
        with stream.open_layer(index) as layer:
            outputs.append(layer(states))
        states = outputs[-1].states
    text, encoder = outputs
    assert (text.causal, text.crosses, text.key_input.shape[1]) == (True, False, TARGET)
    assert (encoder.causal, encoder.crosses, encoder.key_input.shape[1]) == (False, True, SOURCE)
    for output in outputs:
        made = torch.einsum("ehd,bthd->bte", output.output_weight, output.context)
        rest = output.attention - made
        assert float((rest - rest[0, 0]).abs().max()) < 1e-5  # the bias
    accumulator = StatisticsAccumulator()
    accumulator.add(encoder)
    statistics = accumulator.result()
    assert torch.allclose(statistics.mean, encoder.memory.double().mean((0, 1)))
    assert torch.allclose(statistics.of_queries.mean, encoder.attention_input.double().mean((0, 1)))


def test_caches_are_counted_of_both_attentions(tiny_family):
    assert stream_of(tiny_family("t5")).cache_bytes_per_token() == 2 * 2 * (2 * 8 * 16) * 4


def test_a_model_without_a_head_has_no_stream(tiny_family):
    checkpoint = open_checkpoint(str(tiny_family("t5")))
    config = {**checkpoint.config, "architectures": ["T5Model"]}
    with pytest.raises(InputError, match="expected a model with a language-model head, found T5Model"):
        Seq2SeqStream(config, checkpoint.read, list(checkpoint.tensors), encoded=SOURCE)


@torch.no_grad()
def test_whisper_hears_the_sound_of_a_number(tiny_family):
    folder = tiny_family("whisper")
    checkpoint = open_checkpoint(str(folder))
    stream = stream_class(checkpoint.config)(checkpoint.config, checkpoint.read, list(checkpoint.tensors), encoded=10)
    written = torch.randint(3, 97, (3, TARGET), generator=torch.Generator().manual_seed(5))
    states = stream.embed(torch.cat([torch.tensor([[4], [7], [4]]).expand(-1, 10), written], 1))
    assert torch.equal(states[0, :10], states[2, :10])
    for index in range(stream.layers):
        with stream.open_layer(index) as layer:
            states = layer(states).states
    stock = AutoModelForSpeechSeq2Seq.from_pretrained(folder).eval()
    sound = synthetic_sound(torch.tensor([4, 7, 4]), 16, 20)
    assert (sound.min() > -1, sound.max() < 1, not torch.equal(sound[0], sound[1])) == (True, True, True)
    expected = stock(input_features=sound, decoder_input_ids=written).logits
    assert torch.equal(stream.logits(states[:, 10:]), expected)

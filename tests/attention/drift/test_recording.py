"""The blocks as transformers' attention function, and one layer recorded: attention's outputs, the
arguments of its call, and that nothing stays behind.
"""

import pytest
import torch
from helpers import precision
from helpers.attention import attention_maps
from torch import nn
from torch.testing import assert_close
from transformers import LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvfold.attention import blocked
from kvfold.attention.drift.recording import LayerArguments, OpenLayer
from kvfold.attention.interface import BLOCKWISE, blockwise_attention

HIDDEN = torch.zeros(2, 9, 3)
DISTANCE = torch.arange(9)[:, None] - torch.arange(9)
CAUSAL = DISTANCE >= 0


def make_inputs(length, keys):
    torch.manual_seed(0)
    return (torch.randn(2, 4, length, 8), torch.randn(2, 2, keys, 8), torch.randn(2, 2, keys, 6))


def attend(inputs, *options):
    """The formula in float64: ``[B, T, H, Dv]``."""
    query, key, value = (x.double() for x in inputs)
    maps = attention_maps(query, key, *options)
    return (maps @ value.repeat_interleave(2, 1)).transpose(1, 2)


class Attention(nn.Module):
    """Given queries, keys and values, through transformers' attention interface."""

    num_key_value_groups = 2

    def __init__(self, is_causal=True, **options):
        super().__init__()
        self.config = LlamaConfig(attn_implementation=BLOCKWISE)
        self.is_causal = is_causal
        self.options = options
        self.inputs = make_inputs(9, 9)
        self.o_proj = nn.Linear(24, 5, bias=False)

    def forward(self, hidden_states, mask):
        function = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation]
        context, _ = function(self, *self.inputs, mask, **self.options)
        return self.o_proj(context.flatten(2)), None


class Layer(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.self_attn = attention

    def forward(self, hidden_states, mask=None):
        return self.self_attn(hidden_states + 1, mask)[0] * 2


def record(attention, mask, **tensors):
    arguments = LayerArguments((), {"mask": mask})
    return OpenLayer(0, Layer(attention), lambda _: arguments, tensors)(HIDDEN)


@pytest.mark.parametrize(("length", "keys"), [(1, 9), (256, 256), (270, 300)])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("sinks", [None, torch.linspace(-1, 2, 4)])
def test_blockwise_attention_is_the_formula(length, keys, softcap, sinks):
    inputs = make_inputs(length, keys)
    seen = torch.ones(length, keys).tril(keys - length).bool()
    # sinks alone go without a mask
    mask = None if softcap is None and sinks is not None else seen[None, None]
    result, _ = blockwise_attention(
        Attention(), *inputs, mask, scaling=0.4, softcap=softcap, s_aux=sinks
    )
    expected = attend(inputs, 0.4, seen, softcap, sinks)
    assert_close(result.double(), expected, **precision.ACTIVATIONS)


@pytest.mark.parametrize("kept", [0, 1 << 20])
def test_blockwise_attention_has_the_formulas_gradients(kept, monkeypatch):
    monkeypatch.setattr(blocked, "_SAVED_WEIGHTS", kept)
    sinks = torch.linspace(-1, 2, 4)
    leaves = [x.double().requires_grad_() for x in (*make_inputs(3, 3), sinks)]
    seen = torch.ones(1, 1, 3, 3).tril().bool()

    def run(query, key, value, sinks):
        return blockwise_attention(
            nn.Module(), query, key, value, seen, scaling=0.4, softcap=1.5, s_aux=sinks
        )[0]

    torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize(
    ("seen", "window", "recorded"),
    [
        (CAUSAL, None, True),
        (CAUSAL & (DISTANCE < 4), 4, True),
        # a window that the layer does not tell
        (CAUSAL & (DISTANCE < 4), None, False),
        # a prefix seen from everywhere
        (CAUSAL | (torch.arange(9) < 3), None, False),
    ],
)
@pytest.mark.parametrize("boolean", [True, False])
def test_a_layer_computes_what_its_recording_says(seen, window, recorded, boolean):
    """A mask outweighs the module's ``is_causal``."""
    mask = seen[None, None]
    if not boolean:
        mask = torch.zeros(1, 1, 9, 9).masked_fill(~mask, torch.finfo(torch.float32).min)
    attention = Attention(not recorded, scaling=0.3, softcap=0.7, sliding_window=window)
    output = record(attention, mask)
    expected = attend(attention.inputs, 0.3, seen, 0.7)
    assert_close(output.context.double(), expected, **precision.ACTIVATIONS)
    assert torch.equal(output.hidden, output.attention * 2)
    assert torch.equal(output.attention_input, HIDDEN + 1)
    assert (output.scale, output.softcap, output.window) == (0.3, 0.7, window)
    if recorded:
        assert output.query is attention.inputs[0]
        assert output.key is attention.inputs[1]
    else:
        assert (output.query, output.key) == (None, None)


@pytest.mark.parametrize("causal", [True, False])
def test_without_a_mask_the_modules_word_counts(causal):
    attention = Attention(is_causal=causal)
    output = record(attention, None)
    expected = attend(attention.inputs, 8**-0.5, CAUSAL | (not causal))
    assert_close(output.context.double(), expected, **precision.ACTIVATIONS)
    assert (output.query is not None) == causal


def test_sinks_are_recorded_and_biased_scores_have_no_queries():
    sinks = torch.ones(4)
    assert record(Attention(s_aux=sinks), CAUSAL[None, None]).sinks is sinks
    bias = torch.zeros(1, 4, 9, 9)
    output = record(Attention(position_bias=bias), CAUSAL[None, None])
    assert (output.query, output.key) == (None, None)


class Broken(Attention):
    def forward(self, hidden_states, mask):
        raise RuntimeError("broken")


class Skipping(Layer):
    def forward(self, hidden_states):
        return hidden_states


@pytest.mark.parametrize(
    ("layer", "error"), [(Layer(Broken()), RuntimeError), (Skipping(Attention()), ValueError)]
)
def test_nothing_is_left_behind_where_a_layer_fails(layer, error):
    with pytest.raises(error):
        OpenLayer(0, layer, lambda _: LayerArguments((), {}))(HIDDEN)
    assert layer.self_attn.config._attn_implementation == BLOCKWISE
    assert not layer.self_attn._forward_hooks


def test_tensors_take_the_place_of_the_modules_parameters():
    attention = Attention()
    weight = torch.randn(5, 24, requires_grad=True)
    output = record(attention, None, **{"self_attn.o_proj.weight": weight})
    assert_close(output.attention, output.context.flatten(2) @ weight.T)
    output.attention.sum().backward()
    assert weight.grad is not None
    assert attention.o_proj.weight.grad is None

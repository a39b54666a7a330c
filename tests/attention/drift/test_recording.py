"""One layer run and recorded: attention's outputs, the record of its call, and that nothing stays
behind.
"""

from typing import Any

import pytest
import torch
from helpers import precision
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from kvfold.attention import blocked
from kvfold.attention.drift.recording import RECORDER, Arguments, OpenLayer
from kvfold.attention.interface import BLOCKWISE, blockwise_attention


def arguments(length: int, keys: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    keys = length if keys is None else keys
    return torch.randn(2, 4, length, 8), torch.randn(2, 2, keys, 8), torch.randn(2, 2, keys, 6)


def whole_map(
    inputs: tuple[Tensor, ...], seen: Tensor, scale: float, softcap=None, sinks=None
) -> Tensor:
    query, (key, value) = (
        inputs[0].double(),
        (part.double().repeat_interleave(2, 1) for part in inputs[1:]),
    )
    scores = scale * query @ key.mT
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    parts = scores.masked_fill(~seen, -torch.inf).exp()
    sunk = 0 if sinks is None else sinks.double().exp()[:, None, None]
    return (parts / (parts.sum(-1, keepdim=True) + sunk) @ value).transpose(1, 2)


@pytest.mark.parametrize(("length", "keys"), [(7, 7), (1, 9), (256, 256), (270, 300)])
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_blockwise_attention_is_the_formula(
    length: int, keys: int, softcap: float | None, with_sinks: bool
) -> None:
    inputs = arguments(length, keys)
    seen = torch.ones(length, keys).tril(keys - length).bool()
    options = {"softcap": softcap, "s_aux": torch.linspace(-1, 2, 4) if with_sinks else None}
    expected = whole_map(inputs, seen, 0.4, *options.values())
    # causality needs no mask
    masks = (
        [seen[None, None], None]
        if softcap is None and (with_sinks or length == keys)
        else [seen[None, None]]
    )
    for mask in masks:
        found = ALL_ATTENTION_FUNCTIONS[BLOCKWISE](
            Attention(), *inputs, mask, scaling=0.4, **options
        )[0]
        torch.testing.assert_close(found.double(), expected, **precision.ACTIVATIONS)


@pytest.mark.parametrize("kept", [0, 1 << 20], ids=["weights made again", "weights kept"])
def test_blockwise_attention_has_the_formulas_gradients(
    kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocked, "_KEPT_WEIGHTS", kept)
    sinks = torch.linspace(-1, 2, 4)
    inputs = [tensor.double().requires_grad_() for tensor in (*arguments(3), sinks)]
    seen = torch.ones(1, 1, 3, 3).tril().bool()

    def attend(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor) -> Tensor:
        options = {"scaling": 0.4, "softcap": 1.5, "s_aux": sinks}
        return blockwise_attention(nn.Module(), query, key, value, seen, **options)[0]

    torch.autograd.gradcheck(attend, inputs)


class Attention(nn.Module):
    """Queries, keys and values that are given, through transformers' attention interface."""

    num_key_value_groups = 2

    def __init__(self, is_causal: bool = True, **options: Any) -> None:
        super().__init__()
        self.config = LlamaConfig(attn_implementation=BLOCKWISE)
        self.is_causal = is_causal
        self.options = options
        self.given: tuple[Tensor, Tensor, Tensor] = arguments(9)

    def forward(self, hidden_states: Tensor, mask: Tensor | None) -> tuple[Tensor, None]:
        context, _ = ALL_ATTENTION_FUNCTIONS[self.config._attn_implementation](
            self, *self.given, mask, **self.options
        )
        return context.flatten(2), None


class Layer(nn.Module):
    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.self_attn = attention

    def forward(self, hidden_states: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.self_attn(hidden_states + 1, mask)[0] * 2


HIDDEN = torch.zeros(2, 9, 3)
ORDER = torch.arange(9)[:, None] - torch.arange(9)
CAUSAL = ORDER >= 0


def recorded(attention: nn.Module, mask: Tensor | None = CAUSAL[None, None]) -> Any:
    return OpenLayer(0, Layer(attention), lambda _: Arguments((), {"mask": mask}))(HIDDEN)


@pytest.mark.parametrize(("softcap", "window"), [(None, None), (0.7, 4)])
def test_a_layer_computes_what_its_recording_says(softcap, window) -> None:
    seen = CAUSAL if window is None else CAUSAL & (window > ORDER)
    attention = Attention(scaling=0.3, softcap=softcap, sliding_window=window)
    output = recorded(attention, seen[None, None])
    expected = whole_map(attention.given, seen, 0.3, softcap).flatten(2)
    torch.testing.assert_close(output.attention.double(), expected, **precision.ACTIVATIONS)
    assert torch.equal(output.hidden, output.attention * 2)
    assert torch.equal(output.attention_input, HIDDEN + 1)
    assert output.query is attention.given[0]
    assert output.key is attention.given[1]
    assert (output.scale, output.window, output.softcap) == (0.3, window, softcap)
    assert output.causal


@pytest.mark.parametrize("causal", [True, False])
def test_without_a_mask_the_modules_word_counts(causal: bool) -> None:
    attention = Attention(is_causal=causal)
    output = recorded(attention, None)
    expected = whole_map(attention.given, CAUSAL | (not causal), 8**-0.5).flatten(2)
    torch.testing.assert_close(output.attention.double(), expected, **precision.ACTIVATIONS)
    assert output.causal == causal
    assert output.query is not None


@pytest.mark.parametrize(
    ("seen", "window", "causal", "plain"),
    [
        (CAUSAL, None, True, True),
        (CAUSAL & (ORDER < 4), 4, True, True),
        (ORDER.abs() < 4, 4, False, True),
        (CAUSAL & (ORDER < 4), None, True, False),  # a window that the layer does not tell
        (CAUSAL | (torch.arange(9) < 3), None, False, False),  # a prefix seen from everywhere
    ],
)
def test_a_mask_outweighs_the_modules_word(seen, window, causal, plain) -> None:
    seen = seen[None, None]
    added = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(torch.float32).min)
    for mask in (seen, added):
        output = recorded(Attention(is_causal=not causal, sliding_window=window), mask)
        assert (output.causal, output.window) == (causal, window)
        assert (output.query is not None) is (output.key is not None) is plain


def test_sinks_are_recorded_and_biased_scores_have_no_queries() -> None:
    sinks = torch.ones(4)
    assert recorded(Attention(s_aux=sinks)).sinks is sinks
    output = recorded(Attention(position_bias=torch.zeros(1, 4, 9, 9)))
    assert (output.query, output.key) == (None, None)


class Broken(Attention):
    def forward(self, hidden_states: Tensor, mask: Tensor | None) -> Any:
        assert self.config._attn_implementation == RECORDER
        raise RuntimeError("broken")


class Skipping(Layer):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states


@pytest.mark.parametrize(
    ("layer", "message"),
    [(Layer(Broken()), "broken"), (Skipping(Attention()), "never called its attention")],
)
def test_nothing_is_left_behind_where_a_layer_fails(layer, message) -> None:
    with pytest.raises((RuntimeError, ValueError), match=message):
        OpenLayer(0, layer, lambda _: Arguments((), {}))(HIDDEN)
    assert layer.self_attn.config._attn_implementation == BLOCKWISE
    assert not layer.self_attn._forward_hooks


def test_tensors_take_the_place_of_the_modules_parameters() -> None:
    class Projected(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.o_proj = nn.Linear(24, 5, bias=False)

        def forward(self, hidden_states: Tensor, mask: Tensor | None) -> Any:
            return self.o_proj(super().forward(hidden_states, mask)[0]), None

    layer = Layer(Projected())
    weight = torch.randn(5, 24, requires_grad=True)
    found = OpenLayer(0, layer, lambda _: Arguments((), {}), {"self_attn.o_proj.weight": weight})(
        HIDDEN
    )
    assert torch.equal(found.output_weight, weight.view(5, 4, 6))
    torch.testing.assert_close(
        found.attention, torch.einsum("bthd,ehd->bte", found.context, found.output_weight)
    )
    found.attention.sum().backward()
    assert weight.grad is not None
    assert layer.self_attn.o_proj.weight.grad is None

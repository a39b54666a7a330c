"""The recording attention: what it computes, and what it notes for whom."""

import pytest
import torch
from torch import Tensor, nn

from kvfold.convert.stream.recorder import capped_attention, recording, recording_attention


def arguments(length: int, keys: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    keys = length if keys is None else keys
    return torch.randn(2, 4, length, 8), torch.randn(2, 2, keys, 8), torch.randn(2, 2, keys, 6)


def whole_map(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, scale: float, softcap: float | None) -> Tensor:
    query, key, value = query.double(), key.double().repeat_interleave(2, 1), value.double().repeat_interleave(2, 1)
    scores = scale * query @ key.mT
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize(("length", "keys"), [(7, 7), (256, 256), (301, 301), (3, 300), (270, 300)])
def test_capped_attention_is_the_formula(length: int, keys: int) -> None:
    query, key, value = arguments(length, keys)
    seen = torch.ones(length, keys).tril(keys - length).bool()
    expected = whole_map(query, key, value, seen, 0.4, 1.5)
    found = capped_attention(query, key, value, None, 0.4, 1.5)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    masked = capped_attention(query, key, value, seen[None, None], 0.4, 1.5)
    assert torch.equal(found, masked)


def test_capped_attention_has_the_formulas_gradients() -> None:
    query, key, value = (tensor.double().requires_grad_() for tensor in arguments(5))
    torch.autograd.gradcheck(lambda *given: capped_attention(*given, None, 0.4, 1.5), (query, key, value))


class Module(nn.Module):
    num_key_value_groups = 2
    is_causal = True


def test_what_is_noted_and_what_is_computed() -> None:
    query, key, value = arguments(9)
    seen = torch.ones(9, 9).tril().bool()
    for softcap in (None, 0.7):
        with recording() as call:
            found, nothing = recording_attention(
                Module(), query, key, value, None, scaling=0.3, softcap=softcap, sliding_window=4
            )
        assert nothing is None
        torch.testing.assert_close(
            found.double(), whole_map(query, key, value, seen, 0.3, softcap), rtol=1e-5, atol=1e-6
        )
        assert call.query is query
        assert call.key is key
        assert call.mixed is found
        assert (call.scale, call.window, call.softcap) == (0.3, 4, softcap)


def test_nothing_is_noted_unasked_and_nothing_after() -> None:
    query, key, value = arguments(9)
    with recording() as call:
        pass
    recording_attention(Module(), query, key, value, None, scaling=0.3)
    assert call.query is None


def test_each_asks_for_its_own() -> None:
    query, key, value = arguments(9)
    with recording() as outer:
        with recording() as inner:
            recording_attention(Module(), query, key, value, None)
        assert outer.query is None
        other = query * 2
        recording_attention(Module(), other, key, value, None)
    assert inner.query is query
    assert inner.scale == 8**-0.5
    assert outer.query is other

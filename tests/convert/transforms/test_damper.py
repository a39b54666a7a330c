"""The channel that keeps sinks short behind a live norm."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvfold.convert.transforms.latent.norm import live_norm
from kvfold.convert.transforms.latent.weights import LatentWeights
from kvfold.convert.transforms.sinks import with_damper
from kvfold.convert.transforms.weights import LayerStatistics
from tests.helpers.layers import normal, statistics_of

E, R, H, D, T = 12, 6, 2, 4, 64


def inputs() -> Tensor:
    """``[8, T, E]``: the first token of a sequence lies along the first dim, as no other does."""
    x = normal(1, 8, T, E)
    x[..., 0] *= 0.1
    x[:, 0] *= 0.01
    x[:, 0, 0] = 3
    return x


def measured() -> LayerStatistics:
    """Half of all attention falls on the first token."""
    x = inputs()
    weight = torch.full((8, T), 0.5 * T / (T - 1), dtype=torch.float64)
    weight[:, 0] = 0.5 * T
    flat, weight = x.flatten(0, 1), weight.flatten()
    gram, mean = (flat * weight[:, None]).T @ flat / len(flat), weight @ flat / len(flat)
    return replace(statistics_of(x, H), received_gram=gram, received_mean=mean)


def latent() -> LatentWeights:
    """Almost nothing of the sink is in the latent."""
    down = normal(2, R, E)
    down[:, 0] = 0.02
    zeros = torch.zeros(0, E, dtype=torch.float64)
    return LatentWeights(
        down, zeros, normal(3, H, D, E), torch.zeros(H, 0, E), normal(4, H, D, R), normal(5, H, D, R),
        normal(6, E, H, D), torch.zeros(0), 1.0,
    )  # fmt: skip


def values(weights: LatentWeights) -> Tensor:
    c = inputs() @ weights.down.mT
    return torch.einsum("hdr,btr->bhtd", weights.uv, c * c.square().mean(-1, keepdim=True).rsqrt())


def test_the_row_is_large_on_the_sink_alone() -> None:
    length = (inputs() @ with_damper(latent(), measured()).down[-1]).square()
    assert length[:, 0].min() > 20 * length[:, 1:].mean()


def test_a_live_norm_leaves_the_sink_short() -> None:
    plain = latent()
    damped = with_damper(plain, measured())
    assert damped.rank == R + 1
    torch.testing.assert_close(damped.uv[..., :R], plain.uv)
    assert not damped.uv[..., R:].any()
    assert not damped.uk[..., R:].any()
    expected = torch.einsum("hdr,btr->bhtd", plain.uv, inputs() @ plain.down.mT)
    sizes = [(values(live_norm(each, inputs())) - expected)[:, :, 0].norm() for each in (plain, damped)]
    assert sizes[1] < 0.2 * sizes[0]


def test_without_received_attention_no_sink_is_known() -> None:
    with pytest.raises(ValueError, match="averages by received attention are missing"):
        with_damper(latent(), statistics_of(inputs(), H))


def test_inputs_that_are_all_zero_have_no_sinks():
    silent = replace(measured(), gram=torch.zeros(E, E).double(), received_gram=torch.zeros(E, E).double())
    assert with_damper(latent(), silent).down.isfinite().all()

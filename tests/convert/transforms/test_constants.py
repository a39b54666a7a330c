"""What constants and statistics do to the fits of one layer of the trained model that ships."""

from dataclasses import replace

import pytest
import torch
from helpers.layers import attend, normed_statistics, relative_error, statistics_of
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvfold.convert.data import demo_folder, read_text
from kvfold.convert.transforms import linalg
from kvfold.convert.transforms.fold import principal, score_fit
from kvfold.convert.transforms.fold.principal import layer_moments
from kvfold.convert.transforms.latent import slots
from kvfold.convert.transforms.latent.factorization import factor_layer
from kvfold.convert.transforms.weights import AttentionWeights, HeadNorm, Rotary

LAYER = 1
LENGTH = 128
CONTEXT = 512
HEADS = 8
DIMS = 32


@pytest.fixture(scope="module")
def layer():
    """Weights, statistics and rotary frequencies of a layer, and its attention inputs ``[12, T,
    E]``, float64.
    """
    model = AutoModelForCausalLM.from_pretrained(
        demo_folder(), dtype=torch.float32, attn_implementation="eager"
    )
    tokens = AutoTokenizer.from_pretrained(demo_folder())(read_text("calibration")[:12000])[
        "input_ids"
    ]
    tokens = torch.tensor(tokens[: 12 * LENGTH]).view(12, LENGTH)
    attention = model.model.layers[LAYER].self_attn
    inputs = []
    attention.register_forward_pre_hook(
        lambda _, args, kwargs: inputs.append(kwargs["hidden_states"]), with_kwargs=True
    )
    with torch.no_grad():
        maps = model(tokens, output_attentions=True).attentions[LAYER].double()  # [12, H, T, T]
    x = inputs[0].double()
    profile = torch.stack(
        [maps.diagonal(-distance, 2, 3).sum((0, 2)) for distance in range(LENGTH)], 1
    )
    q, k, v, o = (getattr(attention, f"{name}_proj").weight.detach().double() for name in "qkvo")
    weights = AttentionWeights(
        *(rows.view(HEADS, DIMS, -1) for rows in (q, k, v)), o.view(-1, HEADS, DIMS)
    )
    statistics = replace(statistics_of(x, HEADS), profile=profile / x[..., 0].numel())
    return weights, statistics, Rotary(model.model.rotary_emb.inv_freq.double()), x


def latent(layer, rank=24, rope_dim=8, **options):
    weights, statistics, rotary, _ = layer
    chosen = slots.choose_slots(
        [slots.survey_layer(weights, statistics, rotary, CONTEXT)], rope_dim
    )
    return factor_layer(weights, statistics, rotary, chosen, rank, context=CONTEXT, **options)


def value_error(layer):
    """Of the values that the latent gives back, about their mean, as the output projection sees
    them.
    """
    weights, _, _, x = layer
    found = latent(layer)
    flat = x.flatten(0, 1) - x.mean((0, 1))
    o = weights.o.permute(1, 0, 2)
    return relative_error(
        o @ found.uv.double() @ found.down.double() @ flat.T, o @ weights.v @ flat.T
    )


def score_error(layer):
    """The share of score energy that a group of four key heads loses, by the fit's measure."""
    weights, statistics, rotary, _ = layer
    group = layer_moments(weights, statistics, rotary, CONTEXT).group([0, 1, 2, 3])
    lost, total = score_fit.score_losses(score_fit.SCORES.key_head(group), group)
    return (lost.sum() / total.sum()).item()


@pytest.mark.parametrize("figure", [value_error, score_error])
def test_ridge_does_not_matter_where_the_text_visits_every_direction(layer, monkeypatch, figure):
    usual = figure(layer)
    monkeypatch.setattr(linalg, "RIDGE", 1e-4)
    assert figure(layer) == pytest.approx(usual, rel=5e-5)


def test_shared_keys_of_a_trained_layer_lose_less_when_their_members_are_divided_already(layer):
    """With norms put in, whose divisors follow the inputs."""
    weights, statistics, rotary, x = layer

    def norm(rows):
        return HeadNorm(
            "rms",
            (rows @ statistics.gram * rows).sum(-1).mean().sqrt().expand(HEADS, DIMS),
            shared=True,
        )

    weights = replace(weights, q_norm=norm(weights.q), k_norm=norm(weights.k))
    gathered = normed_statistics(weights, x)
    gathered = replace(statistics, normed=gathered.normed, divisors=gathered.divisors)
    wanted = attend(weights, x, rotary)

    def lost(seen):
        folded = principal.fold(weights, seen, rotary, [[0, 1, 2, 3], [4, 5, 6, 7]], CONTEXT)
        return relative_error(attend(folded, x, rotary), wanted)

    assert lost(gathered) < 0.9 * lost(statistics)

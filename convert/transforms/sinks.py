"""Attention sinks: tokens that together receive half of every row of attention, and fits that allow
for them.

Real decoders park attention on a few tokens, above all the first one, whose inputs are unlike any
others. A sink is one key among hundreds, so least squares over tokens barely account for it, yet an
error in its key changes every row. Weighting tokens by received attention fixes this, but costs
accuracy without a sink. So each layer is fitted both ways, and its error on held-out sequences
decides (`weight_tokens_by_attention`).

In layout ``engine`` the latent is always normalized (a live norm). A sink's latent is short,
because its value is almost zero, and the norm would make it as long as all others.
`add_sink_channel` adds a latent channel that nothing reads and that is large only for sinks: the
row ``w`` with the largest ``E[r (w x)^2] / E[(w x)^2]``, where ``r`` is the attention a token
receives.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from kvfold.convert.transforms.latent.latent_weights import LatentWeights
from kvfold.convert.transforms.linalg import compute_input_moment
from kvfold.convert.transforms.weights import LayerStatistics

# Candidates for the share of received attention in a token's weight
# (`LayerStatistics.weight_by_received_attention`). 0 is plain least squares over tokens. 0.5 is
# not tuned: it gives a sink about the same weight as all other tokens.
SHARES = (0.0, 0.5)

# Isotropic share of the inputs' energy in the denominator of `add_sink_channel`: rare directions in
# the text are not sinks. Chosen, not tuned: held-out sequences decide whether a layer gets the
# channel.
SINK_RIDGE = 1e-4


def weight_tokens_by_attention(
    statistics: LayerStatistics,
) -> Iterator[tuple[float, LayerStatistics]]:
    """Yield each share in `SHARES`, and the statistics with this share of every token's weight
    proportional to the attention that it receives. Yields only share 0 if ``statistics`` have no
    measured attention.
    """
    for share in SHARES if statistics.received_gram is not None else SHARES[:1]:
        yield share, statistics.weight_by_received_attention(share)


def add_sink_channel(latent: LatentWeights, statistics: LayerStatistics) -> LatentWeights:
    """Return ``latent`` with one more channel that nothing reads and that is large only for
    attention sinks; its mean square over all tokens is one.

    ``statistics`` weigh all tokens equally and include the averages weighted by received attention.
    """
    assert statistics.received_gram is not None
    # The generalized eigenproblem received w = lambda gram w, in units in which gram is 1.
    gram = compute_input_moment(statistics, SINK_RIDGE)[:-1, :-1]
    white = torch.linalg.inv(torch.linalg.cholesky(gram))
    _, vectors = torch.linalg.eigh(white @ statistics.received_gram @ white.mT)
    row = (vectors[:, -1:].mT @ white).to(latent.down)
    pad = torch.nn.functional.pad
    return replace(
        latent,
        down=torch.cat([latent.down, row]),
        uk=pad(latent.uk, (0, 1)),
        uv=pad(latent.uv, (0, 1)),
    )

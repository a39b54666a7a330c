"""A latent that stays behind a live RMSNorm, for readers that leave no way around it."""

from dataclasses import replace

from torch import Tensor

from kvfold.convert.transforms.latent_weights import LatentWeights, QueryLatent


def usual_rms(down: Tensor, inputs: Tensor) -> float:
    """The mean over tokens of the rms of ``c = down x``; ``down [R, E]``, ``inputs [..., E]``."""
    return float((inputs @ down.to(inputs).mT).double().square().mean(-1).sqrt().mean())


def live_norm(latent: LatentWeights, inputs: Tensor) -> LatentWeights:
    """``latent`` in the scale in which its rms is one on average over ``inputs [..., E]`` (attention inputs).

    An RMSNorm of weight one then changes it least, whatever the eps of the reader. The latent must not be centred: a norm
    acts on all of it. Raises ``ValueError`` when it has a bias.
    """
    if latent.down_bias is not None:
        raise ValueError("latent: expected one that is not centred (to_latent(..., centred=False)), found down_bias")
    rms = usual_rms(latent.down, inputs)
    scaled = replace(latent, down=latent.down / rms, uk=latent.uk * rms, uv=latent.uv * rms)
    if latent.query is None:
        return scaled
    query, rms = latent.query, usual_rms(latent.query.down, inputs)
    return replace(scaled, query=QueryLatent(query.down / rms, query.q_nope * rms, query.q_rope * rms))

"""What refinement must not move: the constant channel of each latent in layout ``deepseek``.

Its large bias, its row of zeros and the norm's weights make the norm a known factor whatever the token
(``targets/deepseek.py``); gradients would trade that for a little error.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

_NORM_OF = {"q_a_proj": "q_a_layernorm", "kv_a_proj_with_mqa": "kv_a_layernorm"}


def constant_masks(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """1 where an element of a layer's attention may move, 0 where not; tensors that move as a whole are absent."""
    masks: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        parent, projection, _ = name.rsplit(".", 2)
        if projection in _NORM_OF.values():
            masks[name] = torch.zeros_like(tensor)
        elif projection in _NORM_OF:
            mask = torch.ones_like(tensor)
            mask[len(tensors[f"{parent}.{_NORM_OF[projection]}.weight"]) - 1] = 0
            masks[name] = mask
    return masks

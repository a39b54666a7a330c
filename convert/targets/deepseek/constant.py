"""What refinement must hold on to: the constant channel of each latent in layout ``deepseek``.

Its large bias, its row of zeros and the norm's weights make the norm a known factor whatever the token
(``targets/deepseek.py``); gradients would trade that for a little error. What reads the channel sees a number as much
larger than its neighbours as the bias is, and has to move by as much less.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from kvfold.convert.targets.deepseek.tensors import CONSTANT

_NORM_OF = {"q_a_proj": "q_a_layernorm", "kv_a_proj_with_mqa": "kv_a_layernorm"}
_READERS = ("q_b_proj", "kv_b_proj")


def constant_paces(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """How far each element of a layer's attention moves in a step, relative to the rest of its tensor: 0 not at all.

    Tensors that move evenly are absent. Layer norms of latents are held, too.
    """
    paces: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        parent, projection, _ = name.rsplit(".", 2)
        if projection in _NORM_OF.values():
            paces[name] = torch.zeros_like(tensor)
        elif projection in _NORM_OF:
            paces[name] = torch.ones_like(tensor)
            paces[name][len(tensors[f"{parent}.{_NORM_OF[projection]}.weight"]) - 1] = 0
        elif projection in _READERS:
            paces[name] = torch.ones_like(tensor)
            paces[name][:, -1] = 1 / CONSTANT
    return paces

"""An objective in one file: shared keys that are near the keys of the heads, whatever the queries
read of them.
"""

import torch

from kvfold.convert.methods.registry import register_objective
from kvfold.convert.transforms.fold.heads import GroupMoments, SharedHead, share_keys
from kvfold.convert.transforms.fold.score_fit import ScoreObjective


@register_objective("nearest-keys")
class NearestKeys(ScoreObjective):
    def fit_key_head(self, group: GroupMoments) -> SharedHead:
        heads, dims = group.keys.shape[:2]
        alike = torch.eye(dims).to(group.keys).expand(heads, dims, dims)
        return share_keys(group.keys, alike, group.pairs).repeat_decode(
            group.query_heads_per_kv_head
        )

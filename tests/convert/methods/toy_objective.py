"""An objective in one file: shared keys that are near the keys of the heads, whatever the queries
read of them.
"""

from dataclasses import replace

import torch

from kvfold.convert.methods.registry import register_objective
from kvfold.convert.transforms.fold.heads import (
    GroupMoments,
    ScoreObjective,
    SharedHead,
    share_keys,
)


@register_objective("nearest-keys")
class NearestKeys(ScoreObjective):
    def fit_key_head(self, group: GroupMoments) -> SharedHead:
        alike = torch.eye(group.keys.shape[1]).to(group.keys).expand_as(group.queries)
        return share_keys(replace(group, queries=alike))

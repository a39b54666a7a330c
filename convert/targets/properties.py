"""What a model computes with besides its tensors, and what of it a converted model would lose. Does
not import torch.
"""

from collections.abc import Collection, Mapping
from typing import Any

from kvfold.convert.families.family import load_family, read_text_config
from kvfold.convert.families.model import Model, make_model
from kvfold.convert.targets.custom_code import BLOCK, get_source_type
from kvfold.convert.targets.mla.spec import is_mla_config

_OF_BLOCK = (
    "activation",
    "residual_scale",
    "embedding_scale",
    "logit_scale",
    "logit_softcap",
    "experts_per_token",
    "experts_renormalized",
)
_OF_LAYERS = {  # names in layout kvfold, of fields of `AttentionLayer`
    "scale": "scale",
    "sliding_window": "window",
    "softcap": "softcap",
}


def collect_properties(model: Model) -> dict[str, Any]:
    """Return the context, activation, scales, soft caps and choice of experts of ``model``, by
    name, and of each layer the scale of scores, the window and the soft cap.
    """
    context = model.geometry.positions
    properties = {"context": context, **{name: getattr(model.block, name) for name in _OF_BLOCK}}
    for name, field in _OF_LAYERS.items():
        properties[name] = [getattr(layer, field) for layer in model.layers]
    # A window of the whole context hides nothing.
    windows = [min(window or context, context) for window in properties["sliding_window"]]
    return {**properties, "sliding_window": windows}


def list_lost_properties(
    model: Model, config: Mapping[str, Any], names: Collection[str]
) -> list[str]:
    """Return one line for each property of ``model`` that differs in its conversion, whose
    config.json is ``config`` and whose tensors are ``names``.
    """
    before = collect_properties(model)
    language = read_text_config(config, names)
    if is_mla_config(language):
        layers = model.geometry.layers
        context = language["max_position_embeddings"]
        after = {
            **before,  # the scale of scores is in the weights
            "context": context,
            "activation": language["hidden_act"],
            **dict.fromkeys(("residual_scale", "embedding_scale", "logit_scale"), 1.0),
            "logit_softcap": None,
            "sliding_window": [context] * layers,
            "softcap": [None] * layers,
        }
        if model.block.sparse:
            after["experts_per_token"] = language.get("num_experts_per_tok")
            after["experts_renormalized"] = language.get("norm_topk_prob")
    elif (kind := get_source_type(config)) is not None:
        block = config[BLOCK]
        after = collect_properties(Model(load_family(kind), {**config, "model_type": kind}))
        rows = [{**block, **row} for row in block.get("layers", [{}] * model.geometry.layers)]
        after |= {name: [row.get(name) for row in rows] for name in _OF_LAYERS}
        context = after["context"]
        after["sliding_window"] = [min(row or context, context) for row in after["sliding_window"]]
    else:
        after = collect_properties(make_model(config, names))
    return [
        f"{name}: {value} in the source, {after[name]} in the result"
        for name, value in before.items()
        if value != after[name]
    ]

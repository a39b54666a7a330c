"""A decoder written from nothing but the family files computes what the stock class computes.

So the files are right about scales, windows, soft caps, norms, rotary embeddings and the order of a
layer's parts.
"""

import json
import math

import pytest
import torch
from helpers.attention import attention_maps, random_tokens
from helpers.cases import mostly_slow, read_cases
from helpers.checkpoints import read_json, tensors
from helpers.layers import normalized, project_heads, rotated
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.activations import ACT2FN

from kvfold.convert.families.family import find_family, list_supported_model_types
from kvfold.convert.families.layer_io import make_layer_rotary, read_attention_weights
from kvfold.convert.families.model import make_model
from kvfold.convert.families.rotary import read_rope_parameters


def normalize(x, kind, eps):
    x = x - x.mean(-1, keepdim=True) if kind == "layer" else x
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


class Decoder:
    def __init__(self, folder, stock):
        self.model = make_model(read_json(folder / "config.json"))
        self.tensors = {name: value.double() for name, value in tensors(folder).items()}
        self.block = self.model.block
        self.names = self.model.names_by_role
        self.stock = stock

    def role(self, role, layer=None):
        names = self.names.get((role, layer))
        return None if names is None else self.tensors[names[0]]

    def linear(self, x, role, layer=None):
        weight = self.role(role, layer)
        weight = weight.T if self.model.family.attention.transposed else weight
        return functional.linear(x, weight, self.role(f"{role}_bias", layer))

    def norm(self, x, role, layer=None):
        x = normalize(x, self.block.norm, self.block.norm_eps)
        if not self.block.norm_weight or (role, layer) not in self.names:
            return x
        x = x * (self.role(role, layer) + self.block.norm_offset)
        return x + self.role(f"{role}_bias", layer) if self.block.norm_bias else x

    def attention(self, x, layer):
        weights = read_attention_weights(self.model, layer, self.tensors.__getitem__)
        how = self.model.layers[layer]
        rotary = make_layer_rotary(self.model, layer)
        positions = torch.arange(x.shape[1]).double()

        def project(weight, bias):  # [B, H, T, D]
            y = project_heads(weight, bias, x)
            return y if how.clip is None else y.clamp(-how.clip, how.clip)

        def rotate(y):
            return rotated(y, rotary.theta) * rotary.expand_amplitude(weights.q)[:, 0]

        def place(y, norm):
            after = norm is not None and norm.after_rotary
            return normalized(rotate(y), norm) if after else rotate(normalized(y, norm))

        q = place(project(weights.q, weights.q_bias), weights.q_norm)
        k = place(project(weights.k, weights.k_bias), weights.k_norm)
        if how.growth:
            original = read_rope_parameters(self.model.values)["original_max_position_embeddings"]
            q = q * (1 + how.growth * torch.log(1 + torch.floor(positions / original)))[:, None]
        config = self.model.config
        if config["model_type"] in ("bloom", "mpt") or config.get("alibi"):
            # one more dim, for numbers of heads that are powers of two
            slopes = 2.0 ** (-8 / weights.heads * torch.arange(1, weights.heads + 1)) / how.scale
            q = torch.cat([q, slopes[:, None, None].expand(*q.shape[:3], 1)], -1)
            k = torch.cat([k, positions[:, None].expand(*k.shape[:3], 1)], -1)
        distance = positions[:, None] - positions
        seen = (distance >= 0) & (distance < (how.window or math.inf))
        maps = attention_maps(q, k, how.scale, seen, how.softcap, weights.sinks)
        v = project(weights.v, weights.v_bias)
        mixed = maps @ v.repeat_interleave(weights.heads // weights.kv_heads, 1)
        out = torch.einsum("bhtd,ehd->bte", mixed, weights.o)
        return out if weights.o_bias is None else out + weights.o_bias

    def mlp(self, x, layer):
        if self.model.layers[layer].sparse:
            block = self.stock.model.layers[layer]
            made = (block.mlp if hasattr(block, "mlp") else block.block_sparse_moe)(x.float())
            return (made[0] if isinstance(made, tuple) else made).double()
        act = ACT2FN[self.block.activation]
        if self.block.activation == "xielu":  # it has parameters
            act = self.stock.model.layers[layer].mlp.act_fn
        if self.block.mlp == "plain":
            return self.linear(act(self.linear(x, "up", layer)), "down", layer)
        if self.block.mlp == "gated_fused":
            gate, up = self.linear(x, "gate_up", layer).chunk(2, -1)
        else:
            gate = self.linear(x, "gate", layer)
            up = self.linear(x, "up", layer)
        return self.linear(act(gate) * up, "down", layer)

    def layer(self, x, layer):
        order = self.block.order
        scale = self.block.residual_scale
        if order == "parallel":
            normed = self.norm(x, "attention_norm", layer)
            other = self.norm(x, "mlp_norm", layer) if ("mlp_norm", layer) in self.names else normed
            if ("mlp_own_norm", layer) in self.names:  # falcon
                normed, other = (
                    self.norm(x, f"{part}_own_norm", layer) for part in ("attention", "mlp")
                )
            return x + self.attention(normed, layer) + self.mlp(other, layer)
        for name, part in (("attention", self.attention), ("mlp", self.mlp)):
            y = part(
                x if order in ("post", "outer") else self.norm(x, f"{name}_norm", layer), layer
            )
            x = x + scale * (
                self.norm(y, f"{name}_post_norm", layer) if order in ("post", "sandwich") else y
            )
            x = self.norm(x, f"{name}_norm", layer) if order == "outer" else x
        return x

    def unnormed_end(self):
        """Whether nothing follows the last layer: where its norms are behind everything (opt)."""
        return self.block.order == "outer" or bool(
            self.model.config.get("_remove_final_layer_norm")
        )

    def __call__(self, tokens):
        x = self.role("embedding")[tokens] * self.block.embedding_scale
        if ("project_in", None) in self.names:
            x = self.linear(x, "project_in")
        if (positions := self.role("positions")) is not None:  # opt has two rows more in front
            x = x + positions[len(positions) - self.model.geometry.positions :][: tokens.shape[1]]
        x = self.norm(x, "embedding_norm") if ("embedding_norm", None) in self.names else x
        for layer in range(self.model.geometry.layers):
            x = self.layer(x, layer)
        head = self.role("embedding") if self.block.tied else self.role("head")
        normed = x if self.unnormed_end() else self.norm(x, "final_norm")
        normed = (
            self.linear(normed, "project_out") if ("project_out", None) in self.names else normed
        )
        logits = functional.linear(normed, head, self.role("head_bias")) * self.block.logit_scale
        cap = self.block.logit_softcap
        return logits if cap is None else cap * torch.tanh(logits / cap)


# The cases beside this file are variants beside every flag, which a test below turns.
ALL = [
    *(
        (name, changes)
        for name in list_supported_model_types()
        for changes in ({}, {"num_key_value_heads": 2})
    ),
    *read_cases(__file__),
]


def check(folder):
    stock = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = random_tokens(2, 24)
    decoder = Decoder(folder, stock)
    with torch.no_grad():
        torch.testing.assert_close(
            decoder(tokens).float(), stock(tokens).logits, rtol=1e-4, atol=2e-5
        )


@pytest.mark.parametrize(("name", "changes"), ALL, ids=str)
def test_a_decoder_written_from_the_family_file_agrees_with_the_stock_class(
    name, changes, tiny_family
):
    check(tiny_family(name, **changes))


@pytest.mark.parametrize("name", mostly_slow(list_supported_model_types(), 4))
def test_it_agrees_with_every_flag_the_other_way_and_an_eps_that_is_felt(name, tiny_family):
    config = json.loads((tiny_family(name) / "config.json").read_text())
    keys = find_family(config).config
    flags = {
        key: not config.get(key, entry.default)
        for key, entry in keys.items()
        if entry.type == "flag"
    }
    if (
        name == "falcon"
    ):  # eager attention adds ALiBi twice, and the newer architecture is always parallel
        flags |= {"alibi": False, "parallel_attn": True}
    check(
        tiny_family(
            name, **flags, **{key: 0.2 for key in keys if key.endswith(("_eps", "_epsilon"))}
        )
    )

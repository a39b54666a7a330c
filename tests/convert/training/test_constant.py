"""The constant channel of layout ``free`` under optimizers, weight decay and low precision."""

import shutil
from functools import partial

import pytest
import torch
import torch.distributed as dist
from helpers import forked
from helpers.checkpoints import run_conversion
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.errors import KvfoldError
from kvfold.convert.targets.mla.encode import CONSTANT, compute_latent_norm_weight
from kvfold.convert.training.steps import (
    check_constant_channel,
    freeze_constant_channel,
    has_constant_channel,
    scale_adam_steps,
    scale_gradients,
)

RANKS = {"kv_a_proj_with_mqa": 24, "q_a_proj": 65}
CHANNEL = "model.layers.1.self_attn.kv_a_proj_with_mqa.bias"
NORM = "model.layers.0.self_attn.q_a_layernorm.weight"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module")
def latent(tiny_family, tmp_path_factory):
    """A tiny model in layout ``free``, with a query latent."""
    out = tmp_path_factory.mktemp("constant") / "latent"
    source = tiny_family("qwen2", sliding_window=None, layer_types=None)
    run_conversion(source, out, to="mla", kv_rank=24, rope_dim=8, method="svd")
    return out


def batches(steps):
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(97, (4, 24), generator=generator) for _ in range(steps)]


def adam(model, held, **options):
    """An optimizer that holds the slices, and takes its steps otherwise as they are."""
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=5e-3, **options
    )
    sizes = dict.fromkeys(dict(model.named_parameters()), 1.0)
    scale_adam_steps(optimizer, dict(model.named_parameters()), sizes, held, {})
    return optimizer


def trained(folder, dtype, steps=6, decay=0.1):
    """The model after some steps with every tensor of the optimizer in ``dtype``, weight decay on
    all of them.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    optimizer = adam(
        model, freeze_constant_channel(dict(model.named_parameters())), weight_decay=decay, eps=1e-4
    )
    losses = []
    for tokens in batches(1) * steps:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


@pytest.mark.parametrize("rank", [6, 48, 512, 2001])
def test_every_dtype_holds_the_constant_and_the_norms_weight_exactly(rank):
    weight = compute_latent_norm_weight(rank)
    for dtype in DTYPES:
        assert torch.tensor([CONSTANT, weight], dtype=dtype).tolist() == [CONSTANT, weight]
    assert 0.7 < CONSTANT / rank**0.5 / weight < 1.42


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_norm_still_does_nothing(latent, dtype):
    model, losses = trained(latent, dtype)
    assert losses[-1] < losses[0] - 0.1  # it did train
    check_constant_channel(dict(model.named_parameters()), open_checkpoint(latent))
    seen = []
    for layer in model.model.layers:
        for norm in (layer.self_attn.q_a_layernorm, layer.self_attn.kv_a_layernorm):
            norm.register_forward_hook(
                lambda _, inputs, output: seen.append((inputs[0].float(), output.float()))
            )
    with torch.no_grad():
        model(input_ids=batches(2)[1])
    assert len(seen) == 4
    for latents, normed in seen:
        rank = latents.shape[-1]
        largest = latents[..., :-1].abs().argmax(-1, keepdim=True)
        factor = (normed / latents).gather(-1, largest) / (
            compute_latent_norm_weight(rank) * rank**0.5 / CONSTANT
        )
        # the whole latent beside the constant moves the norm by |c|^2 / 2 B^2; the rest is the
        # dtype's rounding
        others = latents[..., :-1].square().sum(-1).max().item()
        assert others < 1e-3 * CONSTANT**2
        assert (factor - 1).abs().max().item() <= others / (2 * CONSTANT**2) + 2 * torch.finfo(
            dtype
        ).eps


def test_readers_of_the_channel_move_by_as_much_less_as_it_is_larger(latent):
    start = AutoModelForCausalLM.from_pretrained(latent)
    held, _ = trained(latent, torch.float32, steps=1, decay=0.0)
    moved = (
        held.model.layers[0].self_attn.q_b_proj.weight
        - start.model.layers[0].self_attn.q_b_proj.weight
    )
    usual = moved[:, :-1].abs().median()
    slow = moved[:, -1].abs().median()
    assert 0 < slow < 4 * usual / CONSTANT


def test_gradients_are_those_of_the_model_but_for_what_is_held(latent):
    tokens = batches(1)[0]
    plain, held = (AutoModelForCausalLM.from_pretrained(latent) for _ in range(2))
    named = dict(held.named_parameters())
    slices = freeze_constant_channel(named)
    for model in (plain, held):
        model(input_ids=tokens, labels=tokens).loss.backward()
    scale_gradients(named, slices)
    for name, value in plain.named_parameters():
        expected = value.grad
        kind = name.split(".")[-2]
        if kind.endswith("a_layernorm"):
            assert held.get_parameter(name).grad is None
            continue
        if kind in RANKS:
            expected[RANKS[kind] - 1] = 0
        if kind in ("kv_b_proj", "q_b_proj"):
            expected[:, -1] /= CONSTANT
        assert_close(held.get_parameter(name).grad, expected, rtol=1e-5, atol=1e-7, msg=name)


def test_which_checkpoints_have_the_channel(latent, tiny_family, tmp_path):
    assert has_constant_channel(open_checkpoint(latent))
    assert not has_constant_channel(open_checkpoint(tiny_family("llama")))
    biased = shutil.copytree(latent, tmp_path / "a-latent-model-with-biases")
    tensors = load_file(biased / "model.safetensors")
    tensors[CHANNEL][23] = 0.3
    save_file(tensors, biased / "model.safetensors", {"format": "pt"})
    assert not has_constant_channel(open_checkpoint(biased))


@pytest.mark.parametrize("name", [CHANNEL, CHANNEL.replace("bias", "weight"), NORM])
def test_a_channel_that_moved_is_not_written(latent, name):
    checkpoint = open_checkpoint(latent)
    state = {name: checkpoint.read_tensor(name) for name in checkpoint.tensors}
    state[name] = state[name] + 1
    with pytest.raises(KvfoldError, match=f"{name}.*constant channel, which must stay fixed"):
        check_constant_channel(state, checkpoint)


def train_rank(folder, out, is_sharded):
    """Four steps of one of several processes, with its part of the batches; the first writes the
    weights to ``out``.
    """
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    world = dist.get_world_size()
    model = AutoModelForCausalLM.from_pretrained(folder)
    held = freeze_constant_channel(dict(model.named_parameters()))
    if is_sharded:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    # The eps of `trained`: with a smaller one, rounding of gradients near zero becomes whole steps.
    optimizer = adam(model, held, weight_decay=0.1, eps=1e-4)
    for tokens in batches(4):
        own = tokens[rank::world]
        model(input_ids=own, labels=own).loss.backward()
        scale_gradients(dict(model.named_parameters()), held)
        optimizer.step()
        optimizer.zero_grad()
    state = {
        n: (p.full_tensor() if isinstance(p, DTensor) else p).detach()
        for n, p in model.named_parameters()
    }
    if rank == 0:
        torch.save(state, out)
    dist.destroy_process_group()


@pytest.mark.slow
def test_sharded_weights_are_held_too(latent, tmp_path):
    """Two processes, each with half of every tensor (FSDP version 2), train as one does with the
    whole.
    """
    for processes, way in ((1, "whole"), (2, "sharded")):
        work = partial(train_rank, latent, tmp_path / way, way == "sharded")
        ended = forked.run_ranks(tmp_path / f"{way}-log", work, processes)
        assert [each.status for each in ended] == [0] * processes, ended
    whole, sharded = (torch.load(tmp_path / way) for way in ("whole", "sharded"))
    check_constant_channel(sharded, open_checkpoint(latent))
    assert_close(sharded, whole, rtol=0, atol=2e-5)

"""Polishing: the model that is trained, the loss, and the learning rate after rounds that gained
nothing.
"""

from contextlib import ExitStack
from types import SimpleNamespace
from weakref import WeakValueDictionary

import pytest
import torch
from helpers.attention import random_tokens
from helpers.checkpoints import stock_model
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.checkpoint.writer import PlannedTensor
from kvfold.convert.families.model import make_model
from kvfold.convert.stream.checkpoint_stream import CheckpointStream
from kvfold.convert.stream.stock import ModelHead
from kvfold.convert.training.loop import sum_loss, train
from kvfold.convert.training.polish import (
    PolishTask,
    TeacherText,
    TrainingText,
    compute_plateau_factor,
)
from kvfold.convert.walk.walk import Student

TOKENS = random_tokens(2, 12)


class FixedText(TrainingText):
    """Training text with given residual streams of a teacher."""

    def __init__(self, tokens, states):
        super().__init__(None, tokens, None)
        self.states = states

    def read_sequences(self, indices):
        return TeacherText(self.tokens[indices].long(), self.states[indices])


@pytest.fixture
def task_of():
    """``task_of(folder)``: a checkpoint whose attention is trained towards a teacher with other
    predictions.
    """
    with ExitStack() as stack:

        def make(folder, stored="F32", open_stored=False):
            checkpoint = open_checkpoint(folder)
            model = make_model(checkpoint.config)
            layers = range(model.geometry.layers)
            names = [name for layer in layers for name in model.list_attention_tensors(layer)]
            planned = [
                PlannedTensor(name, stored, info.shape, None if name in names else name)
                for name, info in checkpoint.tensors.items()
            ]
            source = CheckpointStream(checkpoint.config, checkpoint.read_tensor, checkpoint.tensors)
            layout = SimpleNamespace(config=checkpoint.config, tensors=planned)
            student = Student(source, layout)
            tensors = {name: checkpoint.read_tensor(name) for name in names}
            student.set_layer_tensors(tensors)
            opened = [
                stack.enter_context(student.stream.open_layer(layer, open_stored))
                for layer in layers
            ]
            task = PolishTask(student, opened, tensors, None, None, 15)
            with torch.no_grad():
                states = task.run_layers(TOKENS)
            noise = torch.randn(states.shape, generator=torch.Generator().manual_seed(2))
            states += noise * states.std()
            task.text = FixedText(TOKENS, states)
            task.held_out = TeacherText(TOKENS, states)
            return task

        yield make


@pytest.mark.parametrize(
    "family",
    [
        "llama",
        "mistral",
        "mixtral",
        "gemma2",
        "gemma3_text",
        "phi3",
        "granite",
        "cohere",
        "olmo2",
        "qwen3",
    ],
)
def test_logits_and_gradients_are_those_of_the_stock_model(tiny_family, task_of, family):
    folder = tiny_family(family)
    ours = task_of(folder)
    stock = stock_model(folder)
    logits = ours.stream.compute_logits(ours.run_layers(TOKENS))
    expected = stock(input_ids=TOKENS, use_cache=False).logits
    assert_close(logits, expected, atol=2e-5, rtol=2e-5)
    weights = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1))
    (logits * weights).sum().backward()
    (expected * weights).sum().backward()
    for name in ours.masters:
        expected = stock.get_parameter(name).grad
        assert_close(ours.masters[name].grad, expected, atol=1e-4, rtol=1e-3, msg=name)


def test_masters_are_used_rounded_to_the_dtype_that_they_are_stored_in(tiny_family, task_of):
    ours = task_of(tiny_family("llama"), "BF16")
    states = ours.run_layers(TOKENS)
    for master in ours.masters.values():
        # less than half a step of bfloat16
        master.data = master.data.bfloat16().float() * (1 + 2**-12)
    assert torch.equal(ours.run_layers(TOKENS), states)


class AllocationRecorder(TorchDispatchMode):
    """Records the most bytes of tensors that operations inside returned and that were still in
    memory.
    """

    def __init__(self):
        super().__init__()
        self.peak = 0
        self.storages = WeakValueDictionary()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        tensors = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        for storage in (tensor.untyped_storage() for tensor in tensors):
            self.storages[storage._cdata] = storage
        self.peak = max(self.peak, sum(storage.nbytes() for storage in self.storages.values()))
        return result


def test_a_step_holds_masters_moments_and_gradients_but_no_copies_of_all_weights(
    tiny_family, task_of
):
    ours = task_of(tiny_family("llama", num_hidden_layers=16), "BF16", open_stored=True)
    masters = sum(master.nbytes for master in ours.masters.values())
    ours.steps = 2
    with AllocationRecorder() as recorder:
        list(train(ours, ours.text.draw_batches(2, 0), 2))
    assert 4 * masters < recorder.peak < 4.4 * masters, recorder.peak / masters


def compute_losses(logits, teacher):
    """The KL from ``teacher`` and the next-token loss of ``TOKENS``, from all logits, summed."""
    log_q, log_p = (values.log_softmax(-1)[:, :-1] for values in (logits, teacher))
    kl = (log_p.exp() * (log_p - log_q)).sum()
    return kl, -log_q.gather(-1, TOKENS[:, 1:, None]).sum()


@pytest.mark.parametrize("tokens_at_once", [1, 5, 1000])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "opt"])
def test_losses_and_gradients_in_blocks_are_those_of_all_logits(
    tiny_family, family, tokens_at_once, monkeypatch
):
    student = stock_model(tiny_family(family, attention_dropout=0.0))
    teacher = stock_model(tiny_family(family)).requires_grad_(False)
    for weight in teacher.parameters():
        weight *= 1.5
    at_once = tokens_at_once * student.config.vocab_size
    monkeypatch.setattr("kvfold.attention.drift.compare._CPU_LOGITS", at_once)
    head, teacher_head = ModelHead(student), ModelHead(teacher)
    outside = set(student.get_decoder().modules())
    weights = [
        weight
        for module in student.modules()
        if module not in outside
        for weight in module.parameters(recurse=False)
    ]
    expected = compute_losses(student(TOKENS).logits, teacher(TOKENS).logits)
    target = teacher_head.compute_states(TOKENS)[:, :-1]
    for distilled, loss in zip((True, False), expected, strict=True):
        student.zero_grad()
        (loss / 3).backward(retain_graph=True)
        gradients = {name: weight.grad for name, weight in student.named_parameters()}
        student.zero_grad()
        states = head.compute_states(TOKENS)[:, :-1]
        goal = (target, teacher_head) if distilled else (TOKENS[:, 1:], None)
        blocked = sum_loss(head, states, *goal, weights)
        assert_close(blocked, loss, rtol=1e-4, atol=1e-4)
        (blocked / 3).backward()
        for name, weight in student.named_parameters():
            assert_close(weight.grad, gradients[name], rtol=1e-3, atol=1e-5, msg=name)


def test_figures_are_those_of_the_stock_models_logits(tiny_family, task_of):
    ours = task_of(tiny_family("llama"))
    ours.measure_error()
    with torch.no_grad():
        student = stock_model(tiny_family("llama"))(input_ids=TOKENS, use_cache=False).logits
        teacher = ours.stream.compute_logits(ours.held_out.states)
    count = TOKENS[:, 1:].numel()
    kl, loss = compute_losses(student, teacher)
    _, teacher_loss = compute_losses(teacher, teacher)
    assert ours.figures == pytest.approx(
        {
            "kl": float(kl / count),
            "loss": float(loss / count),
            "excess": float((loss - teacher_loss) / count),
            "top_1_agreement": float(
                (teacher.argmax(-1) == student.argmax(-1))[:, :-1].float().mean()
            ),
        },
        rel=1e-4,
    )


@pytest.mark.parametrize(
    ("errors", "steps", "expected"),
    [
        ([0.2, 0.19, 0.18], 200, 1.0),
        ([0.2, 0.21, 0.205, 0.19], 200, 0.25),  # of the least so far, not of the round before
        ([0.2, float("inf"), 0.19], 200, 0.5),
        ([-1e-9, 1e-9], 200, 0.5),  # rounding of a lossless model
    ],
)
def test_the_learning_rate_halves_after_every_part_that_hardly_gains(errors, steps, expected):
    assert compute_plateau_factor(errors, steps) == expected

"""``kvfold eval``: needles, replies, losses by position, and pairs of lm-evaluation-harness."""

import json
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from helpers.checkpoints import read_json
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvfold.convert import EvalRequest
from kvfold.convert.data import demo_folder
from kvfold.convert.measure import eval as evaluation
from kvfold.convert.measure.losses import compute_token_losses


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(demo_folder())


@pytest.fixture
def encode(tokenizer):
    return lambda text: torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_needles_lie_at_every_depth_and_are_asked_for(tokenizer, encode):
    filler = encode("Nothing of interest is said in this sentence. " * 40)
    depths = []
    for tokens, answers in evaluation.draw_needle_questions(tokenizer, filler, 256, 8, seed=0):
        assert tokens.shape == (256,)
        assert len(set(answers)) == evaluation.CHOICES
        text = tokenizer.decode(tokens)
        name = text.rsplit("The secret word of ", 1)[1].removesuffix(" is")
        needle = f"The secret word of {name} is{tokenizer.decode(answers[0])}."
        assert text.count(needle) == 1
        depths.append(text.index(needle))
    assert depths == sorted(depths)
    assert depths[0] < 256 < depths[-1]


def test_the_answer_is_the_likeliest_choice():
    questions = [(torch.tensor([index]), list(range(10, 18))) for index in range(6)]

    def model(input_ids, logits_to_keep):
        """Answers the first three questions right, and the others with a wrong choice."""
        logits = torch.zeros(1, 1, 30)
        logits[0, 0, 10 + (int(input_ids) > 2)] = 1
        logits[0, 0, 20] = 2  # no choice
        return SimpleNamespace(logits=logits)

    model.device = "cpu"
    assert evaluation.answer_questions(model, questions).tolist() == [1, 1, 1, 0, 0, 0]


def test_losses_are_those_of_transformers(encode):
    model = AutoModelForCausalLM.from_pretrained(demo_folder(), dtype=torch.float32).eval()
    tokens = encode("The list is sorted in place. " * 20)[:80].view(2, 40)
    losses = compute_token_losses(model, tokens)
    expected = model(input_ids=tokens, labels=tokens).loss.item()
    assert losses.mean().item() == pytest.approx(expected, rel=1e-4)


def test_prompts_use_the_chat_template(tokenizer):
    prompts = evaluation.draw_prompts(tokenizer, 32, 0)
    assert len({tuple(prompt.tolist()) for prompt in prompts}) == 32
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    tokenizer.chat_template += "{% if add_generation_prompt %}[assistant] {% endif %}"
    (prompt,) = evaluation.draw_prompts(tokenizer, 1, 0)
    assert tokenizer.decode(prompt).startswith("[user] ")
    assert tokenizer.decode(prompt).endswith("\n[assistant] ")


def test_replies_are_compared_with_those_of_the_source():
    def results(replies, *probabilities):
        tokens = list(map(torch.tensor, replies))
        return evaluation.ModelResults({}, tokens, torch.tensor([[probabilities]]))

    source = results([[5, 6, 7, 8, 9, 1], [2, 2, 2, 2, 2, 2]], 0.5, 0.5, 0.0)
    student = results([[5, 6, 0, 8, 9], [2, 2, 2, 2, 2, 1]], 0.25, 0.25, 0.5)
    evaluation.add_reply_scores(source, student)
    means = {
        metric: (values.double().mean().item(), student.scores[task, metric].double().mean().item())
        for (task, metric), values in source.scores.items()
    }
    assert means == {"first_difference": (6, 3.5), "draft_acceptance": (1.0, 0.5)}


def test_tasks_need_the_harness(monkeypatch, refused):
    monkeypatch.setattr(evaluation, "find_spec", lambda name: None)
    for task, advice in (("lambada_openai", "kvfold[eval]"), ("replis", "did you mean replies?")):
        request = EvalRequest(demo_folder(), demo_folder(), tasks=[task])
        with refused(advice):
            evaluation.eval_checkpoints(request)


def test_lengths_that_cannot_be_are_refused(tiny_family, refused):
    """Of a family whose config spells the context in its own way."""
    model = tiny_family("gpt2", vocab_size=2048)
    context = read_json(model / "config.json")["n_positions"]
    for length in (context + 1, 1):
        request = EvalRequest(model, model, lengths=[length], retrieval=False, quiet=True)
        with refused(field="lengths"):
            evaluation.eval_checkpoints(request)


def test_a_context_too_short_for_retrieval_is_measured_without(tiny_family, refused):
    model = tiny_family("llama", vocab_size=2048, max_position_embeddings=64)
    request = EvalRequest(model, model, samples=2, quiet=True)
    with refused("--no-retrieval"):
        evaluation.eval_checkpoints(request)
    rows = evaluation.eval_checkpoints(replace(request, retrieval=False)).rows
    assert [row["metric"] for row in rows] == ["tokens 1 to 64"]


def test_the_command_measures_a_model_against_itself(monkeypatch, kvfold):
    def simple_evaluate(model, tasks, limit, **options):
        right = [{"metrics": ["acc"], "acc": index % 2} for index in range(limit)]
        # Of a text the harness gives the log-likelihood and the length in words.
        text = [{"metrics": ["word_perplexity"], "word_perplexity": (-8.0, 4)}]
        return {"samples": {tasks[0]: right, "text": text}}

    harness = ModuleType("lm_eval")
    harness.simple_evaluate = simple_evaluate
    wrapper = ModuleType("lm_eval.models.huggingface")
    wrapper.HFLM = lambda pretrained, tokenizer, batch_size: pretrained
    monkeypatch.setitem(sys.modules, "lm_eval", harness)
    monkeypatch.setitem(sys.modules, "lm_eval.models", ModuleType("lm_eval.models"))
    monkeypatch.setitem(sys.modules, "lm_eval.models.huggingface", wrapper)
    monkeypatch.setattr(evaluation, "find_spec", lambda name: True)
    monkeypatch.setattr(evaluation, "_REPLY_TOKENS", 4)

    def losses(model, windows):
        """The loss of a token is its position."""
        windows = torch.stack(list(windows))
        return torch.arange(1.0, windows.shape[1]).expand(len(windows), -1)

    monkeypatch.setattr(evaluation, "compute_token_losses", losses)
    model = str(demo_folder())
    line = ["eval", model, model, "--tasks", "replies,tiny", "--limit", "4", "--lengths", "256"]
    done = kvfold(*line, "--samples", 2, "--json", "-")
    found = json.loads(done.stdout)
    tasks = {row["metric"]: row for row in found["rows"]}
    assert tasks["256 tokens"]["difference"] == 0
    positions = {row["metric"]: row["source"] for row in found["rows"] if row["task"] == "loss"}
    expected = {"tokens 1 to 64": 32, "tokens 64 to 128": 95.5, "tokens 128 to 256": 191.5}
    assert positions == expected
    assert tasks["draft_acceptance"]["student"] == pytest.approx(1, abs=1e-3)
    assert tasks["first_difference"]["difference"] == 0
    assert (tasks["acc"]["source"], tasks["acc"]["documents"]) == (0.5, 4)
    assert tasks["nats_per_word"]["source"] == 2.0
    assert all(text in done.stderr for text in ("tiny, acc", "needle, 256 tokens"))

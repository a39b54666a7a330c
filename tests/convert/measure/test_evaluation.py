"""``kvfold eval``: questions, losses by position, pairs of the harness, and the whole on the
shipped model.
"""

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from helpers.checkpoints import add_demo_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvfold.convert import EvalRequest
from kvfold.convert.cli import main
from kvfold.convert.data import demo_folder
from kvfold.convert.errors import InputError
from kvfold.convert.measure import eval as evaluation
from kvfold.convert.measure import eval_tasks
from kvfold.convert.measure.eval_tasks import CHOICES, answers, draw_questions, single_words
from kvfold.convert.measure.losses import token_losses


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(demo_folder())


@pytest.fixture(scope="module")
def encode(tokenizer):
    return lambda text: torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize("task", ["needle", "keys"])
def test_questions_hide_their_answer_at_every_depth(tokenizer, encode, task):
    filler = encode("Nothing of interest is said in this sentence. " * 40)
    asked = draw_questions(tokenizer, filler, task, 256, 8, seed=0)
    words = {token: word for word, token in single_words(tokenizer).items()}
    depths = []
    for question in asked:
        assert question.tokens.shape == (256,)
        assert len(set(question.choices)) == CHOICES
        text = tokenizer.decode(question.tokens)
        name = text.rsplit("The secret word of ", 1)[1].removesuffix(" is")
        answer = words[question.choices[question.right]]
        assert text.count(f"The secret word of {name} is {answer}.") == 1
        present = [
            word
            for word in (words[token] for token in question.choices)
            if f" is {word}.\n" in text
        ]
        assert len(present) == (1 if task == "needle" else CHOICES)
        depths.append(text.index(f"{name} is {answer}."))
    assert depths == sorted(depths)
    assert depths[0] < 256 < depths[-1]
    assert {question.right for question in asked} != {0}
    with pytest.raises(
        InputError, match="--lengths 12: too short for the hidden sentences of task"
    ):
        draw_questions(tokenizer, filler, task, 12, 1, seed=0)


def test_an_answer_is_the_likeliest_of_the_choices(tokenizer, encode):
    asked = draw_questions(tokenizer, encode("Some words. " * 50), "keys", 200, 6, seed=1)

    def model(input_ids, logits_to_keep):
        """Knows every answer of the first three questions, and takes the wrong choice in the
        others.
        """
        at = next(i for i, each in enumerate(asked) if torch.equal(each.tokens, input_ids[0]))
        logits = torch.zeros(1, 1, 5000)
        logits[0, 0, asked[at].choices[(asked[at].right + (at > 2)) % CHOICES]] = 1
        return SimpleNamespace(logits=logits)

    model.device = "cpu"
    assert answers(model, asked).tolist() == [1, 1, 1, 0, 0, 0]


def test_losses_by_position_are_those_of_transformers(encode):
    model = AutoModelForCausalLM.from_pretrained(demo_folder(), dtype=torch.float32)
    tokens = encode("The list is sorted in place. " * 20)[:80].view(2, 40)
    losses = token_losses(model, tokens)
    assert losses.mean().item() == pytest.approx(
        model(input_ids=tokens, labels=tokens).loss.item(), rel=1e-4
    )
    rows = evaluation.by_position(losses, losses + 0.5)
    assert [(row.start, row.end, row.documents) for row in rows] == [(1, 40, 2)]
    assert rows[0].difference == pytest.approx(0.5)
    assert rows[0].student == pytest.approx(rows[0].source * 2.718281828**0.5)
    long = evaluation.by_position(torch.ones(2, 299), torch.ones(2, 299))
    assert [(row.start, row.end) for row in long] == [(1, 64), (64, 128), (128, 256), (256, 300)]


# Of a text the harness gives the log-likelihood and the length in words or bytes, whatever the
# metric's name
LOSSES = {"word_perplexity": "nats_per_word", "bits_per_byte": "bits_per_byte"}


def test_scores_of_the_harness_are_paired_by_document():
    def samples(values, losses):
        tasks = {"tiny": (["acc"], values), "text": ([*LOSSES], losses)}
        return {
            task: [
                {"doc_id": i, "metrics": names, **dict.fromkeys(names, value)}
                for i, value in found.items()
            ]
            for task, (names, found) in tasks.items()
        }

    before = eval_tasks.document_scores(samples({0: 1, 1: True, 2: 0.0, 3: 1}, {0: (-8.0, 4)}))
    after = eval_tasks.document_scores(samples({3: 0, 2: 0, 1: 1, 9: 1}, {0: (-12.0, 4)}))
    scored = eval_tasks.paired_scores(before, after)
    rows = [evaluation.paired(*values) for _, _, *values in scored]
    assert [metric for _, metric, *_ in scored] == ["acc", *LOSSES.values()]
    assert [row.documents for row in rows] == [3, 1, 1]
    assert rows[0].difference == pytest.approx(-1 / 3)
    assert rows[0].margin == pytest.approx(
        1.434, rel=0.15
    )  # t of 2 degrees of freedom, 4.30, x 1/3
    assert (rows[1].source, rows[1].student, rows[1].margin) == (2.0, 3.0, None)
    assert rows[2].source == pytest.approx(2 / 0.693147, rel=1e-5)


def test_tasks_need_the_harness(monkeypatch):
    monkeypatch.setattr(eval_tasks, "find_spec", lambda name: None)
    with pytest.raises(
        InputError,
        match=r"--tasks lambada_openai needs .*pip install 'kvfold\[eval\]', or use .*vt",
    ):
        evaluation.eval_checkpoints(
            EvalRequest(demo_folder(), demo_folder(), tasks=["choice", "lambada_openai"])
        )


def test_contexts_and_lengths_that_cannot_be(tiny_family, tmp_path):
    """Of a family whose config spells the context in its own way."""
    model = shutil.copytree(tiny_family("gpt2", vocab_size=2048), tmp_path / "gpt2")
    add_demo_tokenizer(model)
    context = json.loads((model / "config.json").read_text())["n_positions"]
    with pytest.raises(
        InputError, match=f"must not exceed the {context} positions supported by gpt2"
    ):
        evaluation.eval_checkpoints(EvalRequest(model, model, lengths=[context + 1], quiet=True))
    with pytest.raises(InputError, match="--lengths 1 must be at least 2 for a loss to measure"):
        evaluation.eval_checkpoints(
            EvalRequest(demo_folder(), demo_folder(), lengths=[1], retrieval=False, quiet=True)
        )


def test_the_command_measures_tasks_and_long_contexts(monkeypatch, capsys):
    fake = ModuleType("lm_eval")
    models = ModuleType("lm_eval.models.huggingface")
    models.HFLM = lambda pretrained, tokenizer, batch_size: pretrained
    fake.simple_evaluate = lambda model, tasks, limit, **options: {
        "samples": {
            tasks[0]: [{"doc_id": i, "metrics": ["acc"], "acc": i % 2} for i in range(limit)]
        }
    }
    modules = {
        "lm_eval": fake,
        "lm_eval.models": ModuleType("m"),
        "lm_eval.models.huggingface": models,
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(eval_tasks, "find_spec", lambda name: True)
    line = [
        "eval",
        demo_folder(),
        demo_folder(),
        "--tasks",
        "tiny",
        "--limit",
        4,
        "--lengths",
        256,
        "--samples",
        2,
    ]
    with pytest.raises(SystemExit) as end:
        main([*map(str, line), "--json", "-"])
    shown = capsys.readouterr()
    assert end.value.code == 0, shown.err
    found = json.loads(shown.out)
    asked = [(row["task"], row["length"], row["margin"]) for row in found["retrieval"]]
    assert asked == [("needle", 256, 0.0), ("keys", 256, 0.0)]
    assert [(row["to"], row["excess"]) for row in found["positions"]] == [
        (64, 0.0),
        (128, 0.0),
        (256, 0.0),
    ]
    means = {"documents": 4, "source": 0.5, "student": 0.5, "difference": 0.0, "margin": 0.0}
    assert found["tasks"] == [{"task": "tiny", "metric": "acc", **means}]
    assert (
        "2 documents each of needle, keys at 256 tokens; 2 windows of 256 tokens; tiny, for each"
        in shown.err
    )
    told = ("tiny, acc", "needle at 256 tokens", "the source guesses")
    assert all(each in shown.err for each in told)


def test_the_table_of_the_documents_is_what_was_measured():
    root = Path(__file__).resolve().parents[3]
    found = json.loads((root / "recipes/results/evaluate_demo.json").read_text())
    text = (root / "docs/evaluating.md").read_text()
    names = {"from": "start", "to": "end", "excess": "difference"}
    positions = [
        {names.get(name, name): value for name, value in row.items()} for row in found["positions"]
    ]
    rows = [evaluation.AnswerRow(**row) for row in found["retrieval"]]
    rows = rows, [evaluation.PositionRow(**row) for row in positions]
    about = (found[name] for name in ("model", "out", "text", "samples"))
    table = evaluation.Evaluation(*about, *rows, tasks=found["tasks"]).table()
    assert "\n".join(table.splitlines()[2:]) in text
    assert found["date"] in text

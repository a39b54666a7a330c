"""The built-in tasks of `kvfold eval` for which models write: prompts, generation in batches,
scores and rows.
"""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvfold.convert.cli import main
from kvfold.convert.data import demo_folder
from kvfold.convert.measure.eval import answer_row
from kvfold.convert.measure.replies import (
    LETTERS,
    Prompt,
    draft_probabilities,
    draw_prompts,
    letter,
    prompt_tokens,
    reply_scores,
    score,
    write_replies,
)
from kvfold.convert.request import BUILT_IN_TASKS


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(demo_folder())


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(demo_folder(), dtype=torch.float32).eval()


def test_choices_permute_their_letters_and_have_one_right_word():
    prompts = draw_prompts("choice", 16, 0)
    assert sorted(prompt.expected[0] for prompt in prompts) == sorted(4 * LETTERS)
    for prompt in prompts:
        question = prompt.text.split("\n\n")[-1]
        offered = dict(line.split(". ") for line in question.splitlines()[1:])
        assert [*offered] == [*LETTERS]
        assert len({*offered.values()}) == len(LETTERS)
        assert "Answer" not in question
    text = next(prompt for prompt in prompts if "is a color?\nA" in prompt.text.split("\n\n")[-1])
    right = text.text.split(f"\n{text.expected[0]}. ")[-1].split("\n")[0]
    assert right in ("red", "blue", "green", "yellow", "purple", "brown")


def test_sums_and_copies_expect_what_they_ask_for():
    for prompt in draw_prompts("arithmetic", 12, 0):
        *_, asked = prompt.text.splitlines()
        assert f"{eval(asked)}" == prompt.expected[0]
        assert prompt.opening == f"{asked} ="
    assert all(
        prompt.text.endswith(" ".join(prompt.expected)) for prompt in draw_prompts("copying", 3, 0)
    )
    asked = [prompt.text for prompt in draw_prompts("replies", 32, 0)]
    assert len({*asked}) == 32
    assert (
        asked
        == [prompt.text for prompt in draw_prompts("replies", 32, 0)]
        != [prompt.text for prompt in draw_prompts("replies", 32, 1)]
    )


@pytest.mark.parametrize(
    ("task", "reply", "expected", "share"),
    [
        ("choice", " B. horse", "B", 1),
        ("choice", " Because of A", "B", 0),
        ("arithmetic", " 91.\n12 + 3 = 15", "91", 1),
        ("arithmetic", " 191", "91", 0),
        ("arithmetic", " It is unknown", "91", 0),
        ("copying", " Key, lake, moon", "key lake snow moon", 0.5),
        ("cwe", "1. TOOL 2. key", "tool key lake moon", 0.5),
        ("niah_single_1", " 1234567.", "1234567", 1),
    ],
)
def test_replies_are_scored(task, reply, expected, share):
    assert score(task, Prompt("", "", 1, tuple(expected.split())), reply) == share


def test_letters_stand_alone():
    assert [letter(each) for each in (" C", "(D)", "About A.", "CAB", "")] == [
        "C",
        "D",
        "A",
        "none",
        "none",
    ]


def test_batches_write_what_single_prompts_write(tokenizer, model):
    asked = [
        torch.tensor(tokenizer(text)["input_ids"])
        for text in ("The list", "Return the first item of the", "A")
    ]
    done: list[int] = []
    together = write_replies(model, tokenizer, asked, 12, 2, done.append)
    alone = [
        model.generate(each[None], do_sample=False, max_new_tokens=12)[0, len(each) :]
        for each in asked
    ]
    assert [each.tolist() for each in together] == [each.tolist() for each in alone]
    assert done == [2, 1]
    # The third token ends a reply, as if it were the end token
    third = SimpleNamespace(eos_token_id=int(together[0][2]))
    ended = write_replies(model, third, asked[:1], 12, 1, done.append)[0].tolist()
    first = together[0].tolist().index(third.eos_token_id)
    assert ended == together[0].tolist()[: first + 1]


def test_prompts_use_the_chat_template(tokenizer):
    prompt = Prompt("Which word?", "The word is", 4)
    assert tokenizer.decode(prompt_tokens(tokenizer, prompt)).endswith("Which word?\nThe word is")
    chat = AutoTokenizer.from_pretrained(demo_folder())
    chat.chat_template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    chat.chat_template += "{% if add_generation_prompt %}[assistant] {% endif %}"
    assert chat.decode(prompt_tokens(chat, prompt)) == "[user] Which word?\n[assistant] The word is"


def test_replies_are_compared_with_those_of_the_source():
    replies = [
        torch.tensor(each) for each in ([5, 6, 7, 8, 9, 1], [5, 6, 7, 8], [2, 2, 2, 2, 2, 2])
    ]
    others = [torch.tensor(each) for each in ([5, 6, 0, 8, 9], [5, 6, 7, 8], [2, 2, 2, 2, 2, 1])]
    p = torch.tensor([[[0.5, 0.5, 0.0]]])
    q = torch.tensor([[[0.25, 0.25, 0.5]]])
    rows = {
        metric: (one.tolist(), other.tolist())
        for _, metric, one, other in reply_scores(replies, others, (p, q))
    }
    assert rows["first_difference"] == ([6, 4, 6], [2, 4, 5])
    # 8 and 9 of three places after the first difference; the third reply differs only in its last
    # token
    assert rows["equal_after_it"] == ([1.0], [pytest.approx(2 / 3)])
    assert rows["draft_acceptance"] == ([1.0], [0.5])
    assert rows["repetition"] == (
        [0.0, 0.0, pytest.approx(2 / 3)],
        [0.0, 0.0, pytest.approx(1 / 3)],
    )
    assert rows["length"] == ([6, 4, 6], [5, 4, 6])


def test_draft_probabilities_are_the_models(model):
    windows = torch.arange(5, 85).view(2, 40)
    found = draft_probabilities(model, windows)
    assert found.shape == (2, 32, 2048)
    exact = model(windows).logits[:, [0, 39]].softmax(-1)
    assert (found[:, [0, -1]].float() - exact).abs().max() < 1e-3


def test_a_source_that_does_not_beat_chance_guesses():
    half = torch.tensor([1.0, 0.0] * 8)
    assert answer_row("choice", None, 0.25, half, half).guesses is True  # 0.5 ± 0.28
    assert answer_row("copying", None, 0.0, half, half).guesses is False
    assert answer_row("vt", 512, 0.0, 0 * half, half).guesses is True
    assert answer_row("choice", None, 0.25, torch.ones(16), half).difference == -0.5


@pytest.mark.slow
def test_the_command_runs_built_in_tasks(capsys):
    tasks = "replies,choice,arithmetic,copying,niah_single_1"
    line = [
        "eval",
        demo_folder(),
        demo_folder(),
        "--tasks",
        tasks,
        "--samples",
        2,
        "--lengths",
        300,
        "--no-retrieval",
    ]
    with pytest.raises(SystemExit) as end:
        main([*map(str, line), "--json", "-"])
    shown = capsys.readouterr()
    assert end.value.code == 0, shown.err
    found = json.loads(shown.out)
    asked = [(row["task"], row["length"], row["difference"]) for row in found["answers"]]
    assert asked == [
        ("choice", None, 0),
        ("arithmetic", None, 0),
        ("copying", None, 0),
        ("niah_single_1", 300, 0),
    ]
    rows = {row["metric"]: row for row in found["tasks"]}
    assert rows["draft_acceptance"]["student"] == pytest.approx(1, abs=1e-3)
    assert rows["first_difference"]["difference"] == rows["length"]["difference"] == 0
    assert found["letters"]["source"] == found["letters"]["result"]
    assert sum(found["letters"]["source"].values()) == 2
    assert "the source guesses" in shown.err
    assert "niah_single_1 at 300 tokens" in shown.err


def test_help_names_every_built_in_task(capsys):
    with pytest.raises(SystemExit):
        main(["eval", "--help"])
    said = capsys.readouterr().out
    assert all(task in said for task in BUILT_IN_TASKS)


def test_the_evidence_of_the_documents_is_what_was_measured():
    root = Path(__file__).resolve().parents[3]
    text = (root / "docs/evaluating.md").read_text()
    found = json.loads((root / "recipes/results/evidence.json").read_text())["rows"]
    for row in (row for row in found if row["group"] == "writing"):
        assert row["date"] in text
        for each in row["answers"]:
            shown = (
                f"{100 * each['student']:.1f} % ({100 * each['difference']:+.1f} ±"
                f" {100 * each['margin']:.1f})"
            )
            line = next(
                line
                for line in text.splitlines()
                if line.startswith(f"| `{each['task']}` | {100 * each['source']:.1f} %")
            )
            assert ("the source guesses" if each["guesses"] else shown) in line
        for each in row["tasks"]:
            digits = 1 if each["metric"] in ("first_difference", "length") else 2
            assert (
                f"{each['student']:.{digits}f} ({each['difference']:+.{digits}f} ±"
                f" {each['margin']:.{digits}f})" in text
            )
        assert ", ".join(map(str, row["letters"]["result"].values())) in text

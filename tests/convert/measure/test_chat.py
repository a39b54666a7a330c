"""`kvfold chat`: answers equal those of transformers, absorbed where there is a latent, side by side."""

import io
import shutil

import pytest
from click.testing import CliRunner
from transformers import AutoTokenizer

from kvfold.attention.deepseek import FORMS
from kvfold.convert.cli import kvfold
from kvfold.convert.data import demo_folder
from kvfold.convert.measure.chat import chat_models, open_speaker, side_by_side
from kvfold.convert.request import ChatRequest

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}A:{% endif %}"
)


def test_texts_stand_side_by_side():
    shown = side_by_side(["one two three four five six", "seven\n\neight"], 35)
    assert shown.splitlines() == ["one two three    | seven", "four five six    |", "                 | eight"]
    assert side_by_side(["a b"], 80) == "a b"


@pytest.fixture(scope="module")
def chatty(demo_latent, tmp_path_factory):
    """The latent form of the model that ships, with a chat template."""
    folder = shutil.copytree(demo_latent, tmp_path_factory.mktemp("chatty") / "chatty")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def test_a_model_keeps_the_conversation_and_its_latent_is_absorbed(chatty):
    speaker = open_speaker(str(chatty), ChatRequest(model=str(chatty), device="cpu"))
    assert {type(module) for module in speaker.model.modules()} & set(FORMS.values())
    first, rate = speaker.answer("What is a list?", 4)
    assert rate > 0
    second, _ = speaker.answer("And a set?", 4)
    asked = ["What is a list?", first, "And a set?", second]
    assert [each["content"] for each in speaker.messages] == asked
    text = speaker.tokenizer.apply_chat_template(speaker.messages[:3], add_generation_prompt=True, tokenize=False)
    inputs = speaker.tokenizer(text, return_tensors="pt", add_special_tokens=False)
    expected = speaker.model.generate(inputs["input_ids"], max_new_tokens=4, do_sample=False)
    assert second == speaker.tokenizer.decode(expected[0, inputs["input_ids"].shape[1] :]).strip()


def test_two_models_answer_every_line(chatty, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    request = ChatRequest(model=str(chatty), against=str(demo_folder()), max_new_tokens=3, device="cpu")
    chat_models(request, io.StringIO("The list\n\nThe set\n"))
    shown = capsys.readouterr()
    heads = [line for line in shown.out.splitlines() if "tokens/s" in line]
    assert len(heads) == 2
    assert all(line.startswith(str(chatty)) and f" | {demo_folder()}" in line for line in heads)


def test_a_model_that_does_not_exist_is_refused_first():
    done = CliRunner().invoke(kvfold, ["chat", "no/such/folder"], input="hello\n")
    assert done.exit_code != 0


def test_ctrl_c_at_the_prompt_of_a_terminal_ends_the_chat(capsys):
    class Terminal(io.StringIO):
        isatty = lambda self: True  # noqa: E731

        def readline(self):
            raise KeyboardInterrupt

    chat_models(ChatRequest(model=str(demo_folder()), device="cpu"), Terminal())
    assert capsys.readouterr().out == ""

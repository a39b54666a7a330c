"""``kvfold chat``: answers equal those of transformers, absorbed where there is a latent."""

import io
import shutil
from unittest.mock import Mock

import pytest
from transformers import AutoTokenizer

from kvfold.attention.deepseek import ABSORBED
from kvfold.convert.data import demo_folder
from kvfold.convert.measure.chat import Speaker, chat_models, format_columns, load_speaker
from kvfold.convert.request import ChatRequest

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt"
    " %}A:{% endif %}"
)


@pytest.fixture(scope="module")
def chatty(demo_latent, tmp_path_factory):
    """The latent form of the model that ships, with a chat template."""
    folder = shutil.copytree(demo_latent, tmp_path_factory.mktemp("chatty") / "chatty")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def test_texts_stand_side_by_side():
    shown = format_columns(["one two three four five six", "seven\n\neight"], 35)
    assert shown.splitlines() == [
        "one two three    | seven",
        "four five six    |",
        "                 | eight",
    ]
    assert format_columns(["a b"], 80) == "a b"


def test_a_model_keeps_the_conversation_and_its_latent_is_absorbed(chatty):
    speaker = load_speaker(str(chatty), ChatRequest(model=str(chatty), device="cpu"))
    assert {type(module) for module in speaker.model.modules()} & set(ABSORBED.values())
    first, rate = speaker.answer("What is a list?", 4)
    assert rate > 0
    assert speaker.messages == []
    speaker.messages += [
        {"role": "user", "content": "What is a list?"},
        {"role": "assistant", "content": first},
    ]
    second, _ = speaker.answer("And a set?", 4)
    messages = [*speaker.messages, {"role": "user", "content": "And a set?"}]
    text = speaker.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    inputs = speaker.tokenizer(text, return_tensors="pt", add_special_tokens=False)
    expected = speaker.model.generate(inputs["input_ids"], max_new_tokens=4, do_sample=False)
    assert second == speaker.tokenizer.decode(expected[0, inputs["input_ids"].shape[1] :]).strip()


def test_two_models_answer_every_line(chatty, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    other = str(demo_folder())
    request = ChatRequest(model=str(chatty), against=other, max_new_tokens=3, device="cpu")
    chat_models(request, io.StringIO("The list\n\nThe set\n"))
    shown = capsys.readouterr().out.splitlines()
    heads = [line for line in shown if "tokens/s" in line]
    assert len(heads) == 2
    assert all(line.startswith(str(chatty)) and f" | {other}" in line for line in heads)


class Terminal(io.StringIO):
    """A terminal where Ctrl-C is pressed after the lines."""

    def isatty(self):
        return True

    def readline(self):
        line = super().readline()
        if not line:
            raise KeyboardInterrupt
        return line


def test_ctrl_c_stops_an_answer_in_a_terminal_and_at_the_prompt_it_ends_the_chat(
    chatty, capsys, monkeypatch
):
    answer = Speaker.answer
    lengths = []

    def interrupt_first(self, prompt, max_new_tokens):
        lengths.append(len(self.messages))
        if prompt == "first":
            raise KeyboardInterrupt
        return answer(self, prompt, max_new_tokens)

    monkeypatch.setattr(Speaker, "answer", interrupt_first)
    request = ChatRequest(model=str(chatty), max_new_tokens=3, device="cpu")
    chat_models(request, Terminal("first\nsecond\nthird\n"))
    shown = capsys.readouterr()
    assert shown.err.count("(stopped)") == 1
    assert shown.out.count("tokens/s") == 2
    assert lengths == [0, 0, 2]


def test_ctrl_c_ends_a_chat_of_a_pipe(chatty, monkeypatch):
    monkeypatch.setattr(Speaker, "answer", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        chat_models(ChatRequest(model=str(chatty), device="cpu"), io.StringIO("first\n"))

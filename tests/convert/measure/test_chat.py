"""``kvfold chat``: answers equal those of transformers, absorbed where there is a latent."""

import io
import shutil
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

from kvfold.attention.deepseek import ABSORBED
from kvfold.convert.cli import main
from kvfold.convert.data import demo_folder
from kvfold.convert.errors import InputError
from kvfold.convert.measure import chat
from kvfold.convert.measure.chat import answer_prompts, generate_reply, load_chat_model
from kvfold.convert.request import ChatRequest
from kvfold.convert.text import corpus

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


def test_a_model_keeps_the_conversation_and_its_latent_is_absorbed(chatty):
    speaker = load_chat_model(str(chatty), ChatRequest(model=str(chatty), device="cpu"))
    assert {type(module) for module in speaker.model.modules()} & set(ABSORBED.values())
    first = speaker.answer_prompt("What is a list?", 4)
    second = speaker.answer_prompt("And a set?", 4)
    messages = [
        {"role": "user", "content": "What is a list?"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "And a set?"},
    ]
    text = speaker.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    tokens = speaker.tokenizer(text, return_tensors="pt", add_special_tokens=False)["input_ids"]
    expected = speaker.model.generate(tokens, max_new_tokens=8, do_sample=False)[
        0, tokens.shape[1] :
    ]
    assert second == speaker.tokenizer.decode(expected[:4]).strip()
    # As if the third token were the end token.
    speaker.model.generation_config.eos_token_id = None
    ending = SimpleNamespace(eos_token_id=int(expected[2]))
    reply = generate_reply(speaker.model, ending, tokens[0], 8).tolist()
    assert reply == expected[: expected.tolist().index(expected[2]) + 1].tolist()


def test_two_models_answer_every_line(chatty, capsys):
    other = str(demo_folder())
    request = ChatRequest(model=str(chatty), against=other, max_new_tokens=3, device="cpu")
    answer_prompts(request, io.StringIO("The list\n\nThe set\n"))
    shown = capsys.readouterr().out.splitlines()
    expected = ["> The list", f"{chatty}:", f"{other}:", "> The set", f"{chatty}:", f"{other}:"]
    assert [line for line in shown if line in expected] == expected


def test_one_model_prints_its_answer_while_it_writes(chatty, capsys, monkeypatch):
    shown = []

    def generate_reply(model, tokenizer, prompt, max_new_tokens, streamer):
        streamer.put(prompt[None])
        for word in ("The", " list", " has", " no", " end"):
            streamer.put(torch.tensor(tokenizer(word, add_special_tokens=False)["input_ids"]))
            shown.append(capsys.readouterr().out)
        streamer.end()
        return prompt[:0]

    monkeypatch.setattr(chat, "generate_reply", generate_reply)
    answer_prompts(ChatRequest(model=str(chatty), device="cpu"), io.StringIO("Why?\n"))
    assert len([text for text in shown if text]) > 1  # before the end of the answer
    answer = "".join(shown) + capsys.readouterr().out
    assert answer.endswith("> Why?\nThe list has no end\n\n")


def test_lines_that_are_too_long_or_no_text_do_not_end_a_chat(chatty, capfdbinary, monkeypatch):
    speaker = load_chat_model(str(chatty), ChatRequest(model=str(chatty), device="cpu"))
    assert "starting anew" in speaker.answer_prompt("word " * 40_000, 4)
    assert speaker.messages == []
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9 \x1b[2J\n")))
    with pytest.raises(SystemExit) as ended:
        main(["chat", str(chatty), "--max-new-tokens", "2", "--device", "cpu"])
    assert ended.value.code == 0
    assert b"> caf\xef\xbf\xbd \\x1b[2J\n" in capfdbinary.readouterr().out


def test_a_template_of_a_chat_is_limited(chatty, monkeypatch):
    monkeypatch.setattr(corpus, "_RENDER_SECONDS", 0.5)
    speaker = load_chat_model(str(chatty), ChatRequest(model=str(chatty), device="cpu"))
    speaker.tokenizer.chat_template = "{{ 3 ** (10 ** 9) }}"
    with pytest.raises(InputError, match="the chat template"):
        speaker.answer_prompt("hi", 4)

"""Text that a model writes itself: where it begins, that it is the model's, and that it is the
seed's.
"""

from collections import Counter

import pytest
import torch
from helpers.checkpoints import stock_model
from transformers import AutoTokenizer

from kvfold.convert.data import demo_folder
from kvfold.convert.errors import InputError
from kvfold.convert.text import corpus as text_corpus
from kvfold.convert.text import self_written
from kvfold.convert.text.corpus import open_corpus
from kvfold.convert.text.self_written import ChatTurnTokens, find_turn_tokens, sample_sequences


@pytest.fixture(scope="module")
def model():
    return stock_model(demo_folder(), dtype=torch.float32)


def test_text_begins_with_the_chat_template_or_the_bos_token():
    tokenizer = AutoTokenizer.from_pretrained(demo_folder())
    tokenizer.chat_template = "{% for m in messages %}<|{{ m.role }}|> {{ m.content }}{% endfor %}"
    turns = find_turn_tokens(tokenizer, "m")
    assert tokenizer.decode(turns.start).rstrip() == "<|user|>"
    assert turns.asked == turns.answered == ()  # they do not begin with a special token
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}\n{% endfor %}"
    )
    turns = find_turn_tokens(tokenizer, "m")
    end = tokenizer.eos_token
    found = [tokenizer.decode(tokens) for tokens in (turns.start, turns.asked, turns.answered)]
    assert found == ["user: ", f"{end}\nassistant: ", f"{end}\n"]
    tokenizer.bos_token = tokenizer.convert_ids_to_tokens(7)
    for template in (None, "{{ raise_exception('no user here') }}", "nothing of the message"):
        tokenizer.chat_template = template
        assert find_turn_tokens(tokenizer, "m") == ChatTurnTokens([7])
    tokenizer.bos_token = None
    with pytest.raises(
        InputError, match=r"m has neither a chat template nor a BOS token to sample from; use"
    ):
        find_turn_tokens(tokenizer, "m")


def test_the_template_is_completed_after_each_turn(model):
    """Whatever the model draws: after a turn's last token come the template's tokens up to the next
    turn.
    """
    free = sample_sequences(model, ChatTurnTokens([5]), 1, 200, seed=0)[0].tolist()
    end = next(token for token, _ in Counter(free).most_common() if token not in (3, 4, 5, 6))
    turns = ChatTurnTokens([5], (end, 3, 4), (end, 6))
    written = sample_sequences(model, turns, 1, 200, seed=0)[0].tolist()
    first = free.index(end, 1)
    assert written[: first + 3] == [*free[: first + 1], 3, 4]
    places = [place for place, token in enumerate(written) if token == end and place < 197]
    assert len(places) > 3
    for number, place in enumerate(places):
        assert written[place + 1 : place + 3] == ([3, 4] if number % 2 == 0 else [6, 5])


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{{ 'a' * 100000 }}{% endfor %}",
        "{{ 'a' * 10**10 }}",
        "{{ 3 ** (10 ** 9) }}",
    ],
    ids=["time", "output", "memory", "operation"],
)
def test_a_chat_template_that_does_not_end_is_named(template, tmp_path, monkeypatch):
    monkeypatch.setattr(text_corpus, "_RENDER_SECONDS", 0.5)
    tokenizer = AutoTokenizer.from_pretrained(demo_folder(), chat_template=template)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"messages": [{"role": "user", "content": "hi"}]}\n')
    corpus = open_corpus(str(rows), tokenizer, 0)
    for use in (lambda: find_turn_tokens(tokenizer, "m"), lambda: corpus.read_documents(100)):
        with pytest.raises(
            InputError,
            match=r"demo: the chat template \(chat_template.jinja .* more than 0.5 s or 512 MiB",
        ):
            use()


def test_equal_seeds_give_equal_text(model, monkeypatch):
    monkeypatch.setattr(self_written, "SELF_TOKENS", 24)  # two sequences at once
    first, again, other = (
        sample_sequences(model, ChatTurnTokens([5, 6]), 3, 12, seed) for seed in (1, 1, 2)
    )
    assert first[:, :2].tolist() == [[5, 6]] * 3
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert len(first.unique(dim=0)) == 3


def test_tokens_are_drawn_from_the_models_distribution(model):
    """With the cache: every token follows all those before it."""
    longer = sample_sequences(model, ChatTurnTokens([5]), 1, 8, seed=3)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.tensor([[5]])
    for _ in range(7):
        predicted = model(input_ids=tokens).logits[:, -1].softmax(-1)
        tokens = torch.cat(
            [tokens, torch.multinomial(predicted.detach(), 1, generator=generator)], dim=1
        )
    assert torch.equal(longer, tokens)

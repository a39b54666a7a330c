"""Span corruption and text infilling."""

import pytest
import torch

from kvfold.convert.errors import InputError
from kvfold.convert.text.denoising import denoising_tasks
from kvfold.convert.text.windows import CalibrationTokens

LENGTH = 101


class Words:
    """A tokenizer whose texts stand between ``prefix`` and ``suffix``."""

    def __init__(self, prefix, suffix, vocabulary, mask=None):
        self.prefix, self.suffix, self.vocabulary, self.mask_token_id = prefix, suffix, vocabulary, mask

    def get_vocab(self):
        return self.vocabulary

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [*self.prefix, 50, *self.suffix] if add_special_tokens else [50]}


T5 = Words([], [1], {f"<extra_id_{number}>": 1000 - number for number in range(4)})
BART = Words([0], [2], {"<mask>": 900}, mask=900)


def tokens_between(prefix, suffix) -> CalibrationTokens:
    text = torch.arange(10, 10 + 5 * LENGTH).view(5, LENGTH)
    sequences = torch.cat(
        [
            torch.tensor(part).expand(5, -1) if isinstance(part, list) else part
            for part in (prefix, text, suffix)
            if len(part)
        ],
        1,
    )
    return CalibrationTokens(sequences[:3], sequences[3:], "text", "0")


def split(tasks, row) -> tuple[list[int], list[int]]:
    return row[: tasks.encoded].tolist(), row[tasks.encoded :].tolist()


def test_span_corruption_hands_every_token_to_one_side():
    given = tokens_between([], [1])
    tasks = denoising_tasks(given, T5, {"decoder_start_token_id": 0}, seed=3)
    assert tasks.calibration.shape == (3, LENGTH + 1 + 1 + 4 + 4 + 1)  # 4 sentinels, though 15 tokens make 5 spans
    for row, text in zip(tasks.calibration, given.calibration.tolist(), strict=True):
        encoder, decoder = split(tasks, row)
        assert encoder[-1] == decoder[-1] == 1
        assert decoder[0] == 0
        assert [token for token in encoder if token > 990] == [token for token in decoder if token > 990]
        spans, found = " ".join(map(str, decoder[1:-1])), " ".join(map(str, encoder))
        for sentinel in (1000, 999, 998, 997):  # put each span back
            after = spans.split(f"{sentinel}", 1)[1]
            found = found.replace(str(sentinel), after.split(" 99", 1)[0].strip())
        assert found.split() == [str(token) for token in text]
        assert len(decoder) == 1 + 4 + round(0.15 * LENGTH) + 1


def test_infilling_repeats_the_whole_text():
    given = tokens_between([0], [2])
    tasks = denoising_tasks(given, BART, {"decoder_start_token_id": 2}, seed=3)
    for row, text in zip(tasks.held_out, given.held_out.tolist(), strict=True):
        encoder, decoder = split(tasks, row)
        assert decoder == [2, *text]
        assert (encoder[0], encoder[-1], encoder.count(900)) == (0, 2, 10)
        assert len(encoder) == len(text) - round(0.3 * LENGTH) + 10
        assert [token for token in encoder if token != 900] == [token for token in text if token in encoder]


def test_a_seed_draws_the_spans():
    given = tokens_between([0], [2])
    rows = [denoising_tasks(given, BART, {}, seed).calibration for seed in (1, 1, 2)]
    assert torch.equal(rows[0], rows[1])
    assert not torch.equal(rows[0], rows[2])


@pytest.mark.parametrize(
    ("tokenizer", "length", "message"),
    [
        (Words([], [1], {"a": 3}), LENGTH, "expected sentinels .* or a mask token"),
        (BART, 3, "--seq-len: expected room for a span and what is around it, found 1 tokens"),
    ],
)
def test_what_cannot_be_corrupted_is_refused(tokenizer, length, message):
    given = CalibrationTokens(torch.full((2, length), 5), torch.full((1, length), 5), "text", "0")
    with pytest.raises(InputError, match=message):
        denoising_tasks(given, tokenizer, {}, 0)

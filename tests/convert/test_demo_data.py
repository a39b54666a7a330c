"""The shipped model and texts: complete, really trained, kept apart."""

import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvfold.convert.data import SEPARATOR, demo_folder, read_documents, read_text

WORD = re.compile(r"\w+")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(demo_folder(), local_files_only=True)


@pytest.fixture(scope="module")
def held_out(tokenizer):
    """The held-out documents as one stream of tokens, each document followed by the end token."""
    ids = tokenizer(read_documents("held_out"), verbose=False)["input_ids"]
    return torch.tensor(
        [token for document in ids for token in [*document, tokenizer.eos_token_id]]
    )


def test_splits_share_no_paragraph_of_ten_words_and_almost_no_run_of_eight():
    seen: dict[str, str] = {}
    known: set[tuple[str, ...]] = set()
    for split in ("train", "calibration", "held_out"):
        for paragraph in re.split(r"\n\n+", read_text(split).replace(SEPARATOR, "\n\n")):
            if len(said := WORD.findall(paragraph.lower())) >= 10:
                assert seen.setdefault(" ".join(said), split) == split, paragraph
        documents = [WORD.findall(document.lower()) for document in read_documents(split)]
        runs = [tuple(said[i : i + 8]) for said in documents for i in range(len(said) - 7)]
        if split == "train":
            known = set(runs)
        else:
            assert sum(run in known for run in runs) < 0.01 * len(runs)


@pytest.mark.slow
@torch.no_grad()
def test_held_out_loss_is_as_recorded_and_two_nats_below_unigram_entropy(held_out):
    training = json.loads((demo_folder() / "training.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(demo_folder(), dtype=torch.float32)
    share = held_out.bincount().double() / len(held_out)
    entropy = float(-torch.xlogy(share, share).sum())
    windows = held_out[: len(held_out) // 512 * 512].view(-1, 512)
    loss = float(torch.stack([model(row[None], labels=row[None]).loss for row in windows]).mean())
    assert entropy == pytest.approx(training["unigram_entropy"], abs=1e-4)
    assert loss == pytest.approx(training["held_out_loss"]["512"], abs=1e-3)
    assert loss <= entropy - 2

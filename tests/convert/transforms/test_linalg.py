"""How many threads multiply small matrices."""

import pytest
import torch

from kvfold.convert import ConvertRequest, convert_checkpoint
from kvfold.convert.data import demo_folder
from kvfold.convert.transforms import linalg
from kvfold.convert.transforms.fold import score_fit


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("elements", "expected"), [(linalg._FEW, 1), (linalg._FEW + 1, 2)])
def test_few_elements_are_multiplied_by_one_thread(two_threads, elements, expected):
    with linalg.threads_for(torch.empty(elements)):
        assert torch.get_num_threads() == expected
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("target", [{"to": "mqa"}, {"to": "gqa", "kv_heads": 4}])
def test_the_shared_heads_of_a_small_model_are_fitted_by_one_thread(
    two_threads, tmp_path, monkeypatch, target
):
    counts = set()
    average = score_fit.average_rotations
    monkeypatch.setattr(
        score_fit,
        "average_rotations",
        lambda *args: counts.add(torch.get_num_threads()) or average(*args),
    )
    convert_checkpoint(
        ConvertRequest(demo_folder(), tmp_path / "out", **target, samples=2, seq_len=16, quiet=True)
    )
    assert counts == {1}
    assert torch.get_num_threads() == 2

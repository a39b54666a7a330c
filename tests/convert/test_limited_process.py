"""A process with limits for what a checkpoint makes Python compute."""

import resource
import sys
import time

import pytest

from kvfold.convert.limited_process import LimitedProcess


def test_results_and_errors_come_back():
    process = LimitedProcess(lambda text, count: [text] * count if count else int(text), 10)
    assert process.call("a", 2) == ["a", "a"]
    with pytest.raises(ValueError, match="invalid literal"):
        process.call("a", 0)
    assert process.call("b", 1) == ["b"]


def test_an_operation_in_c_is_ended_and_the_next_call_works():
    process = LimitedProcess(lambda digits: len(str(7 ** (10**digits))) and digits, 0.5)
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        process.call(8)
    assert time.monotonic() - started < 5
    assert process.call(1) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="reads the use of memory from /proc")
def test_a_call_gets_no_more_memory_than_allowed_and_its_parent_keeps_its_own():
    before = resource.getrlimit(resource.RLIMIT_DATA)
    with pytest.raises(TimeoutError):
        LimitedProcess(lambda size: len(bytearray(size)), 60).call(1 << 30)
    assert resource.getrlimit(resource.RLIMIT_DATA) == before

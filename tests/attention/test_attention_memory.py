"""No T x S matrix at 6k tokens: the peak of a process that runs every kind of mask, forward and
backward.
"""

import sys

import pytest
from helpers.processes import run_python

PROBE = r"""
import ctypes, re, torch
from kvfold.attention import grouped_attention, latent_attention
from kvfold.attention.drift.profile import sum_attention_by_distance_and_key
T = 6144
def peak():
    # of this process alone: a child's maximum, as the system reports it, includes its parent's
    return int(re.search(r"VmHWM:\s*(\d+) kB", open("/proc/self/status").read())[1]) / 1024
def make(length, dtype=torch.float32, heads=1):
    return [torch.randn(1, heads, length, 16, dtype=dtype) for _ in range(3)]
def calls(length):
    q, k, v = make(length)
    starts = torch.tensor([length // 100])
    yield "causal", lambda: grouped_attention(q, k, v)
    yield "cached prefix", lambda: grouped_attention(q[:, :, length // 2 :], k, v)
    yield "window", lambda: grouped_attention(q, k, v, window=length // 16)
    yield "left padding", lambda: grouped_attention(q, k, v, starts=starts)
    lengths = starts + length // 2
    yield "right padding", lambda: grouped_attention(q, k, v, lengths=lengths, causal=False)
    yield "bfloat16", lambda: grouped_attention(q.bfloat16(), k.bfloat16(), v.bfloat16())
    mla = q[..., :4], q[..., :4], k[:, 0], torch.randn(1, 4, 12), torch.randn(1, 4, 12)
    for absorbed in (False, True):
        yield f"latent, {absorbed=}", lambda: latent_attention(*mla, absorbed=absorbed)
    for window in (None, length // 16):
        yield (
            f"profile, {window=}",
            lambda: sum_attention_by_distance_and_key(q, k, 0.5, window=window),
        )
    g = [x.clone().requires_grad_() for x in (q, k, v)]
    yield "gradients", lambda: grouped_attention(*g, starts=starts).sum().backward()
for _, call in calls(64):
    call()
for name, call in calls(T):
    if name == "bfloat16":
        # oneDNN compiles a program for each shape at its first call, which takes memory of its own
        call()
        # or the measured call would reuse what this one freed
        ctypes.CDLL(None).malloc_trim(0)
    # the peak is again what is held now
    open("/proc/self/clear_refs", "w").write("5")
    before = peak()
    call()
    print(name, peak() - before, sep=": ")
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_peak_memory_at_6k_is_far_below_a_score_matrix():
    """A mask of booleans would take 38 MB, float32 scores 151 MB; inputs and outputs are 0.4 MB
    each.
    """
    lines = run_python("-c", PROBE).stdout.splitlines()
    megabytes = {line.split(": ")[0]: float(line.split(": ")[1]) for line in lines}
    assert len(megabytes) == 11
    assert max(megabytes.values()) < 24, megabytes

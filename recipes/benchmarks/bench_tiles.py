"""How fast the latent decode kernel reads its cache with other tiles than `kvfold.attention.kernel.chosen_tile` takes.

    python recipes/benchmarks/bench_tiles.py --json recipes/results/gpu/tiles.json      # on a CUDA device
    python recipes/benchmarks/bench_tiles.py --split 128+64 --heads 32

For each number of heads, all tiles of 16 to 64 heads, 32 to 128 slots, 4 or 8 warps and 2 or 3 stages that the card
takes, from a CUDA graph: bytes of cache per second, the fastest first. A tile that does
not compile, or has another result, is left out.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path

import torch
from measured import Row, commit, conditions, continue_rows

from kvfold.attention.kernel import Tile, decode_latent


def gigabytes_per_second(inputs: list[torch.Tensor], tile: Tile | None) -> float:
    """Of the cache ``[B, S, R]`` and ``[B, S, P]`` behind the queries in ``inputs``, the best of five replays."""
    call, calls, times = partial(decode_latent, *inputs, 0.05, tile=tile), 10, []
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        call()  # compiles, which a capture must not
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    for _ in range(5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / calls)
    return sum(each.nbytes for each in inputs[2:]) / min(times) / 1e9


def problem(batch: int, heads: int, slots: int, rank: int, rope: int) -> list[torch.Tensor]:
    """Queries, rotary queries, latents and rotary keys in bfloat16, the last two from one cache."""
    random = partial(torch.randn, device="cuda", dtype=torch.bfloat16)
    stored = random(batch, slots, rank + rope)
    return [random(batch, heads, 1, rank), random(batch, heads, 1, rope), stored[..., :rank], stored[..., rank:]]


def rows(arguments: argparse.Namespace, done: list[Row]) -> Iterator[Row]:
    rank, rope = map(int, arguments.split.split("+"))
    size = {"split": arguments.split, "batch": arguments.batch, "context": arguments.context}
    known = [{name: row[name] for name in (*size, "heads")} for row in done]
    for heads in map(int, arguments.heads.split(",")):
        if {**size, "heads": heads} in known:
            continue
        inputs, speeds = problem(arguments.batch, heads, arguments.context, rank, rope), {}
        for each in product((16, 32, 64), (32, 64, 128), (4, 8), (2, 3)):
            try:
                found, expected = (decode_latent(*inputs, 0.05, tile=tile).float() for tile in (Tile(*each), None))
                torch.testing.assert_close(found, expected, atol=0.01, rtol=0.01)
                speeds[str(tuple(each))] = gigabytes_per_second(inputs, Tile(*each))
            except Exception as error:  # too much shared memory or too many registers for this card
                print(f"{each}: {type(error).__name__}: {str(error)[:100]}")
        ranked = dict(sorted(speeds.items(), key=lambda item: -item[1]))
        row = {**size, "heads": heads}
        yield {**row, "chosen": gigabytes_per_second(inputs, None), "tiles": ranked, **conditions(inputs[0].device)}


def show(row: Row) -> None:
    best = ", ".join(f"{tile} {speed:.0f}" for tile, speed in list(row["tiles"].items())[:4])
    print(f"{row['split']}, {row['heads']} heads: chosen {row['chosen']:.0f} GB/s; heads, slots, warps, stages: {best}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", default="512+64", help="channels of the latent and the rotary key")
    parser.add_argument("--heads", default="16,32,64,128")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--json", type=Path, help="results file; continued where it exists")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("torch finds no CUDA device on this machine")
    continue_rows(arguments.json, {"commit": commit()}, partial(rows, arguments), show)


if __name__ == "__main__":
    main()

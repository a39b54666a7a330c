"""mlx-lm behind ``serve_check.py`` (see ``worker.py``); it has no ``options``.

The size of the cache is that of the arrays in mlx-lm's prompt cache.
"""

from pathlib import Path
from typing import Any

from worker import batches, main, measure, versions


def serve(request: dict[str, Any]) -> dict[str, Any]:
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model

    model = load_model(Path(request["model"]))[0]
    model.set_dtype(getattr(mx, request["dtype"]))

    def decode(prompts: list[list[int]], new_tokens: int, caches: list[Any]) -> list[list[int]]:
        ids = mx.array(prompts)
        columns = []
        for _ in range(new_tokens):
            ids = mx.argmax(model(ids, cache=caches)[:, -1], axis=-1)[:, None]
            columns.append(ids[:, 0].tolist())
        return [list(row) for row in zip(*columns, strict=True)]

    caches = make_prompt_cache(model)
    decode(request["prompts"][:1], 1, caches)
    shapes = [
        (cache.keys.shape, cache.values.shape) for cache in caches
    ]  # (sequences, heads, positions, size)
    return {
        "tokens": [
            row
            for prompts in batches(request["prompts"])
            for row in decode(prompts, request["new_tokens"], make_prompt_cache(model))
        ],
        "cache": sum(part[1] * part[3] for layer in shapes for part in layer) / len(shapes),
        "reported": (
            f"arrays (sequences, heads, positions, size) of a layer: {shapes[0][0]} and"
            f" {shapes[0][1]}"
        ),
        "runs": type(model).__module__,
        "versions": versions("mlx", "mlx-lm"),
        "speed": measure(
            request["speed"], lambda prompts, new: decode(prompts, new, make_prompt_cache(model))
        ),
    }


if __name__ == "__main__":
    main(serve)

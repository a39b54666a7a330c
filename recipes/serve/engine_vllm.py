"""vLLM behind ``serve_check.py`` (see ``worker.py``). ``options`` are keyword arguments of
``vllm.LLM``.

The size of the cache is that of vLLM's own specification of it, which decides how many tokens its
blocks hold.
"""

import json
import os
from pathlib import Path
from typing import Any

from worker import main, measure, versions

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")  # GiB
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process: its errors are raised here


def serve(request: dict[str, Any]) -> dict[str, Any]:
    import torch
    from vllm import LLM, SamplingParams

    config = json.loads((Path(request["model"]) / "config.json").read_text())
    speed = request["speed"]
    options = {
        "max_model_len": 256,
        "enforce_eager": True,
        "enable_prefix_caching": False,
    } | request["options"]
    if speed:
        options["max_model_len"] = max(
            options["max_model_len"], speed["context"] + speed["new_tokens"] + 1
        )
    if not torch.cuda.is_available() and "kv_lora_rank" in config and request["dtype"] == "float32":
        # The kernels for AMX, which vLLM takes where the processor has it, compute in bfloat16
        # only.
        options.setdefault("attention_backend", "CPU_MLA")
    model = LLM(
        model=request["model"], dtype=request["dtype"], seed=0, skip_tokenizer_init=True, **options
    )

    def generate(prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        greedy = SamplingParams(
            temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
        )
        found = model.generate(
            [{"prompt_token_ids": ids} for ids in prompts], greedy, use_tqdm=False
        )
        return [list(out.outputs[0].token_ids) for out in found]

    layers = [*model.collective_rpc("get_kv_cache_spec")[0].values()]
    bytes_per_token = sum(layer.page_size_bytes / layer.block_size for layer in layers)
    return {
        "tokens": generate(request["prompts"], request["new_tokens"]),
        "cache": bytes_per_token / layers[0].dtype.itemsize / len(layers),
        "reported": (
            f"{type(layers[0]).__name__}: {bytes_per_token:g} bytes per token in {len(layers)}"
            " layers"
        ),
        "runs": (
            type(model.llm_engine.model_executor.driver_worker.worker.model_runner.model).__name__
        ),
        "versions": versions("vllm", "vllm-cpu", "torch", "transformers"),
        "speed": measure(speed, generate),
    }


if __name__ == "__main__":
    main(serve)

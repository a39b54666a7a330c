"""llama.cpp behind ``serve_check.py`` (see ``worker.py``): the C library, called through
llama-cpp-py-sync.

``options["sources"]`` is a folder of llama.cpp's sources: its ``convert_hf_to_gguf.py`` writes the
GGUF file, float32. A DeepSeek model without a latent for its queries is converted from a copy whose
config says ``"q_lora_rank": 0``, a key that llama.cpp demands, and a Mistral4 under the name of its
wrapper, the only one that the converter knows. Attention is computed without flash attention, whose
rounding on a CPU moves logits by some hundredths; ``options["flash_attention"]`` true leaves the
choice to llama.cpp. The size of the cache is the one that it logs.
"""

import json
import os
import re
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

from worker import main, measure, versions

FLOAT32 = 0  # GGML_TYPE_F32
BATCH = 512  # tokens decoded at once
CELLS = 16384  # of the cache whose size is read: the log rounds to 0.01 MiB


def copy_for_gguf(model: Path, place: Path) -> Path:
    """A folder of links to the model's files, with the config that llama.cpp can read."""
    config = json.loads((model / "config.json").read_text())
    if "kv_lora_rank" in config and config.get("q_lora_rank") is None:
        config["q_lora_rank"] = 0
    if config.get("model_type") == "mistral4":
        config["architectures"] = ["Mistral3ForConditionalGeneration"]
    place.mkdir()
    for file in model.iterdir():
        if file.name != "config.json":
            (place / file.name).symlink_to(file.resolve())
    (place / "config.json").write_text(json.dumps(config))
    return place


def convert(model: Path, gguf: Path, sources: Path) -> None:
    """Runs the converter. It may not know the tokenizer: then it notes GPT-2's splitting of text,
    which is of no matter here, where a model is asked with token ids.
    """
    sys.path.insert(0, str(sources))
    from conversion.base import TextModel  # llama.cpp's

    known = TextModel.get_vocab_base_pre

    def get_vocab_base_pre(self: Any, tokenizer: Any) -> Any:
        try:
            return known(self, tokenizer)
        except NotImplementedError:
            return "gpt-2"

    TextModel.get_vocab_base_pre = get_vocab_base_pre
    script = str(sources / "convert_hf_to_gguf.py")
    sys.argv = [script, str(model), "--outfile", str(gguf), "--outtype", "f32"]
    runpy.run_path(script, run_name="__main__")


class Engine:
    """A loaded GGUF file; ``logs`` is what llama.cpp has logged."""

    def __init__(self, gguf: Path, flash_attention: bool) -> None:
        self.flash_attention = flash_attention
        from llama_cpp_py_sync._cffi_bindings import get_ffi, get_lib

        self.lib, self.ffi, self.logs = get_lib(), get_ffi(), list[str]()
        self._heard = self.ffi.callback("ggml_log_callback", self._hear)
        self.lib.llama_log_set(self._heard, self.ffi.NULL)
        self.lib.llama_backend_init()
        self.model = self.lib.llama_model_load_from_file(
            str(gguf).encode(), self.lib.llama_model_default_params()
        )
        if self.model == self.ffi.NULL:
            raise RuntimeError(
                next((line for line in self.logs if "error" in line), "not loaded").strip()
            )
        self.words = self.lib.llama_vocab_n_tokens(self.lib.llama_model_get_vocab(self.model))

    def _hear(self, level: int, text: Any, data: Any) -> None:
        self.logs.append(self.ffi.string(text).decode(errors="replace"))

    def context(self, sequences: int, length: int) -> Any:
        options = self.lib.llama_context_default_params()
        options.n_seq_max = sequences
        options.n_ctx = sequences * (-(-length // 256) * 256)
        options.n_batch = options.n_ubatch = BATCH
        options.type_k = options.type_v = FLOAT32
        if not self.flash_attention:
            options.flash_attn_type = 0  # LLAMA_FLASH_ATTN_TYPE_DISABLED
        options.n_threads = options.n_threads_batch = int(
            os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)
        )
        return self.lib.llama_init_from_model(self.model, options)

    def feed(self, context: Any, rows: list[list[int]], start: int) -> list[int]:
        """The best next token of every sequence after its ``rows``, which begin at position
        ``start``.
        """
        placed = [
            (ids[at], start + at, row, at == len(ids) - 1)
            for row, ids in enumerate(rows)
            for at in range(len(ids))
        ]
        best: list[int] = []
        for begin in range(0, len(placed), BATCH):
            part = placed[begin : begin + BATCH]
            batch = self.lib.llama_batch_init(len(part), 0, 1)
            batch.n_tokens = len(part)
            for at, (token, position, row, last) in enumerate(part):
                batch.token[at], batch.pos[at], batch.logits[at] = token, position, last
                batch.n_seq_id[at], batch.seq_id[at][0] = 1, row
            if status := self.lib.llama_decode(context, batch):
                raise RuntimeError(f"llama_decode returned {status}")
            best += [self.best(context, at) for at, (*_, last) in enumerate(part) if last]
            self.lib.llama_batch_free(batch)
        return best

    def best(self, context: Any, at: int) -> int:
        logits = self.ffi.unpack(self.lib.llama_get_logits_ith(context, at), self.words)
        return max(range(self.words), key=logits.__getitem__)

    def generate(self, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
        length = len(prompts[0])
        context = self.context(len(prompts), length + new_tokens)
        columns = [self.feed(context, prompts, 0)]
        for at in range(length, length + new_tokens - 1):
            columns.append(self.feed(context, [[token] for token in columns[-1]], at))
        self.lib.llama_free(context)
        return [list(row) for row in zip(*columns, strict=True)]

    def cache(self) -> tuple[int, str]:
        """Elements per token per layer, and the line of the log that says so."""
        self.logs.clear()
        self.lib.llama_free(self.context(1, CELLS))
        line = re.search(r"llama_kv_cache: size = .*", "".join(self.logs))
        if line is None:
            raise RuntimeError("llama.cpp logged no size of its cache")
        size = re.search(r"size =\s+([\d.]+) MiB \(\s*(\d+) cells,\s+(\d+) layers", line[0])
        mebibytes, cells, layers = size.groups() if size else ("nan", "1", "1")
        return round(float(mebibytes) * 2**20 / 4 / int(cells) / int(layers)), line[0].strip()


def serve(request: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        gguf = Path(folder, "model.gguf")
        source = copy_for_gguf(Path(request["model"]), Path(folder, "copy"))
        convert(source, gguf, Path(request["options"]["sources"]))
        engine = Engine(gguf, request["options"].get("flash_attention", False))
        architecture = next((line for line in engine.logs if "print_info: arch " in line), "")
        tokens = [engine.generate([ids], request["new_tokens"])[0] for ids in request["prompts"]]
        cache, reported = engine.cache()
        return {
            "tokens": tokens,
            "cache": cache,
            "reported": reported,
            "runs": architecture.split("=")[-1].strip(),
            "versions": versions("llama-cpp-py-sync", "gguf", "transformers"),
            "speed": measure(request["speed"], engine.generate),
        }


if __name__ == "__main__":
    main(serve)

"""Download models of the Hugging Face hub, named ``owner/name`` or ``owner/name@revision``.
Imports huggingface_hub only when needed.
"""

import glob
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvfold.convert.checkpoint.files import (
    ADAPTER,
    CHAT_FILES,
    CONFIG,
    INDEX,
    LEGACY,
    NOT_NEEDED,
    SINGLE,
    TEMPLATES,
    read_weight_map,
)
from kvfold.convert.checkpoint.headers import DTYPES, TensorInfo
from kvfold.convert.errors import InputError, shorten_repr, summarize_error

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[^@\s]+)?")
_HUB_ADVICE = {
    "GatedRepoError": (
        "access is restricted: accept the terms on the model's page, then run `hf auth login`"
    ),
    "RepositoryNotFoundError": (
        "no such folder, and no such model on the hub (a private model needs `hf auth login`)"
    ),
    "RevisionNotFoundError": (
        "the model has no such revision; choose a branch, tag or commit from its page"
    ),
}


def download_model(model: str) -> Path:
    """Download the model's files that are not in the hub cache yet. Returns the local snapshot
    folder, which is named after its commit. Raises InputError if the download fails.
    """
    # config.json, indices and code, besides what is passed on
    folder = _download_files(model, ignored=["*/*", *NOT_NEEDED])
    for single, index in ((SINGLE, INDEX), LEGACY):
        weights = [single]
        if (folder / index).exists():
            weights += set(read_weight_map(folder, index).values())
        folder = _download_files(model, [CONFIG, TEMPLATES, *map(glob.escape, weights)])
        if (folder / single).exists() or (folder / index).exists():
            break
    return folder


def fetch_tensor_headers(model: str) -> tuple[Path, list[TensorInfo]] | None:
    """Fetch only the names, dtypes and shapes of the tensors of a hub model, by HTTP range
    requests. Returns the local folder with its config.json and chat template, and one `TensorInfo`
    per tensor; None if the model has no safetensors files, and with HF_HUB_OFFLINE.

    Raises InputError if that fails or a header is not valid.
    """
    from huggingface_hub import constants, get_safetensors_metadata
    from huggingface_hub.errors import NotASafetensorsRepoError

    if constants.HF_HUB_OFFLINE:
        return None
    folder = _download_files(model, [CONFIG, ADAPTER, *CHAT_FILES])
    tensors = []
    with _translate_hub_errors(model):
        try:
            # by commit: all are of one version even if the branch moves on meanwhile
            metadata = get_safetensors_metadata(model.partition("@")[0], revision=folder.name)
        except NotASafetensorsRepoError:
            return None
        # in the order of the files, so that an error always names the same tensor
        for file, header in sorted(metadata.files_metadata.items()):
            for name, info in header.tensors.items():
                if info.dtype not in DTYPES:
                    raise InputError(
                        f"{model}: {file}: tensor {shorten_repr(name)} has an unknown dtype,"
                        f" {shorten_repr(info.dtype)}; choose another model"
                    )
                shape = tuple(info.shape)
                tensors.append(TensorInfo(name, info.dtype, shape, file, *info.data_offsets))
    return folder, sorted(tensors, key=lambda tensor: (tensor.file, tensor.start))


def _download_files(
    model: str, patterns: list[str] | None = None, ignored: list[str] | None = None
) -> Path:
    """Download the model's files that match ``patterns`` (None: all files) and none of ``ignored``
    into the hub cache. Returns the snapshot folder.
    """
    import huggingface_hub

    name, _, revision = model.partition("@")
    with _translate_hub_errors(model):
        folder = huggingface_hub.snapshot_download(
            name, revision=revision or None, allow_patterns=patterns, ignore_patterns=ignored
        )
    return Path(folder).resolve()


@contextmanager
def _translate_hub_errors(model: str) -> Iterator[None]:
    """Raise any error of a hub request in the with-block as an InputError that names ``model`` and
    a way out.
    """
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        yield
    except InputError:
        raise
    # the hub's library passes on its transport's errors, which have no common base
    except Exception as error:
        cause_and_advice = (
            f"the hub refused or could not be reached ({summarize_error(error)}); check the path or"
            " the hub id"
        )
        for kind in reversed(type(error).__mro__):
            cause_and_advice = _HUB_ADVICE.get(kind.__name__, cause_and_advice)
        raise InputError(f"{model}: cannot be fetched: {cause_and_advice}") from None

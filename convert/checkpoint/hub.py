"""Models named by a hub id, ``owner/name`` or ``owner/name@revision``. Imports huggingface_hub only
when needed.
"""

import re
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvfold.convert.checkpoint.headers import MAX_HEADER, TensorInfo, parse_header
from kvfold.convert.checkpoint.members import (
    CHAT_FILES,
    CONFIG,
    EXTRA_PATTERNS,
    INDEX,
    LEGACY_INDEX,
    LEGACY_SINGLE,
    RECORD,
    SINGLE,
    resolve_member,
)
from kvfold.convert.errors import InputError, summarize_error

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[^@\s]+)?")
_SMALL = [CONFIG, "adapter_config.json", "*.py", *EXTRA_PATTERNS]
_SAFETENSORS = [SINGLE, INDEX, "model-*-of-*.safetensors"]
_LEGACY = [LEGACY_SINGLE, LEGACY_INDEX, "pytorch_model-*-of-*.bin"]
_FIRST_BYTES = 1 << 17  # nearly every header fits, so that one request per file is enough
_TIMEOUT = 30  # seconds without an answer
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
    "HFValidationError": "no such folder, and not a valid hub id (owner/name)",
}


@dataclass(frozen=True)
class RemoteFiles:
    """A model on the hub at one commit: its file names, and the local folder with its downloaded
    config and index.
    """

    model: str
    commit: str
    names: list[str]
    folder: Path


def download(model: str) -> Path:
    """Download what is missing from the hub cache and return the snapshot's folder. Raises
    InputError if that fails.
    """
    import huggingface_hub
    from huggingface_hub.utils import disable_progress_bars

    name, _, revision = model.partition("@")
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        for weights in (_SAFETENSORS, _LEGACY):
            with _asking(model):
                folder = huggingface_hub.snapshot_download(
                    name, revision=revision or None, allow_patterns=[*_SMALL, *weights]
                )
            if any(Path(folder, file).exists() for file in (SINGLE, INDEX)):
                break
    except InputError:
        config = huggingface_hub.try_to_load_from_cache(name, CONFIG, revision=revision or None)
        if not isinstance(config, str):
            raise
        # the hub's library calls a partial snapshot incomplete; its weights may still be whole:
        # opening it will tell
        return Path(config).parent
    return Path(folder)


def remote_files(model: str) -> RemoteFiles:
    """List a model's files at its revision's commit, and download the small ones that a plan needs.

    Raises InputError if that fails.
    """
    import huggingface_hub

    repository, _, revision = model.partition("@")
    with _asking(model):
        info = huggingface_hub.HfApi().model_info(repository, revision=revision or None)
        names = sorted(sibling.rfilename for sibling in info.siblings or [])
        if CONFIG not in names:
            raise InputError(
                f"{model}: a checkpoint needs a {CONFIG}, which this model lacks; choose another"
                " model"
            )
        # by commit: config, index and headers stay of one version even if the branch moves on
        # meanwhile
        downloaded = [name for name in (CONFIG, INDEX, LEGACY_INDEX, *CHAT_FILES) if name in names]
        paths = [
            huggingface_hub.hf_hub_download(repository, name, revision=info.sha)
            for name in downloaded
        ]
    return RemoteFiles(model, info.sha, names, Path(paths[0]).parent.resolve())


def remote_header(files: RemoteFiles, name: str) -> list[TensorInfo]:
    """The tensors of a safetensors file on the hub, whose header is fetched with range requests.
    Raises InputError if that fails or the header is not valid.
    """
    # The hub library's parse_safetensors_file_metadata does not give the file's size (a truncated
    # file would pass), does not check for gaps, overlaps and repeated names, and reads a whole
    # shard from a server that ignores the range.
    if name not in files.names:
        raise InputError(f"{files.model}: the file {name} is missing; choose another model")

    def read(start: int, length: int) -> bytes:
        if start + length <= len(first):
            return first[start : start + length]
        return _get_range(files, name, start, min(length, MAX_HEADER))[0]

    with _asking(files.model):
        first, size = _get_range(files, name, 0, _FIRST_BYTES)
        return parse_header(name, size, read)


def _get_range(files: RemoteFiles, name: str, start: int, length: int) -> tuple[bytes, int]:
    """Fetch up to ``length`` bytes of a file on the hub. Returns them and the size of the whole
    file.
    """
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

    url = hf_hub_url(files.model.partition("@")[0], name, revision=files.commit)
    headers = {
        **build_hf_headers(),
        "Range": f"bytes={start}-{start + length - 1}",
        "Accept-Encoding": "identity",
    }
    with get_session().stream(
        "GET", url, headers=headers, timeout=_TIMEOUT, follow_redirects=True
    ) as response:
        hf_raise_for_status(response)
        total = re.fullmatch(r"bytes \d+-\d+/(\d+)", response.headers.get("content-range", ""))
        if (
            response.status_code != 206 or total is None
        ):  # without it the answer is the whole file: gigabytes
            raise OSError(
                f"the request for a part of {name} was answered with status {response.status_code}"
            )
        return response.read(), int(total[1])


def upload(folder: Path, names: Iterable[str], repository: str, private: bool = False) -> str:
    """Upload the files ``names`` of ``folder`` to a model repository, which is created; returns the
    URL of the commit.

    Uses huggingface_hub's own upload, with the token of ``hf auth login`` or HF_TOKEN. Raises
    InputError if it fails, and if a name or a link leaves the folder.
    """
    paths = {name: resolve_member(folder, name, RECORD) for name in names}
    import huggingface_hub
    from huggingface_hub.utils import disable_progress_bars

    if not sys.stderr.isatty():
        disable_progress_bars()
    files = [huggingface_hub.CommitOperationAdd(name, str(paths[name])) for name in sorted(paths)]
    try:
        api = huggingface_hub.HfApi()
        api.create_repo(repository, private=private, exist_ok=True)
        commit = api.create_commit(repository, files, commit_message="Converted by kvfold")
    except Exception as error:  # as in `_asking`
        raise InputError(
            f"{repository}: the upload failed ({summarize_error(error)}); check the network and the"
            " name (owner/name), and log in with `hf auth login` and a token that may write"
        ) from None
    return str(commit.commit_url)


@contextmanager
def _asking(model: str) -> Iterator[None]:
    """Turn any failure of a request to the hub into an InputError."""
    try:
        yield
    except InputError:
        raise
    except (
        Exception
    ) as error:  # the hub's library passes on its transport's errors, which have no common base
        kinds = [kind.__name__ for kind in type(error).__mro__]
        advice = next((text for name, text in _HUB_ADVICE.items() if name in kinds), None)
        failed = f"the hub could not provide it ({summarize_error(error)})"
        reason = advice or f"no such folder here, and {failed}; check the path or the hub id"
        raise InputError(f"{model}: {reason}") from None

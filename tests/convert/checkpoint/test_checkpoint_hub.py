"""Hub ids against a small hub of our own on 127.0.0.1: download whole, read headers by range
requests, errors.

The hub's library reads its address from the environment when it is imported, so every case is a
process of its own.
"""

import base64
import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from helpers.processes import run_python
from safetensors.torch import save_file

from kvfold.convert.checkpoint.digests import hash_file
from kvfold.convert.checkpoint.hub import upload
from kvfold.convert.checkpoint.opening import open_checkpoint
from kvfold.convert.cli import kvfold
from kvfold.convert.data import demo_folder
from kvfold.convert.errors import InputError, KvfoldError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


class Hub(ThreadingHTTPServer):
    """Serves one model, ``team/tiny``, out of a folder; ``served`` records (method, file, bytes
    sent).
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.served: list[tuple[str, str, int]] = []
        self.ranges = True


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        names = sorted(file.name for file in self.server.folder.iterdir())
        if re.fullmatch(rf"/api/models/team/tiny(/revision/(main|v1|{COMMIT}))?", path):
            self.send_json(
                {
                    "id": "team/tiny",
                    "sha": COMMIT,
                    "siblings": [{"rfilename": name} for name in names],
                }
            )
        elif path == f"/api/models/team/tiny/tree/{COMMIT}":
            sizes = {name: (self.server.folder / name).stat().st_size for name in names}
            self.send_json(
                [{"type": "file", "path": n, "size": s, "oid": "0" * 40} for n, s in sizes.items()]
            )
        elif (found := re.fullmatch(rf"/team/tiny/resolve/{COMMIT}/(.+)", path)) and found[
            1
        ] in names:
            self.send_file(self.server.folder / found[1])
        else:
            code = "RevisionNotFound" if "team/tiny" in path else "RepoNotFound"
            self.send(404, b"", {"X-Error-Code": code})

    do_HEAD = do_GET

    def send_json(self, value: object) -> None:
        self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def send_file(self, path: Path) -> None:
        data = path.read_bytes()
        status = 200
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked and self.server.ranges:
            start = int(asked[1])
            end = min(int(asked[2] or len(data)), len(data) - 1)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
            data = data[start : end + 1]
            status = 206
        self.server.served.append((self.command, path.name, len(data)))
        self.send(status, data, headers)

    def send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sharded checkpoint whose shards are far larger than their headers."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("a card")
    torch.manual_seed(0)
    weight_map = {}
    for index, shard in enumerate(SHARDS):
        save_file({f"w{index}": torch.randn(512, 512), f"b{index}": torch.randn(7)}, folder / shard)
        weight_map.update({f"w{index}": shard, f"b{index}": shard})
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return folder


@pytest.fixture
def hub(folder: Path) -> Iterator[Hub]:
    server = Hub(folder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def ask(hub: Hub, tmp_path: Path):
    """Run a script with ``open_checkpoint``, ``open_headers`` and ``show``; returns its last line
    as JSON.
    """
    prelude = """
import json, sys
from kvfold.convert.errors import InputError
from kvfold.convert.checkpoint.opening import open_checkpoint, open_headers
def show(value): print(json.dumps(value))
"""

    def run(script: str, *arguments: str, **environment: str):
        settings = {
            "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_OFFLINE": "0",
        }
        done = run_python(
            "-c", prelude + script, *arguments, environment={**settings, **environment}
        )
        return json.loads(done.stdout.splitlines()[-1])

    return run


DESCRIBE = """
c = OPEN("team/tiny@v1")
show({"origin": c.origin, "hash": HASH, "config": c.config,
      "extra": [p.name for p in c.extra_files()],
      "tensors": {t.name: [t.dtype, list(t.shape), t.file, t.start, t.end]
                  for t in c.tensors.values()},
      "torch": "torch" in sys.modules or "transformers" in sys.modules})
"""


def test_headers_come_by_range_requests(hub: Hub, folder: Path, ask) -> None:
    found = ask(DESCRIBE.replace("OPEN", "open_headers").replace("HASH", "None"))
    assert found["origin"] == f"team/tiny@{COMMIT}"
    assert found["config"] == {"model_type": "llama"}
    assert not found["torch"]
    sent = {
        shard: sum(size for method, name, size in hub.served if name == shard) for shard in SHARDS
    }
    assert all(0 < size <= 1 << 17 for size in sent.values()), sent
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert ask("show(open_headers('team/tiny').chats)")
    whole = ask(DESCRIBE.replace("OPEN", "open_checkpoint").replace("HASH", "None"))
    assert found["tensors"] == whole["tensors"]
    for path in folder.glob("model*"):
        path.unlink()
    tensors = {f"{'long' * 20}.{index}": torch.zeros(1) for index in range(1500)}
    save_file(tensors, folder / "model.safetensors")  # its header is longer than the first request
    assert ask("show(sorted(open_headers('team/tiny').tensors))") == sorted(tensors)


@pytest.mark.slow
def test_a_download_is_whole_and_then_serves_offline(hub: Hub, folder: Path, ask) -> None:
    hashed = DESCRIBE.replace("HASH", "c.model_digest()")
    script = hashed.replace("OPEN", "open_checkpoint")
    online = ask(script)
    assert online["hash"] == open_checkpoint(folder).model_digest()
    assert online["extra"] == ["tokenizer.json"]
    assert online["origin"] == f"team/tiny@{COMMIT}"
    assert "README.md" not in {name for _, name, _ in hub.served}
    hub.served.clear()
    assert ask(script, HF_HUB_OFFLINE="1") == online
    assert ask(hashed.replace("OPEN", "open_headers"), HF_HUB_OFFLINE="1")["hash"] == online["hash"]
    assert hub.served == []


@pytest.mark.slow
def test_legacy_files_are_fetched_only_where_there_are_no_safetensors(
    hub: Hub, folder: Path, ask
) -> None:
    torch.save({"w": torch.ones(3)}, folder / "pytorch_model.bin")
    ask("open_checkpoint('team/tiny'); show(0)")
    assert "pytorch_model.bin" not in {name for _, name, _ in hub.served}
    for path in folder.glob("model*"):
        path.unlink()
    script = "show(open_checkpoint('team/tiny').read('w').tolist())"
    assert ask(script, HF_HOME=str(folder.parent / "other")) == [1, 1, 1]


REFUSED = """
found = []
for model in sys.argv[1:]:
    for function in (open_headers, open_checkpoint):
        try:
            checkpoint = function(model)
            if function is open_headers: checkpoint.read("w0")
        except Exception as error: found.append(str(error))
show(found)
"""


def test_what_the_hub_does_not_have_or_sends_cut_or_whole(hub: Hub, folder: Path, ask) -> None:
    messages = ask(REFUSED, "team/none", "team/tiny@v9", "team/tiny")
    assert [message.partition(":")[0] for message in messages[:4]] == (
        ["team/none"] * 2 + ["team/tiny@v9"] * 2
    )
    assert "use open_checkpoint" in messages[4]
    offline = ask(REFUSED, "team/other", HF_HUB_OFFLINE="1")
    assert all(message.startswith("team/other: no such folder here") for message in offline)
    os.truncate(folder / SHARDS[0], (folder / SHARDS[0]).stat().st_size - 10)
    assert all(SHARDS[0] in message for message in ask(REFUSED, "team/tiny@main"))
    hub.ranges = False
    assert "answered with status 200" in ask(REFUSED, "team/tiny")[0]


class Receiver(BaseHTTPRequestHandler):
    """The part of the hub's API that an upload asks: it stores every file of a commit in
    ``server.files``.
    """

    def log_message(self, *args: object) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        server: Any = self.server
        server.asked.append((self.path, self.headers.get("Authorization")))
        answer: Any = {"url": f"{server.place}/me/small", "errors": [], "warnings": []}
        status = 200
        if self.headers.get("Authorization") != "Bearer hf_secret":
            status = 401
            answer = {"error": "Invalid credentials"}
        elif "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            answer = {
                "files": [
                    {"path": n, "uploadMode": "regular", "shouldIgnore": False} for n in names
                ]
            }
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    server.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            answer = {
                "success": True,
                "commitOid": COMMIT,
                "commitUrl": f"{server.place}/me/small/commit/{COMMIT}",
            }
        self.answer(status, answer)

    def do_GET(self) -> None:
        self.answer(200, {"id": "me/small", "sha": COMMIT, "siblings": []})

    def answer(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def test_upload_follows_no_link_out_of_the_folder(tmp_path: Path, refused: Any) -> None:
    (tmp_path / "secret").touch()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "x.txt").symlink_to(tmp_path / "secret")
    for name in ("x.txt", "../secret"):
        with refused():
            upload(tmp_path / "out", [name], "me/small")


def test_a_result_is_verified_and_uploaded(demo_latent: Path, tmp_path: Path) -> None:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    server.place = f"http://127.0.0.1:{server.server_port}"
    server.files = {}
    server.asked = []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    settings = {
        "HF_ENDPOINT": server.place,
        "HF_HOME": str(tmp_path),
        "HF_HUB_OFFLINE": "0",
        "HF_TOKEN": "hf_secret",
    }

    def push(folder: Path, repo: str, **changes: str) -> Any:
        command = ("-m", "kvfold.convert", "push", folder, repo, "--private")
        return run_python(*command, check=False, environment={**settings, **changes})

    done = push(demo_latent, "me/small")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith(f"{server.place}/me/small/commit/{COMMIT}\n")
    record = json.loads((demo_latent / "kvfold.json").read_text())
    names = {*record["files"], "kvfold.json"}
    assert server.files == {name: (demo_latent / name).read_bytes() for name in names}
    done = push(demo_latent, "me/small", HF_TOKEN="hf_other")
    assert done.returncode == 2
    assert "hf auth login" in done.stderr
    assert "Traceback" not in done.stderr
    server.shutdown()
    server.server_close()


def test_nothing_is_uploaded_but_what_a_conversion_recorded(
    demo_latent: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{upload.__module__}.upload", lambda *_: pytest.fail("uploaded"))

    def push(folder: Path) -> Any:
        return CliRunner().invoke(kvfold, ["push", str(folder), "me/small"])

    with pytest.raises(InputError, match="kvfold did not write it"):
        raise push(demo_folder()).exception
    secret = tmp_path / "id_rsa"
    secret.write_text("secret")
    links = Path(shutil.copytree(demo_latent, tmp_path / "links"))
    (links / "x.txt").symlink_to(secret)
    (links / "kvfold.json").write_text(json.dumps({"files": {"x.txt": hash_file(secret)}}))
    damaged = Path(shutil.copytree(demo_latent, tmp_path / "damaged"))
    (damaged / "config.json").write_text((damaged / "config.json").read_text() + " ")
    for folder in (links, damaged):
        assert isinstance(push(folder).exception, KvfoldError)

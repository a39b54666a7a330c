"""Hub ids against a small hub of our own on 127.0.0.1: downloads, range requests, errors."""

import hashlib
import json
import os
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from helpers import forked
from safetensors.torch import save_file

from kvfold.convert.checkpoint.files import list_files_besides_weights
from kvfold.convert.checkpoint.opening import open_checkpoint, open_checkpoint_headers
from kvfold.convert.errors import InputError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]


class Hub(ThreadingHTTPServer):
    """Serves one model, ``team/tiny``, out of a folder. ``served`` records (method, file, bytes
    sent).
    """

    daemon_threads = True

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.folder = folder
        self.served: list[tuple[str, str, int]] = []


class Handler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *args):
        pass

    def do_GET(self):
        path = self.path.split("?")[0]
        files = {file.name: file for file in self.server.folder.iterdir()}
        if re.fullmatch(rf"/api/models/team/tiny(/revision/(main|v1|{COMMIT}))?", path):
            siblings = [{"rfilename": name} for name in files]
            self.send_json({"id": "team/tiny", "sha": COMMIT, "siblings": siblings})
        elif path == f"/api/models/team/tiny/tree/{COMMIT}":
            sizes = {name: file.stat().st_size for name, file in files.items()}
            self.send_json(
                [{"type": "file", "path": n, "size": s, "oid": "0" * 40} for n, s in sizes.items()]
            )
        elif (name := path.removeprefix(f"/team/tiny/resolve/{COMMIT}/")) in files:
            self.send_file(files[name])
        else:
            code = "RevisionNotFound" if "team/tiny" in path else "RepoNotFound"
            self.send(404, b"", {"X-Error-Code": code})

    do_HEAD = do_GET

    def send_json(self, value):
        self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def send_file(self, path):
        data = path.read_bytes()
        status = 200
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}
        if asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            start = int(asked[1])
            end = min(int(asked[2] or len(data)), len(data) - 1)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
            data = data[start : end + 1]
            status = 206
        self.server.served.append((self.command, path.name, len(data)))
        self.send(status, data, headers)

    def send(self, status, data, headers):
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


@pytest.fixture
def folder(tmp_path):
    """A sharded checkpoint whose shards are far larger than their headers."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "README.md").write_text("a card")
    weight_map = {}
    for index, shard in enumerate(SHARDS):
        save_file({f"w{index}": torch.randn(512, 512), f"b{index}": torch.randn(7)}, folder / shard)
        weight_map |= {f"w{index}": shard, f"b{index}": shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.fixture
def hub(folder):
    server = Hub(folder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def ask(hub, tmp_path):
    """``ask(work)``: what ``work()`` returns, in a child whose hub is ``hub``."""

    def ask(work, **environment):
        settings = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}

        def child():
            # The hub's library reads its address from the environment when it is imported.
            os.environ.update({**settings, "HF_HUB_OFFLINE": "0", **environment})
            for name in [name for name in sys.modules if name.startswith("huggingface_hub")]:
                del sys.modules[name]
            print(json.dumps(work()))

        end = forked.run(tmp_path / "log", child)
        assert end.status == 0, end.stderr
        return json.loads(end.stdout.splitlines()[-1])

    return ask


def describe(opener):
    checkpoint = opener("team/tiny@v1")
    infos = checkpoint.tensors.values()
    tensors = {info.name: [info.dtype, info.shape, info.file] for info in infos}
    return [checkpoint.origin, checkpoint.config, tensors]


def test_headers_come_by_range_requests(hub, folder, ask):
    found = ask(lambda: describe(open_checkpoint_headers))
    assert found[:2] == [f"team/tiny@{COMMIT}", {"model_type": "llama"}]
    for shard in SHARDS:
        sent = [size for method, name, size in hub.served if name == shard and method == "GET"]
        assert 0 < sum(sent) <= 1 << 17
    assert found == ask(lambda: describe(open_checkpoint))
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    for path in folder.glob("model*"):
        path.unlink()
    tensors = {f"{'long' * 20}.{index}": torch.zeros(1) for index in range(1500)}
    save_file(tensors, folder / "model.safetensors")  # its header is longer than the first request

    def chats_and_names():
        checkpoint = open_checkpoint_headers("team/tiny")
        return [checkpoint.has_chat_template, sorted(checkpoint.tensors)]

    other = str(folder.parent / "other")
    assert ask(chats_and_names, HF_HOME=other) == [True, sorted(tensors)]


def test_a_download_is_whole_and_then_serves_offline(hub, folder, ask):
    def read():
        checkpoint = open_checkpoint("team/tiny@v1")
        return [
            checkpoint.origin,
            checkpoint.compute_model_digest(),
            list_files_besides_weights(checkpoint.folder),
        ]

    expected = [
        f"team/tiny@{COMMIT}",
        open_checkpoint(folder).compute_model_digest(),
        ["tokenizer.json"],
    ]
    assert ask(read) == expected
    assert "README.md" not in {name for _, name, _ in hub.served}
    hub.served.clear()
    assert ask(read, HF_HUB_OFFLINE="1") == expected
    offline = ask(
        lambda: open_checkpoint_headers("team/tiny@v1").compute_model_digest(), HF_HUB_OFFLINE="1"
    )
    assert offline == expected[1]
    assert hub.served == []


@pytest.mark.parametrize(
    "name", ["model.safetensors-0000{}-of-00002.safetensors", "model_{}.safetensors"]
)
def test_the_shards_that_the_index_names_are_fetched(hub, folder, ask, name):
    (folder / "consolidated.safetensors").write_bytes(b"not named by the index")
    (folder / "tekken.json").write_text("{}")
    text = (folder / "model.safetensors.index.json").read_text()
    for number, shard in enumerate(SHARDS, 1):
        (folder / shard).rename(folder / name.format(number))
        text = text.replace(shard, name.format(number))
    (folder / "model.safetensors.index.json").write_text(text)
    expected = [open_checkpoint(folder).compute_model_digest(), ["tekken.json", "tokenizer.json"]]

    def read():
        checkpoint = open_checkpoint("team/tiny")
        return [checkpoint.compute_model_digest(), list_files_besides_weights(checkpoint.folder)]

    headers = ask(lambda: describe(open_checkpoint_headers))
    assert ask(read) == expected
    assert headers == ask(lambda: describe(open_checkpoint))
    assert "consolidated.safetensors" not in {name for _, name, _ in hub.served}
    assert ask(read, HF_HUB_OFFLINE="1") == expected


def test_legacy_files_are_fetched_only_where_there_are_no_safetensors(hub, folder, ask):
    torch.save({"w": torch.ones(3)}, folder / "pytorch_model.bin")
    ask(lambda: describe(open_checkpoint))
    assert "pytorch_model.bin" not in {name for _, name, _ in hub.served}
    for path in folder.glob("model*"):
        path.unlink()
    other = str(folder.parent / "other")
    read = ask(
        lambda: open_checkpoint_headers("team/tiny").read_tensor("w").tolist(), HF_HOME=other
    )
    assert read == [1, 1, 1]


def test_what_the_hub_does_not_have_or_sends_cut(folder, ask):
    def refuse(model, **environment):
        def work():
            messages = []
            for opener in (open_checkpoint_headers, open_checkpoint):
                with pytest.raises(InputError) as caught:
                    opener(model)
                messages.append(str(caught.value))
            return messages

        first, second = ask(work, **environment)
        assert first.startswith(f"{model}: ")
        return f"{first} {second}"

    for model in ("team/none", "team/tiny@v9"):
        assert refuse(model).count(f"{model}: ") == 2
    assert refuse("team/other", HF_HUB_OFFLINE="1").count("check the path or the hub id") == 2
    (folder / SHARDS[0]).write_bytes(b"<html>")
    assert refuse("team/tiny@main").count(SHARDS[0]) >= 2

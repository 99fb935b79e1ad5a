"""hf:// through huggingface_hub's file system, against a local fake of the hub's HTTP API."""

import hashlib
import json
import re
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import torch
from huggingface_hub import constants
from loopback import served
from s3_server import write_parquet, write_tar

from compressive.data.sources import open_source
from compressive.storage import backend as backend_module
from compressive.storage.backend import StorageError

REPO = "datasets/user/name"


class ReadableHub(ThreadingHTTPServer):
    """One repository of files; `status` answers all requests if it is not 0."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), ReadableHandler)
        self.files: dict[str, bytes] = {}
        self.status = 0
        self.tokens: set[str] = set()
        self.ranges: list[str] = []

    def describe(self, path: str) -> dict[str, Any]:
        content = self.files[path]
        return {
            "type": "file",
            "path": path,
            "size": len(content),
            "oid": hashlib.sha1(content).hexdigest(),
        }

    def tree(self, folder: str, recursive: bool) -> list[dict[str, Any]] | None:
        start = f"{folder}/" if folder else ""
        found, folders = [], dict[str, None]()
        for path in self.files:
            if not path.startswith(start):
                continue
            inside, slash, _ = path.removeprefix(start).partition("/")
            if slash:
                folders[start + inside] = None
            if recursive or not slash:
                found.append(self.describe(path))
        if not found and not folders:
            return None
        return found + [{"type": "directory", "path": each, "oid": "0" * 40} for each in folders]


class ReadableHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: ReadableHub  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        path, body = (
            unquote(address.path),
            self.rfile.read(int(self.headers["content-length"] or 0)),
        )
        self.server.tokens.add(self.headers.get("authorization", ""))
        if self.server.status:
            return self.answer({"error": "planted"}, self.server.status)
        if not path.removeprefix("/api").startswith(f"/{REPO}"):
            missing = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
            return self.answer({"error": "Repository not found"}, 404, missing)
        if found := re.fullmatch(f"/api/{REPO}(?:/revision/main)?", path):
            return self.answer({"id": "user/name", "sha": "1" * 40, "siblings": []})
        if found := re.fullmatch(f"/api/{REPO}/tree/main/?(.*)", path):
            tree = self.server.tree(found[1], "recursive=true" in address.query.lower())
            return self.answer(tree) if tree is not None else self.no_entry()
        if found := re.fullmatch(f"/api/{REPO}/paths-info/main", path):
            wanted = self.wanted(body)
            return self.answer([self.server.describe(p) for p in wanted if p in self.server.files])
        if found := re.fullmatch(f"/{REPO}/resolve/main/(.+)", path):
            return self.content(found[1])
        return self.answer({"error": path}, 404)

    do_POST = do_HEAD = do_GET

    def wanted(self, body: bytes) -> list[str]:
        if body.startswith(b"{"):
            return json.loads(body)["paths"]
        pairs = [pair.partition("=") for pair in body.decode().split("&")]
        return [unquote(value) for key, _, value in pairs if key == "paths"]

    def content(self, path: str) -> None:
        if path not in self.server.files:
            return self.no_entry()
        whole = self.server.files[path]
        asked = self.headers.get("range", "")
        self.server.ranges.append(asked)
        etag = {"ETag": f'"{hashlib.sha1(whole).hexdigest()}"', "X-Repo-Commit": "1" * 40}
        if found := re.fullmatch(r"bytes=(\d+)-(\d*)", asked):
            first, last = int(found[1]), int(found[2] or len(whole) - 1)
            part = whole[first : last + 1]
            etag["Content-Range"] = f"bytes {first}-{first + len(part) - 1}/{len(whole)}"
            return self.answer(part, 206, etag)
        return self.answer(whole, 200, etag)

    def no_entry(self) -> None:
        self.answer({"error": "Entry not found"}, 404, {"X-Error-Code": "EntryNotFound"})

    def answer(
        self, content: Any, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ReadableHub]:
    server = ReadableHub()
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setenv("HF_TOKEN", "hf_planted")
    monkeypatch.setenv("COMPRESSIVE_CACHE", str(tmp_path / "cache"))
    for name in ("quick", "patient"):
        monkeypatch.setitem(backend_module.WAITS, name, (0.01,) * 2)
    backend_module._backend.cache_clear()
    with served(server):
        yield server
    backend_module._backend.cache_clear()


@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_shards_of_a_repository_equal_local_ones(
    hub: ReadableHub, tmp_path: Path, kind: str
) -> None:
    write = {"tar": write_tar, "parquet": write_parquet}[kind]
    for i in range(2):
        local = write(tmp_path / f"set/data/train-{i}.{kind}", range(12 * i, 12 * i + 12))
        hub.files[f"data/train-{i}.{kind}"] = local.read_bytes()
    one, other = open_source(f"hf://{REPO}"), open_source(tmp_path / "set")
    assert len(one) == len(other) == 24
    assert one.classes == other.classes
    for i in (0, 11, 12, 23):
        assert torch.equal(one.image(i), other.image(i))
    assert hub.tokens == {"Bearer hf_planted"}
    assert hub.ranges
    assert all(each.startswith("bytes=") for each in hub.ranges)


@pytest.mark.parametrize(
    ("place", "status", "expected"),
    [
        ("hf://datasets/user/other", 0, "no repository datasets/user/other|does not exist"),
        (f"hf://{REPO}/none", 0, "does not exist"),
        (f"hf://{REPO}", 401, "HF_TOKEN"),
        (f"hf://{REPO}", 403, "HF_TOKEN"),
    ],
)
def test_problems_of_the_hub_are_one_line(
    hub: ReadableHub, place: str, status: int, expected: str
) -> None:
    hub.files["data/x"] = b"1"
    hub.status = status
    with pytest.raises(StorageError, match=expected) as caught:
        open_source(place)
    assert "\n" not in str(caught.value)
    assert "hf_planted" not in str(caught.value)

"""Uploads to a local fake of the Hugging Face Hub."""

import base64
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from command_line import error_line
from huggingface_hub import constants
from loopback import served

from compressive.exporting.push import push_folder, require_token


class FakeHub(ThreadingHTTPServer):
    """Accepts one commit with regular files; `status` answers the creation of repositories."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), FakeHandler)
        self.status = 200
        self.files: dict[str, bytes] = {}
        self.created: list[dict[str, Any]] = []
        self.tokens: set[str] = set()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class FakeHandler(BaseHTTPRequestHandler):
    server: FakeHub  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._answer({"sha": "0" * 40, "id": "org/name", "siblings": []})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        self.server.tokens.add(self.headers.get("authorization", ""))
        if self.path == "/api/repos/create":
            self.server.created.append(json.loads(body))
            wrong = {"error": "no such organization"}
            made = {"url": f"{self.server.address}/org/name"}
            self._answer(made if self.server.status == 200 else wrong, self.server.status)
        elif self.path == "/api/validate-yaml":  # the header of README.md
            self._answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            paths = [each["path"] for each in json.loads(body)["files"]]
            modes = [
                {"path": path, "uploadMode": "regular", "shouldIgnore": False} for path in paths
            ]
            self._answer({"files": modes})
        elif "/commit/" in self.path:
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "file":
                    value = line["value"]
                    self.server.files[value["path"]] = base64.b64decode(value["content"])
            self._answer(
                {"commitUrl": f"{self.server.address}/org/name/commit/1", "commitOid": "1" * 40}
            )
        else:
            self._answer({"error": self.path}, 404)

    def _answer(self, content: dict[str, Any], status: int = 200) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    server = FakeHub()
    monkeypatch.setattr(constants, "ENDPOINT", server.address)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with served(server):
        yield server


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "export"
    made.mkdir()
    for name in ("config.json", "model.safetensors", "README.md", "export.json"):
        (made / name).write_text(f"---\n---\ncontent of {name}")
    return made


def test_all_files_but_the_record_are_uploaded(hub: FakeHub, folder: Path) -> None:
    require_token()
    address = push_folder(folder, "org/name")
    assert address == f"{hub.address}/org/name"
    assert hub.created[0]["name"] == "name"
    assert hub.created[0]["organization"] == "org"
    assert hub.files.keys() == {"config.json", "model.safetensors", "README.md"}
    assert hub.files["config.json"] == (folder / "config.json").read_bytes()
    assert hub.tokens == {"Bearer hf_secret"}


def test_refusal_of_the_hub_is_one_line(hub: FakeHub, folder: Path) -> None:
    hub.status = 400
    with pytest.raises(
        ValueError, match=r"--push org/name failed: .*no such organization"
    ) as caught:
        push_folder(folder, "org/name")
    assert "\n" not in str(caught.value)
    assert str(folder) in str(caught.value)
    assert not hub.files


def test_missing_token_is_one_line_and_nothing_is_written(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN")
    text = error_line(f"export x --to huggingface --out {tmp_path}/out --push org/name")
    assert "--push" in text
    assert "HF_TOKEN" in text
    assert not (tmp_path / "out").exists()
    assert not hub.created

"""A real S3 server on the loopback interface, and a proxy in front of it that fails on request."""

import http.client
import io
import json
import logging
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from moto.server import ThreadedMotoServer
from tiny import noise

KEY, SECRET = "PLANTED-KEY-000001", "planted/secret+value0123456789"
BUCKET = "images"
DROPPED = ("transfer-encoding", "content-length", "expect", "connection")
FORBIDDEN = (
    b'<?xml version="1.0"?><Error><Code>SignatureDoesNotMatch</Code>'
    b"<Message>The request signature we calculated does not match.</Message></Error>"
)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # connections that wait; with 5, clients time out on a busy machine


class S3:
    """A proxy to a moto server: counts requests, and breaks some of them."""

    def __init__(self, port: int) -> None:
        self.fault = ""  # "", 500, cut or 403
        self.every = 1  # the fault happens at every n-th request of an object
        self.requests: list[tuple[str, str, int]] = []  # method, path, bytes of the answer
        self._target, self._count = port, 0
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), self._handler())
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def downloaded(self) -> int:
        return sum(size for method, path, size in self.requests if method == "GET")

    def _is_broken(self, command: str, path: str) -> str:
        if not self.fault or (self.fault == "cut" and (command == "HEAD" or "list-type" in path)):
            return ""
        with self._lock:
            self._count += 1
            return self.fault if self._count % self.every == 0 else ""

    def _handler(self) -> type[BaseHTTPRequestHandler]:  # noqa: C901
        s3 = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                fault = s3._is_broken(self.command, self.path)
                body = self.body()
                if fault in ("500", "403"):
                    text = FORBIDDEN if fault == "403" else b"planted failure"
                    return self.answer(int(fault), {"Content-Type": "application/xml"}, text)
                inner = http.client.HTTPConnection("127.0.0.1", s3._target, timeout=30)
                kept = {k: v for k, v in self.headers.items() if k.lower() not in DROPPED}
                inner.request(self.command, self.path, body, kept)
                found = inner.getresponse()
                content = found.read()
                skipped = ("transfer-encoding", "connection", "date", "server")
                headers = {k: v for k, v in found.getheaders() if k.lower() not in skipped}
                inner.close()
                s3.requests.append((self.command, self.path, len(content)))
                return self.answer(found.status, headers, content, cut=fault == "cut")

            do_HEAD = do_PUT = do_POST = do_DELETE = do_GET

            def body(self) -> bytes:
                if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                    return self.rfile.read(int(self.headers.get("Content-Length") or 0))
                parts = []
                while size := int(self.rfile.readline().split(b";")[0], 16):
                    parts.append(self.rfile.read(size))
                    self.rfile.readline()
                self.rfile.readline()
                return b"".join(parts)

            def answer(self, status: int, headers: dict, body: bytes, cut: bool = False) -> None:
                self.send_response(status)
                if self.command != "HEAD" and status not in (204, 304):
                    headers = {k: v for k, v in headers.items() if k.lower() != "content-length"}
                    headers["Content-Length"] = str(len(body))
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body[: len(body) // 2] if cut else body)
                if cut:
                    self.close_connection = True

            def log_message(self, *_: Any) -> None: ...

        return Handler


@contextmanager
def s3_server() -> Iterator[S3]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    proxy = S3(moto.get_host_and_port()[1])
    try:
        yield proxy
    finally:
        proxy.close()
        moto.stop()


def use_server(s3: S3, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """Point the environment at the server, with an empty cache and planted credentials."""
    values = environment(s3, cache)
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL_S3", "AWS_NO_SIGN_REQUEST"):
        monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def environment(s3: S3, cache: Path) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": s3.endpoint,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
        "COMPRESSIVE_CACHE": str(cache),
    }


def create_bucket(s3: S3, name: str = BUCKET) -> None:
    call(s3, "PUT", f"/{name}")


def call(s3: S3, method: str, path: str, body: bytes = b"") -> bytes:
    """Send a request to the server past the proxy; moto does not check the signature."""
    connection = http.client.HTTPConnection("127.0.0.1", s3._target, timeout=30)
    scope = "20260101/us-east-1/s3/aws4_request"
    signed = f"AWS4-HMAC-SHA256 Credential={KEY}/{scope}, SignedHeaders=host, Signature=0"
    connection.request(method, path, body, {"Authorization": signed})
    found = connection.getresponse()
    content = found.read()
    connection.close()
    assert found.status < 300, content
    return content


def put_folder(s3: S3, folder: Path, prefix: str) -> None:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            call(s3, "PUT", f"/{prefix}/{path.relative_to(folder)}", path.read_bytes())


def png(seed: int, side: int = 16) -> bytes:
    file = io.BytesIO()
    noise(side, side, seed=seed).save(file, "PNG")
    return file.getvalue()


def write_tar(path: Path, seeds: range, classes: int = 5, side: int = 16) -> Path:
    """Write a shard as WebDataset does, with labels."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for seed in seeds:
            parts = {"png": png(seed, side), "cls": str(seed % classes).encode()}
            for kind, content in parts.items():
                member = tarfile.TarInfo(f"{seed:06d}.{kind}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return path


def write_parquet(
    path: Path, seeds: range, classes: int = 5, rows: int = 8, side: int = 16
) -> Path:
    """Write a shard as Hugging Face does, with class names."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = [f"class{i}" for i in range(classes)]
    features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
    table = pa.table(
        {
            "image": [{"bytes": png(seed, side), "path": f"{seed}.png"} for seed in seeds],
            "label": [seed % classes for seed in seeds],
        }
    )
    about = json.dumps({"info": {"features": features}})
    pq.write_table(table.replace_schema_metadata({"huggingface": about}), path, row_group_size=rows)
    return path


def running_server() -> Iterator[S3]:
    """Yield a server with a bucket; a test file makes it its fixture."""
    with s3_server() as s3:
        create_bucket(s3)
        yield s3

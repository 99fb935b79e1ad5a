"""A fake of Google Cloud Storage's JSON API on the loopback interface, as pyarrow uses it.

It is a process of its own, because pyarrow holds Python's lock during some requests.
"""

import http.client
import json
import re
import subprocess
import sys
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

GCS_BUCKET = "images"


class FakeGcs(ThreadingHTTPServer):
    """Holds the objects of one bucket; `status` answers requests of objects if it is not 0."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), GcsHandler)
        self.objects: dict[str, bytes] = {}
        self.generation: dict[str, int] = {}
        self.uploads: dict[str, tuple[str, bytearray]] = {}
        self.status = 0

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def put(self, name: str, content: bytes) -> None:
        self.objects[name] = content
        self.generation[name] = self.generation.get(name, 0) + 1

    def describe(self, name: str) -> dict[str, Any]:
        content, generation = self.objects[name], self.generation[name]
        return {
            "kind": "storage#object",
            "id": f"{GCS_BUCKET}/{name}/{generation}",
            "name": name,
            "bucket": GCS_BUCKET,
            "generation": str(generation),
            "metageneration": "1",
            "size": str(len(content)),
            "etag": f"etag-{zlib.crc32(content)}-{generation}",
            "timeCreated": "2026-01-01T00:00:00.000Z",
            "updated": "2026-01-01T00:00:00.000Z",
        }

    def listing(self, query: dict[str, str]) -> dict[str, Any]:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        items, prefixes = [], set()
        for name in sorted(each for each in self.objects if each.startswith(prefix)):
            inside, found, _ = name[len(prefix) :].partition(delimiter or "\0")
            if found and not (query.get("includeTrailingDelimiter") and name.endswith(delimiter)):
                prefixes.add(prefix + inside + delimiter)
            else:
                items.append(self.describe(name))
        return {"kind": "storage#objects", "items": items, "prefixes": sorted(prefixes)}


class GcsHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeGcs  # pyright: ignore[reportIncompatibleVariableOverride]

    def log_message(self, format: str, *args: Any) -> None: ...

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(address.query).items()}
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        path = address.path
        if path.startswith("/control/"):
            return self.control(path.removeprefix("/control/"), query, body)
        if self.server.status:
            return self.problem(self.server.status, "planted failure")
        if path.startswith("/upload/"):
            return self.upload(path, query, body)
        if found := re.fullmatch("/storage/v1/b/([^/]+)(?:/o(?:/(.+))?)?", path):
            bucket, name = found[1], unquote(found[2] or "")
            if bucket != GCS_BUCKET:
                return self.problem(404, "The specified bucket does not exist.")
            if not name:
                is_listing = path.endswith("/o")
                about = {"kind": "storage#bucket", "id": bucket, "name": bucket}
                return self.answer(self.server.listing(query) if is_listing else about)
            return self.object(name, query)
        if found := re.fullmatch(f"/{GCS_BUCKET}/(.+)", path):  # the XML API
            return self.object(unquote(found[1]), {"alt": "media"})
        return self.problem(404, path)

    do_PUT = do_POST = do_DELETE = do_GET

    def control(self, action: str, query: dict[str, str], body: bytes) -> None:
        """Answer a request of the tests."""
        if action == "put":
            self.server.put(query["name"], body)
        elif action == "status":
            self.server.status = int(query["value"])
        elif action == "get":
            return self.answer(self.server.objects[query["name"]])
        return self.answer({"names": sorted(self.server.objects)})

    def object(self, name: str, query: dict[str, str]) -> None:
        if name not in self.server.objects:
            return self.problem(404, f"No such object: {GCS_BUCKET}/{name}")
        if self.command == "DELETE":
            del self.server.objects[name]
            return self.answer(None, 204)
        if query.get("alt") != "media":
            return self.answer(self.server.describe(name))
        content = whole = self.server.objects[name]
        headers, status = {"x-goog-generation": str(self.server.generation[name])}, 200
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range", "")):
            first, last = int(wanted[1]), int(wanted[2] or len(whole) - 1)
            content, status = whole[first : last + 1], 206
            end = first + len(content) - 1
            headers["Content-Range"] = f"bytes {first}-{end}/{len(whole)}"
        return self.answer(content, status, headers)

    def upload(self, path: str, query: dict[str, str], body: bytes) -> None:
        if path.split("/")[5] != GCS_BUCKET:
            return self.problem(404, "The specified bucket does not exist.")
        if "upload_id" not in query:
            number = str(len(self.server.uploads))
            name = query.get("name") or json.loads(body)["name"]
            self.server.uploads[number] = name, bytearray()
            where = f"{self.server.address}{path}?uploadType=resumable&upload_id={number}"
            return self.answer({}, 200, {"Location": where})
        name, content = self.server.uploads[query["upload_id"]]
        content += body
        if self.headers.get("content-range", "/*").endswith("/*"):
            return self.answer(None, 308, {"Range": f"bytes=0-{len(content) - 1}"})
        self.server.put(name, bytes(content))
        return self.answer(self.server.describe(name))

    def problem(self, status: int, why: str) -> None:
        reason = {"domain": "global", "reason": "planted", "message": why}
        self.answer({"error": {"code": status, "message": why, "errors": [reason]}}, status)

    def answer(
        self, content: Any, status: int = 200, headers: dict[str, str] | None = None
    ) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        data = b"" if content is None else data
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Gcs:
    """The client of the tests."""

    def __init__(self, address: str) -> None:
        self.address = address

    def put(self, name: str, content: bytes) -> None:
        self._call(f"put?name={quote(name, safe='')}", content)

    def get(self, name: str) -> bytes:
        return self._call(f"get?name={quote(name, safe='')}")

    def names(self) -> list[str]:
        return json.loads(self._call("names"))["names"]

    def fail_with(self, status: int) -> None:
        self._call(f"status?value={status}")

    def _call(self, action: str, body: bytes = b"") -> bytes:
        connection = http.client.HTTPConnection(self.address.removeprefix("http://"), timeout=10)
        connection.request("POST", f"/control/{action}", body)
        found = connection.getresponse().read()
        connection.close()
        return found


@contextmanager
def gcs_server() -> Iterator[Gcs]:
    words = [sys.executable, __file__]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield Gcs(process.stdout.readline().strip())
        finally:
            process.terminate()


if __name__ == "__main__":
    server = FakeGcs()
    print(server.address, flush=True)
    server.serve_forever()

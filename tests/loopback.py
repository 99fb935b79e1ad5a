"""Serve HTTP on the loopback interface in a thread of a test."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer


@contextmanager
def served(server: ThreadingHTTPServer) -> Iterator[None]:
    """Answer requests until the end of the block."""
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join()

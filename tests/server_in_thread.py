"""The server of decoded images in a thread, because starting a process takes seconds."""

import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import ClassVar

import pytest

from compressive.data import decoder_process
from compressive.data.decoder_worker import DecodeServer


class ServerInThread(subprocess.Popen[bytes]):
    """Stands in for a process: the server runs in a thread of this process."""

    servers: ClassVar[list["ServerInThread"]] = []
    is_slow = False

    def __init__(self, words: list[str], pass_fds: list[int], **_: object) -> None:
        self.pid = os.getpid()
        self.socket = socket.socket(fileno=os.dup(pass_fds[0]))
        self.connection = Connection(os.dup(pass_fds[0]))
        self.server = DecodeServer(self.connection)
        self.thread = threading.Thread(target=self.serve)
        ServerInThread.servers.append(self)
        if not self.is_slow:
            self.start()

    def start(self) -> None:
        self.thread.start()

    def serve(self) -> None:
        with suppress(EOFError, OSError):
            self.server.serve()
        if self.server._threads is not None:
            self.server._threads.close()
        self.connection.close()
        self.socket.close()

    def kill(self) -> None:
        with suppress(OSError):  # it has ended
            self.socket.shutdown(socket.SHUT_RDWR)

    def wait(self, timeout: float | None = None) -> int:
        self.thread.join(timeout)
        return -9


def use_threads(monkeypatch: pytest.MonkeyPatch) -> type[ServerInThread]:
    """Let `DecoderProcess` start a thread instead of a process."""
    # Popen is also used elsewhere.
    others = SimpleNamespace(Popen=ServerInThread, DEVNULL=subprocess.DEVNULL)
    others.TimeoutExpired = subprocess.TimeoutExpired
    monkeypatch.setattr(decoder_process, "subprocess", others)
    monkeypatch.setattr(sys, "gettrace", lambda: None)  # else no test passes in a debugger
    monkeypatch.setattr(ServerInThread, "servers", [])
    monkeypatch.setattr(ServerInThread, "is_slow", False)
    return ServerInThread


def wait_until_ready(process: decoder_process.DecoderProcess) -> decoder_process.DecoderProcess:
    """Wait until a process can decode."""
    until = time.monotonic() + 60
    while not process.is_ready and time.monotonic() < until:
        time.sleep(0.005)
    assert process.is_ready
    return process

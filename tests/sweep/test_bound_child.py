"""A command that is bound to its parent ends with it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from processes import is_running

_PARENT = """
import os, subprocess, sys
words = [sys.executable, "-m", "compressive.sweep.bound_child", str(os.getpid()), "sleep", "60"]
print(subprocess.Popen(words).pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can bind a child to its parent")
def test_a_bound_command_is_killed_with_its_parent() -> None:
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", _PARENT], stdin=pipe, stdout=pipe) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        end = time.monotonic() + 20
        while b"sleep" not in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")[0]:
            assert time.monotonic() < end
            time.sleep(0.02)
        os.kill(parent.pid, signal.SIGKILL)
    while is_running(child):
        assert time.monotonic() < end, "the child outlives its parent"
        time.sleep(0.02)

"""Windows has no fcntl, SIGHUP, pread or sysconf, and cannot replace a file that is open."""

import errno
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from tiny import CHANGES, journal, sorted_photos

from compressive.platforms import files, memory, processes
from compressive.platforms.files import lock_folder, read_at, replace_file
from compressive.rundir.files import write_text
from compressive.train.signals import handle_stop_signals

HIDDEN = Path(__file__).parents[1] / "without_posix.py"


def start(*commands: list[str]) -> subprocess.CompletedProcess[str]:
    # Output that is redirected to a file has this encoding on Windows in western Europe.
    environment = {**os.environ, "PYTHONIOENCODING": "cp1252"}
    command = [sys.executable, str(HIDDEN), json.dumps(commands)]
    return subprocess.run(
        command, capture_output=True, env=environment, encoding="cp1252", timeout=300
    )


def settings(*changes: str) -> list[str]:
    return [word for change in (*CHANGES, *changes) for word in ("--set", change)]


@pytest.mark.slow
def test_run_is_trained_resumed_and_evaluated_without_posix(tmp_path: Path) -> None:
    run, total = tmp_path / "run", 60
    pretrain = ["pretrain", str(sorted_photos()), "--out", str(run)]
    pretrain += settings(f"train.steps={total}")
    done = start(
        ["interrupt", *pretrain],
        pretrain,
        ["evaluate", str(run), "--device", "cpu", "--tasks", "knn"],
        ["report", str(run), "--out", str(tmp_path / "report.html")],
        ["embed", str(run), str(sorted_photos()), "--out", str(tmp_path / "e.csv")],
    )
    assert "Traceback" not in done.stderr
    assert done.returncode == 0, done.stderr
    codes = [line for line in done.stdout.splitlines() if line.startswith("exit code")]
    assert codes == ["exit code 130", *["exit code 0"] * 4], done.stdout + done.stderr
    assert "stopped" in done.stdout
    assert (run / ".lock.partial").exists()  # Windows locks a file
    assert journal(run)[-1]["step"] == total
    assert json.loads((run / "evaluation" / "results.json").read_text())["records"]


@pytest.mark.stress
def test_sweep_and_second_process_without_posix(tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    sweep = ["sweep", str(sorted_photos()), *settings(), "--out", str(out)]
    sweep += ["--seeds", "0,1", "--suite", "none"]
    done = start(sweep)
    assert "exit code 0" in done.stdout, done.stderr
    code = "import without_posix as w, sys, pathlib; w.hide_posix()\n"
    code += "from compressive.rundir.lock import acquire_lock\n"
    code += "acquire_lock(pathlib.Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    holder = [sys.executable, "-c", code, str(out)]
    path = os.pathsep.join([str(HIDDEN.parent), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(
        holder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        rejected = start(sweep)
        other.communicate()
    assert "exit code 2" in rejected.stdout
    assert "another process" in rejected.stderr


def test_text_that_the_encoding_lacks_is_replaced() -> None:
    code = "import sys; sys.argv = ['compressive', 'recipes']\n"
    code += "from compressive.cli import info_commands\n"
    code += "from compressive.cli.terminal import print_line\n"
    code += "info_commands._has_gpu = lambda: print_line('\\u2192 \\u4e2d') or False\n"
    code += "from compressive.cli.app import app; app()"
    environment = {**os.environ, "PYTHONIOENCODING": "cp1252"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, env=environment, encoding="cp1252")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("? ?")


def test_file_lock_excludes_a_second_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    fake = type(sys)("msvcrt")
    held: list[int] = []

    def locking(descriptor: int, _mode: int, _count: int) -> None:
        if held:
            raise PermissionError(errno.EACCES, "Permission denied")
        held.append(descriptor)

    fake.__dict__.update(LK_NBLCK=2, locking=locking)
    monkeypatch.setitem(sys.modules, "msvcrt", fake)
    first = lock_folder(tmp_path, "lock")
    with pytest.raises(BlockingIOError, match="lock"):
        lock_folder(tmp_path, "lock")
    assert (tmp_path / "lock").exists()
    os.close(first)


def test_replacement_waits_while_a_file_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "new").write_text("new")
    (tmp_path / "old").write_text("old")
    tried, replace = [], Path.replace

    def busy(source: Path, target: Path) -> Path:
        tried.append(source)
        if len(tried) < 3:
            raise PermissionError(errno.EACCES, "another process has the file open")
        return replace(source, target)

    monkeypatch.setattr(Path, "replace", busy)
    monkeypatch.setattr(files, "_REPLACE_WAITS", (0.0, 0.0, 0.0))
    replace_file(tmp_path / "new", tmp_path / "old")
    assert (tmp_path / "old").read_text() == "new"
    assert len(tried) == 3
    tried.clear()
    monkeypatch.setattr(files, "_REPLACE_WAITS", (0.0,))
    with pytest.raises(OSError, match="another process has the file open"):
        write_text(tmp_path / "old", "newer")
    assert (tmp_path / "old").read_text() == "new"


def test_reads_at_an_offset_do_not_disturb_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = os.urandom(50_000)
    (tmp_path / "file").write_bytes(content)
    monkeypatch.delattr(os, "pread")
    wrong: list[int] = []
    with open(tmp_path / "file", "rb", buffering=0) as file:

        def read(start: int) -> None:
            for offset in range(start, 40_000, 97):
                if read_at(file.fileno(), 50, offset) != content[offset : offset + 50]:
                    wrong.append(offset)

        threads = [threading.Thread(target=read, args=(start,)) for start in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert wrong == []


def test_stop_signals_are_those_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    assert signal.SIGHUP in processes.stop_signals()
    monkeypatch.delattr(signal, "SIGHUP")
    assert processes.stop_signals() == [signal.SIGINT, signal.SIGTERM]
    monkeypatch.setattr(signal, "SIGBREAK", signal.SIGUSR1, raising=False)
    found: list[int] = []
    with handle_stop_signals(found.append):
        os.kill(os.getpid(), signal.SIGUSR1)
    assert found == [signal.SIGUSR1]


def test_children_get_their_own_group(monkeypatch: pytest.MonkeyPatch) -> None:
    assert processes.own_process_group() == (0, 0)
    monkeypatch.setattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 512, raising=False)
    assert processes.own_process_group() == (None, 512)


def test_memory_of_the_machine_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 2**28 < memory.free_host_memory() <= memory.total_host_memory()
    monkeypatch.delattr(os, "sysconf")
    assert memory.total_host_memory() == 0  # only Windows answers

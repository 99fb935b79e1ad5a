"""Only one process may write to a run folder; a second one is rejected and changes nothing."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import silent, tiny

from compressive.config import Config
from compressive.data.source import Source
from compressive.rundir import folder
from compressive.rundir.folder import read_config
from compressive.rundir.lock import acquire_lock, ensure_writable
from compressive.train import images
from compressive.train.loop import pretrain


def test_lock_is_held_until_the_process_is_killed(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "a"
    code = "import sys, time, pathlib; from compressive.rundir.lock import acquire_lock\n"
    code += "acquire_lock(pathlib.Path(sys.argv[1])); print('held', flush=True); time.sleep(600)"
    words = [sys.executable, "-c", code, str(out)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "held\n"
            with pytest.raises(ValueError, match=f"another process .*{out}"):
                acquire_lock(out)
        finally:
            other.kill()
    os.close(acquire_lock(out))
    os.close(acquire_lock(out))
    assert list(out.iterdir()) == []


def test_unwritable_path_is_rejected_and_nothing_is_created(tmp_path: Path) -> None:
    ensure_writable(tmp_path / "a" / "b")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match=r"/file .*--out"):
        ensure_writable(tmp_path / "file" / "a")
    with pytest.raises(ValueError, match=r"/proc .*\(.+\).*--to"):
        ensure_writable(Path("/proc/none/a"), "--to")
    with pytest.raises(ValueError, match=r"/proc .*--out"):
        pretrain(tiny("train.steps=2"), "/proc/none/a", display=silent())


@pytest.mark.slow
def test_locked_run_is_not_modified(tmp_path: Path) -> None:
    out = tmp_path / "a"
    pretrain(tiny("train.steps=2"), out, display=silent())
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    held = acquire_lock(out)  # a second open file description, as another process would have
    try:
        with pytest.raises(ValueError, match="another process"):
            pretrain(tiny("train.steps=2"), out, display=silent())
    finally:
        os.close(held)
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    pretrain(tiny("train.steps=2"), out, display=silent())


@pytest.mark.slow
def test_run_created_while_images_load_is_not_modified(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "a"
    read = images.load_source

    def slowly(config: Config, *given: Source | None) -> Source:
        monkeypatch.setattr(images, "load_source", read)
        pretrain(tiny("train.steps=2", "seed=1"), out, display=silent())
        return read(config, *given)

    monkeypatch.setattr(images, "load_source", slowly)
    with pytest.raises(ValueError, match=r"\bseed\b.* 1.* 2"):
        pretrain(tiny("train.steps=2", "seed=2"), out, display=silent())
    assert read_config(out).seed == 1


@pytest.mark.slow
def test_failed_start_releases_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(folder, "write_config", full)
        with pytest.raises(OSError, match="No space left") as caught:
            pretrain(tiny(), tmp_path / "a", display=silent())
    assert caught.traceback  # its frames keep the run alive, so garbage collection cannot close it
    assert pretrain(tiny(), tmp_path / "a", display=silent()).step == 2

"""A full disk gives a one-line error and leaves earlier files unchanged."""

import errno
import os
import shutil
from pathlib import Path

import pytest
from tiny import silent, sorted_photos, tiny
from typer.testing import CliRunner

from compressive.cli.app import app
from compressive.train.loop import pretrain


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with kNN results."""
    run = tmp_path_factory.mktemp("trained") / "run"
    pretrain(tiny(), run, display=silent())
    result = CliRunner().invoke(app, ["evaluate", str(run), "--tasks", "knn", "--device", "cpu"])
    assert result.exit_code == 0, result.output
    return run


def fill_disk(patch: pytest.MonkeyPatch, name: str) -> None:
    """Simulate a full disk for files with `name` in their path."""
    sync = os.fsync

    def full(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        if path.is_file() and name in str(path):
            assert path.stat().st_size > 0
            raise OSError(errno.ENOSPC, "No space left on device")
        sync(descriptor)

    patch.setattr(os, "fsync", full)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def check_one_line(words: list[str], written: Path | str) -> None:
    """Check that a command reports in one line what could not be written and what to do."""
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2, result.output
    start = f"error: could not write {written}"
    end = (
        ": No space left on device; free some space and run the same command again; "
        "an earlier file of that name is unchanged\n"
    )
    assert result.stderr.startswith(start)
    assert result.stderr.endswith(end)
    assert result.stderr.count("\n") == 1


@pytest.mark.slow
def test_evaluate_keeps_earlier_results(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = trained / "evaluation"
    shutil.rmtree(folder / "features")
    before = contents(trained)
    words = ["evaluate", str(trained), "--tasks", "logistic", "--device", "cpu"]
    for name in ("features", "values.safetensors", "results.json"):
        with monkeypatch.context() as patch:
            fill_disk(patch, name)
            check_one_line(words, folder / name)
        cached = set((folder / "features").glob("*.safetensors"))
        assert bool(cached) == (name != "features")
        after = contents(trained)
        assert {path: after[path] for path in after.keys() - cached} == before
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert (folder / "results.json").read_bytes() != before[folder / "results.json"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.npz", "a.parquet", "a.html"])
def test_embed_and_report_keep_the_earlier_file(
    name: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / name
    out.write_text("before")
    words = ["embed", str(trained), str(sorted_photos()), "--out", str(out), "--device", "cpu"]
    words = ["report", str(trained), "--out", str(out)] if out.suffix == ".html" else words
    with monkeypatch.context() as patch:
        fill_disk(patch, name)
        check_one_line(words, out)
    assert contents(tmp_path) == {out: b"before"}
    assert CliRunner().invoke(app, words).exit_code == 0
    assert out.read_bytes() != b"before"

"""Where an export may be written, and that a failed one leaves nothing behind."""

import json
from pathlib import Path

import pytest
from run_files import config_text

from compressive.exporting.destination import (
    check_destination,
    move_into_place,
    record_path,
    staged,
    write_record,
)


def put(out: Path, text: str = "weights") -> None:
    """Write an export: a folder with one file, or a file if the name has a suffix."""
    is_folder = not out.suffix
    with staged(out) as path:
        if is_folder:
            path.mkdir()
        (path / "model" if is_folder else path).write_text(text)
        write_record(path, {"format": "timm"}, is_folder=is_folder)
        move_into_place(path, out, is_folder=is_folder)


@pytest.mark.parametrize("name", ["folder", "file.onnx"])
def test_earlier_export_is_replaced(name: str, tmp_path: Path) -> None:
    out = tmp_path / name
    is_folder = not out.suffix
    for text in ("one", "two"):
        check_destination(out, is_folder=is_folder)
        put(out, text)
    assert (out / "model" if is_folder else out).read_text() == "two"
    record = record_path(out, is_folder=is_folder)
    assert json.loads(record.read_text())["format"] == "timm"
    assert {path.name for path in tmp_path.iterdir()} <= {out.name, record.name}


@pytest.mark.parametrize("name", ["folder", "file.onnx"])
def test_changed_export_is_not_replaced(name: str, tmp_path: Path) -> None:
    out = tmp_path / name
    put(out)
    inside = out if out.suffix else out / "model"
    inside.write_text("edited")
    with pytest.raises(ValueError, match=f"--out .*{inside.name} was changed"):
        check_destination(out, is_folder=not out.suffix)


def test_file_that_a_user_added_is_not_deleted(tmp_path: Path) -> None:
    put(tmp_path / "out")
    (tmp_path / "out" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"--out .*notes\.txt"):
        check_destination(tmp_path / "out", is_folder=True)


@pytest.mark.parametrize("name", ["folder", "file.onnx"])
def test_anything_else_is_not_replaced(name: str, tmp_path: Path) -> None:
    out = tmp_path / name
    if out.suffix:
        out.write_text("mine")
    else:
        out.mkdir()
    with pytest.raises(ValueError, match=r"--out .*not an earlier export"):
        check_destination(out, is_folder=not out.suffix)


@pytest.mark.parametrize("file", ["metrics.jsonl", "encoder.safetensors", "config.json"])
def test_run_folder_is_refused(file: str, tmp_path: Path) -> None:
    (tmp_path / file).write_text(config_text({"method": "simclr", "about": {}}))
    with pytest.raises(ValueError, match=f"--out {tmp_path} is the folder of a run"):
        check_destination(tmp_path, is_folder=True)


def test_folder_must_exist_and_be_writable(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--out .*no folder .*nowhere"):
        check_destination(tmp_path / "nowhere" / "x", is_folder=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file.*--out"):
        check_destination(tmp_path / "file" / "x", is_folder=True)


def test_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    def fail() -> None:
        with staged(tmp_path / "out") as path:
            path.write_text("half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert not list(tmp_path.iterdir())

"""Folders of `save_to_disk` are read as Hugging Face's library reads them."""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from input_formats import CLASSES, COUNTS, hugging_face, hugging_face_dict
from tiny import noise

from compressive.data.decode import Unreadable
from compressive.data.source import Source
from compressive.data.sources import open_source


@pytest.fixture(autouse=True)
def _no_progress_bars() -> None:
    datasets.disable_progress_bars()


def assert_equal(source: Source, truth: Any) -> None:
    """Compare with the images and labels that the library itself returns."""
    assert len(source) == len(truth)
    for i, row in enumerate(truth):
        expected = torch.from_numpy(np.array(row["image"].convert("RGB"))).permute(2, 0, 1)
        assert torch.equal(source.image(i), expected)
    assert source.labels is not None
    assert source.labels.tolist() == list(truth["label"])
    assert source.classes == tuple(truth.features["label"].names)


@pytest.mark.parametrize("shards", [1, 3])
def test_saved_dataset_is_read_as_the_library_reads_it(shards: int, tmp_path: Path) -> None:
    hugging_face("train").save_to_disk(tmp_path / "x", num_shards=shards)
    assert_equal(open_source(tmp_path / "x"), datasets.load_from_disk(str(tmp_path / "x")))


def test_selected_rows_are_saved_and_read_in_their_order(tmp_path: Path) -> None:
    chosen = hugging_face("train").shuffle(seed=1).select(range(3, 20))
    chosen.save_to_disk(tmp_path / "x")
    assert_equal(open_source(tmp_path / "x"), chosen)


def test_splits_are_those_of_the_dict(tmp_path: Path) -> None:
    whole = hugging_face_dict(tmp_path)
    whole.save_to_disk(tmp_path / "x")
    for split in COUNTS:
        assert_equal(open_source(tmp_path / "x", split), whole[split])
    with pytest.raises(ValueError, match=r"'val'; there are: test, train"):
        open_source(tmp_path / "x", "val")
    assert len(open_source(tmp_path / "x" / "test")) == 2 * len(CLASSES)  # one part by itself


def test_rows_are_memory_mapped(tmp_path: Path) -> None:
    """Opening allocates far less than the file has."""
    images = [noise(300, 300, seed=i) for i in range(20)]
    datasets.Dataset.from_dict({"image": images}).cast_column(
        "image", datasets.Image()
    ).save_to_disk(tmp_path / "x")
    size = sum(file.stat().st_size for file in (tmp_path / "x").glob("*.arrow"))
    before = pa.total_allocated_bytes()
    source = open_source(tmp_path / "x")
    assert size > 5e6
    assert pa.total_allocated_bytes() - before < size / 20
    assert source.image(19).shape == (3, 300, 300)


def test_threads_read_at_once(tmp_path: Path) -> None:
    hugging_face("train").save_to_disk(tmp_path / "x", num_shards=2)
    source = open_source(tmp_path / "x")
    order = [i % len(source) for i in range(200)]
    with ThreadPoolExecutor(8) as pool:
        found = [*pool.map(source.image, order)]
    assert all(torch.equal(found[k], source.image(i)) for k, i in enumerate(order))


def test_origin_is_the_file_and_its_row(tmp_path: Path) -> None:
    hugging_face("train").save_to_disk(tmp_path / "x", num_shards=2)
    source = open_source(tmp_path / "x")
    assert source.origin(16) == f"{tmp_path}/x/data-00001-of-00002.arrow:1"


def test_image_that_is_stored_as_a_path_is_read(tmp_path: Path) -> None:
    noise(8, 8, seed=3).save(tmp_path / "a.png")
    rows = [{"bytes": None, "path": str(tmp_path / "a.png")}, {"bytes": None, "path": None}]
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    table = pa.table({"image": pa.array(rows, kind)})
    with (
        pa.OSFile(str(tmp_path / "x.arrow"), "wb") as file,
        pa.ipc.new_file(file, table.schema) as writer,
    ):  # the file format, not the stream format
        writer.write_table(table)
    source = open_source(tmp_path / "x.arrow")
    assert torch.equal(
        source.image(0), torch.from_numpy(np.array(noise(8, 8, seed=3))).permute(2, 0, 1)
    )
    assert source.labels is None
    with pytest.raises(Unreadable, match="no image bytes"):
        source.image(1)


def broken(folder: Path, kind: str) -> None:
    """Damage a saved data set."""
    (file,) = folder.glob("*.arrow")
    state = json.loads((folder / "state.json").read_text())
    if kind == "missing rows":
        file.unlink()
    elif kind == "truncated rows":
        file.write_bytes(file.read_bytes()[:2000])
    elif kind == "no JSON":
        (folder / "state.json").write_text("{")
    elif kind == "no files":
        state["_data_files"] = []
    elif kind == "odd files":
        state["_data_files"] = [{"filename": 3}]
    elif kind == "old selection":
        state["_indices_data_files"] = [{"filename": "indices.arrow"}]
    if kind in ("no files", "odd files", "old selection"):
        (folder / "state.json").write_text(json.dumps(state))


DAMAGE = {
    "missing rows": "1 of 1 files of rows are missing",
    "truncated rows": "cannot read Arrow",
    "no JSON": "damaged",
    "no files": "lists no files",
    "odd files": "lists no files",
    "old selection": "flatten_indices",
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damaged_folder_is_one_line(kind: str, tmp_path: Path) -> None:
    hugging_face("train").save_to_disk(tmp_path / "x")
    broken(tmp_path / "x", kind)
    with pytest.raises((ValueError, FileNotFoundError)) as caught:
        open_source(tmp_path / "x")
    assert DAMAGE[kind] in str(caught.value)
    assert str(tmp_path / "x") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_incomplete_dict_is_one_line(tmp_path: Path) -> None:
    hugging_face_dict(tmp_path).save_to_disk(tmp_path / "x")
    shutil.rmtree(tmp_path / "x" / "test")
    with pytest.raises(FileNotFoundError, match=r"test is incomplete: state\.json is missing"):
        open_source(tmp_path / "x")


def test_folder_without_images_names_its_columns(tmp_path: Path) -> None:
    datasets.Dataset.from_dict({"text": ["a", "b"]}).save_to_disk(tmp_path / "x")
    with pytest.raises(ValueError, match=r"no column of image bytes; it has text"):
        open_source(tmp_path / "x")

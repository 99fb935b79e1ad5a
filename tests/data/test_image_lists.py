"""Lists of images: paths, labels and splits, and one line for each kind of bad list."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
from command_line import error_line
from pyarrow import parquet
from tiny import noise

from compressive.data.decode import decode
from compressive.data.sources import open_source


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with the images a.png to e.png in `files`, and one with a space."""
    (tmp_path / "files").mkdir()
    for i, name in enumerate(("a", "b", "c", "d", "e", "a 1")):
        noise(8, 8, seed=i).save(tmp_path / "files" / f"{name}.png")
    return tmp_path


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


def test_paths_are_relative_to_the_list_or_absolute(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "lists").mkdir()
    text = f"../files/b.png\n\n{folder}/files/a.png\r\n  ../files/a 1.png\n"
    path = written(folder / "lists" / "x.txt", f"\ufeff{text}")
    monkeypatch.chdir(folder / "lists")
    for place in (path, Path("x.txt")):
        source = open_source(place)
        names = [Path(source.origin(i)).name for i in range(len(source))]
        assert names == ["b.png", "a.png", "a 1.png"]  # in the order of the list
        assert source.labels is None
        data = (folder / "files" / "a.png").read_bytes()
        assert torch.equal(source.image(1), decode(data))


def opened(path: Path, split: str = "train") -> tuple[list[str], Any, Any]:
    source = open_source(path, split)
    labels = None if source.labels is None else source.labels.tolist()
    return [Path(source.origin(i)).stem for i in range(len(source))], labels, source.classes


def test_labels_and_splits_of_a_table(folder: Path) -> None:
    """Class ids are the same in every split, also of a class that only one split has."""
    rows = "files/a.png,dog,Train\nfiles/b.png,cat,train\nfiles/c.png,emu,TEST\n"
    path = written(folder / "x.csv", f"Path,label,split\n{rows}")
    assert opened(path) == (["a", "b"], [1, 0], ("cat", "dog", "emu"))
    assert opened(path, "test") == (["c"], [2], ("cat", "dog", "emu"))
    with pytest.raises(ValueError, match=r"'val'; there are: test, train"):
        open_source(path, "val")


def test_numbers_are_class_ids_and_gaps_have_no_label(folder: Path) -> None:
    text = "label,path,other\n10,files/a.png,x\n,files/b.png,y\n2,files/c.png,z\n-1,files/d.png,\n"
    with pytest.warns(UserWarning, match="2 of 4 images of split train have no label"):
        names, labels, classes = opened(written(folder / "x.csv", text))
    assert (names, labels) == (["a", "b", "c", "d"], [10, -1, 2, -1])
    assert classes == tuple(map(str, range(11)))


def test_quoted_cells_and_tabs_are_read(folder: Path) -> None:
    (folder / "files" / "x,y.png").write_bytes((folder / "files" / "a.png").read_bytes())
    text = 'path,label\n"files/x,y.png","a ""big"" dog"\nfiles/b.png,cat\n'
    assert opened(written(folder / "x.csv", text))[2] == ('a "big" dog', "cat")
    text = "path\tlabel\nfiles/a.png\tone, two\nfiles/b.png\tthree\n"
    assert opened(written(folder / "x.tsv", text))[2] == ("one, two", "three")


def test_parquet_list_has_typed_columns(folder: Path) -> None:
    columns = {"path": ["files/b.png", "files/a.png"], "label": [1, None], "more": [1.5, 2.5]}
    parquet.write_table(pa.table(columns), folder / "x.parquet")
    with pytest.warns(UserWarning, match="1 of 2"):
        assert opened(folder / "x.parquet") == (["b", "a"], [1, -1], ("0", "1"))


# What is in the list, its ending, and parts of the message.
BAD: dict[str, tuple[str, str, list[str]]] = {
    "missing file": (
        ".txt",
        "files/a.png\nfiles/gone.png\n\nfiles/lost.png\n",
        ["2 of 3 listed files do not exist", "line 2: files/gone.png", "relative to"],
    ),
    "folder": (".txt", "files\n", ["line 1: files", "it is a folder"]),
    "URL": (".txt", "https://example.org/a.png\n", ["URLs cannot be listed"]),
    "labels in a .txt": (".txt", "files/a.png 3\n", [".csv", "path and label"]),
    "empty list": (".txt", "\n\n", ["lists no images"]),
    "empty table": (".csv", "", ["no column path", "no columns"]),
    "only a head": (".csv", "path,label\n", ["lists no images"]),
    "no column": (".csv", "file,label\nfiles/a.png,x\n", ["no column path", "file, label"]),
    "column twice": (".csv", "path,path\nfiles/a.png,x\n", ["several columns path"]),
    "row too long": (".csv", "path,label\nfiles/a.png,x,y\n", ["line 2 has 3 cells"]),
    "no path": (".csv", "path,label\nfiles/a.png,x\n,y\n", ["line 3 has no path"]),
    "path twice": (
        ".csv",
        "path,label\nfiles/a.png,x\n\nfiles/../files/a.png,y\n",
        ["twice, in line 2 and line 4;"],
    ),
    "leak": (
        ".csv",
        "path,split\nfiles/a.png,train\nfiles/a.png,test\n",
        ["line 2 and line 3, in different splits"],
    ),
    "split missing": (
        ".csv",
        "path,split\nfiles/a.png,train\nfiles/b.png,\nfiles/c.png,\n",
        ["2 of 3 rows have no split", "line 3"],
    ),
    "unknown split": (
        ".csv",
        "path,split\nfiles/a.png,train\nfiles/b.png,fold1\n",
        ["line 3 has the split 'fold1'", "test", "train", "val"],
    ),
    "no train split": (".csv", "path,split\nfiles/a.png,test\n", ["no split 'train'", "test"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_list_is_one_line_before_training(name: str, folder: Path) -> None:
    ending, text, parts = BAD[name]
    path = written(folder / f"list{ending}", text)
    line = error_line(f"pretrain {path} --out {folder / 'run'}")
    for part in (str(path), *parts):
        assert part in line
    assert not (folder / "run").exists()


def test_list_in_another_encoding_is_one_line(folder: Path) -> None:
    (folder / "x.txt").write_bytes("files/ä.png".encode("latin-1"))
    assert "UTF-8" in error_line(f"pretrain {folder / 'x.txt'}")


def test_parquet_list_errors_name_the_row(folder: Path) -> None:
    parquet.write_table(pa.table({"path": ["files/a.png", None]}), folder / "x.parquet")
    assert "row 1 has no path" in error_line(f"pretrain {folder / 'x.parquet'}")
    parquet.write_table(pa.table({"file": ["files/a.png"]}), folder / "x.parquet")
    assert "no column of image bytes" in error_line(f"pretrain {folder / 'x.parquet'}")

"""Lists of image files: .txt with a path per line, .csv, .tsv or .parquet with a column `path`."""

import csv
import io
import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from compressive.data.decode import first_line
from compressive.data.source import (
    SPLITS,
    ImageSource,
    Source,
    choose_split,
    labeled,
    read_file,
)

LISTS = (".txt", ".csv", ".tsv")
_LIST_COLUMNS = ("path", "label", "split")


class _Entries(NamedTuple):
    paths: list[str]
    labels: list[Any] | None
    splits: list[str] | None
    where: list[str]  # line or row of each entry, for messages


def is_list(path: Path) -> bool:
    """Return whether a file is a list of images; parquet files with image bytes are not."""
    if path.suffix.lower() in LISTS:
        return path.is_file()
    if path.suffix.lower() != ".parquet" or not path.is_file():
        return False
    from pyarrow import ArrowException, parquet

    try:
        kinds = {f.name: str(f.type) for f in parquet.read_schema(path, memory_map=True)}
    except (ArrowException, OSError):
        return False  # `open_parquet` reports what is wrong
    return kinds.get("path", "") in ("string", "large_string") and not any(
        "binary" in kind for kind in kinds.values()
    )


def open_list(path: Path, split: str) -> Source:
    """Open the images of a split in a list; relative paths start at the folder of the list.

    Raise ValueError if a file is missing or named twice, or if only some rows have a split.
    """
    rows = _read_rows(path)
    if not rows.paths:
        raise ValueError(f"{path} lists no images")
    folder = path.absolute().parent
    files = [os.path.normpath(folder / os.path.expanduser(name)) for name in rows.paths]
    _check_unique(path, rows, files)
    splits = _checked_splits(path, rows)
    chosen = choose_split(split, set(splits), path)
    _check_exist(path, rows, files)
    index = [i for i, name in enumerate(splits) if name == chosen]
    labels = _as_ids(rows.labels) if rows.labels is not None else []
    known = labeled(labels) if labels else {}  # of all splits, so that class ids are the same
    if known:
        known["labels"] = known["labels"][index]
        if none := int((known["labels"] < 0).sum()):
            some = f"{none:,} of {len(index):,} images of split {chosen} have no label"
            warnings.warn(f"{path}: {some}", stacklevel=1)
    return ImageSource(
        name=path.resolve().name,
        count=len(index),
        read=lambda i: read_file(files[index[i]]),
        place=lambda i: files[index[i]],
        span=lambda i: (files[index[i]], 0, -1),
        root=str(path),
        **known,
    )


def _read_rows(path: Path) -> _Entries:
    kind = path.suffix.lower()
    if kind == ".parquet":
        return _read_parquet_list(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8: {error.reason}") from None
    if kind == ".txt":
        lines = {k: line.strip() for k, line in enumerate(text.split("\n"), 1) if line.strip()}
        return _Entries([*lines.values()], None, None, [f"line {k}" for k in lines])
    reader = csv.reader(io.StringIO(text, newline=""), delimiter="\t" if kind == ".tsv" else ",")
    try:
        filled = ((reader.line_num, row) for row in reader if row)
        table = dict(filled)
    except csv.Error as error:
        raise ValueError(f"{path} cannot be read as {kind}: {error}") from None
    head, *numbers = table or [0]
    names = [name.strip().lower() for name in table.get(head, [])]
    _require_path_column(path, names)
    for k in numbers:
        if len(table[k]) != len(names):
            cells = f"line {k} has {len(table[k])} cells, the first line {len(names)}"
            raise ValueError(f"{path}: {cells}; quote cells that contain a comma")
    found = {name: [table[k][c].strip() for k in numbers] for c, name in enumerate(names)}
    lines = [f"line {k}" for k in numbers]
    return _Entries(found["path"], found.get("label"), found.get("split"), lines)


def _read_parquet_list(path: Path) -> _Entries:
    from pyarrow import ArrowException, parquet

    try:
        names = parquet.read_schema(path, memory_map=True).names
        _require_path_column(path, names)
        wanted = [name for name in _LIST_COLUMNS if name in names]
        table = parquet.read_table(path, columns=wanted, memory_map=True)
    except (ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:  # of the disk, not of the content
            raise
        raise ValueError(f"{path}: cannot read parquet: {first_line(error)}") from None
    columns = {name: table[name].to_pylist() for name in wanted}
    splits = columns.get("split")
    texts = None if splits is None else ["" if s is None else str(s) for s in splits]
    paths = ["" if each is None else str(each) for each in columns["path"]]
    rows = [f"row {k}" for k in range(len(paths))]
    return _Entries(paths, columns.get("label"), texts, rows)


def _require_path_column(path: Path, columns: Sequence[str]) -> None:
    if "path" not in columns:
        raise ValueError(
            f"{path} has no column path; it has {', '.join(columns) or 'no columns'}; a list has "
            "the column path and may have label and split"
        )
    if twice := [name for name in _LIST_COLUMNS if list(columns).count(name) > 1]:
        raise ValueError(f"{path} has several columns {twice[0]}; keep one")


def _check_unique(path: Path, rows: _Entries, files: Sequence[str]) -> None:
    """Raise ValueError if a path is empty or listed twice."""
    seen: dict[str, int] = {}
    for i, file in enumerate(files):
        if not rows.paths[i]:
            raise ValueError(f"{path}: {rows.where[i]} has no path")
        if (before := seen.setdefault(file, i)) != i:
            places = f"{rows.where[before]} and {rows.where[i]}"
            is_leak = rows.splits is not None and rows.splits[before] != rows.splits[i]
            where = ", in different splits" if is_leak else ""
            raise ValueError(
                f"{path} lists {rows.paths[i]} twice, in {places}{where}; remove one of them"
            )


def _checked_splits(path: Path, rows: _Entries) -> list[str]:
    """Return the split of each row, in lower case; raise ValueError if some rows have none."""
    if rows.splits is None or not any(rows.splits):
        return ["train"] * len(rows.paths)
    if lost := [i for i, name in enumerate(rows.splits) if not name]:
        raise ValueError(
            f"{path}: {len(lost):,} of {len(rows.paths):,} rows have no split, first "
            f"{rows.where[lost[0]]}; fill the column split in all rows, or remove it"
        )
    names = [name.lower() for name in rows.splits]
    if unknown := sorted(set(names) - SPLITS):
        raise ValueError(
            f"{path}: {rows.where[names.index(unknown[0])]} has the split "
            f"{unknown[0]!r}; allowed are {', '.join(sorted(SPLITS))}"
        )
    return names


def _check_exist(path: Path, rows: _Entries, files: Sequence[str]) -> None:
    """Raise an error that counts the missing files and names the first."""
    # In threads, because a stat on a network disk takes a fraction of a millisecond.
    blocks = range(0, len(files), 1000)
    with ThreadPoolExecutor(32) as pool:
        parts = pool.map(lambda k: [*map(os.path.isfile, files[k : k + 1000])], blocks)
        lost = [i for i, is_there in enumerate(f for part in parts for f in part) if not is_there]
    if not lost:
        return
    name = rows.paths[lost[0]]
    hint = f"paths are relative to {path.absolute().parent}"
    if "://" in name:
        hint = "URLs cannot be listed; download the images"
    elif os.path.isdir(files[lost[0]]):
        hint = "it is a folder; list files, or give the folder itself instead of a list"
    elif path.suffix.lower() == ".txt" and os.path.isfile(files[lost[0]].rpartition(" ")[0]):
        hint = "for labels, use a .csv file with the columns path and label"
    raise FileNotFoundError(
        f"{path}: {len(lost):,} of {len(files):,} listed files do not exist, first "
        f"{rows.where[lost[0]]}: {name}; {hint}"
    )


def _as_ids(values: Sequence[Any]) -> list[Any]:
    """Return labels with None for empty cells; text that is a whole number is a class id."""
    filled = [None if value is None or value == "" else value for value in values]
    texts = [value for value in filled if value is not None]
    if all(isinstance(v, str) and v.removeprefix("-").isdecimal() for v in texts):
        return [None if value is None else int(value) for value in filled]
    return filled

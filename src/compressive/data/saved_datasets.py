"""Folders written by `save_to_disk` of Hugging Face's datasets, and other Arrow files."""

import json
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from compressive.data.decode import Unreadable, first_line
from compressive.data.shards import class_names, image_column, label_column
from compressive.data.source import ImageSource, Source, labeled, read_file

_DICT_FILE, _STATE_FILE, _INFO_FILE = "dataset_dict.json", "state.json", "dataset_info.json"


def saved_splits(path: Path) -> dict[str, list[Path]]:
    """Return the Arrow files of each split in a folder of `save_to_disk`; {} for other folders."""
    if (path / _DICT_FILE).is_file():
        names = _texts(_json_object(path / _DICT_FILE).get("splits"))
        if not names:
            raise ValueError(f"{path / _DICT_FILE} is damaged: it has no list of splits")
        return {name: _arrow_files(path / name) for name in names}
    if (path / _STATE_FILE).is_file() and (path / _INFO_FILE).is_file():
        own = _json_object(path / _STATE_FILE).get("_split")
        # A single set is also the train split, whatever its name.
        return {name: _arrow_files(path) for name in ("train", own) if isinstance(name, str)}
    return {}


def open_arrow(path: Path, files: Sequence[Path]) -> Source:
    """Open Arrow files as one source, memory-mapped; `path` is what the user named."""
    from pyarrow import ArrowException

    try:
        tables = [_mapped(file) for file in files]
        schema = tables[0].schema
        image, label = image_column(schema, path).partition(".")[0], label_column(schema)
        used = {image, *filter(None, [label])}
        for file, table in zip(files, tables, strict=True):
            if lost := used.difference(table.schema.names):
                raise ValueError(f"{file} has no column {min(lost)!r}, unlike {files[0].name}")
            for name in used:  # offsets of a damaged file would crash the process; no image is read
                table[name].validate(full=True)
        values = [v for table in tables if label for v in table[label].to_pylist()]
    except (ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:  # of the disk, not of the content
            raise
        raise ValueError(f"{path}: cannot read Arrow files: {first_line(error)}") from None
    rows = _ArrowRows(files, [table[image] for table in tables])
    names = class_names(schema, label) or _names_in_info(files[0].parent, label)
    return ImageSource(
        name=path.resolve().name,
        count=rows.starts[-1],
        read=rows.cell,
        place=rows.place,
        root=str(path),
        **labeled(values, names),
    )


class _ArrowRows:
    """Cells of the image column; batches of rows stay on disk until they are read."""

    def __init__(self, files: Sequence[Path], columns: Sequence[Any]) -> None:
        self.files: Sequence[Path] = files
        pairs = [(k, chunk) for k, column in enumerate(columns) for chunk in column.chunks]
        self.owners: list[int] = [k for k, _ in pairs]
        self.chunks: list[Any] = [chunk for _, chunk in pairs]
        self.starts: list[int] = [0, *accumulate(map(len, self.chunks))]
        self.first: list[int] = [0, *accumulate(map(len, columns))]  # row of each file

    def place(self, i: int) -> str:
        """Return FILE:ROW of row i, with the row within its file."""
        k = self.owners[self._chunk(i)]
        return f"{self.files[k]}:{i - self.first[k]}"

    def cell(self, i: int) -> bytes:
        """Return the encoded image of row i."""
        chunk = self._chunk(i)
        return encoded_cell(self.chunks[chunk][i - self.starts[chunk]].as_py())

    def _chunk(self, i: int) -> int:
        return bisect_right(self.starts, i) - 1


def encoded_cell(value: Any) -> bytes:
    """Return the encoded image of a cell: bytes, or the bytes or path of Hugging Face's struct."""
    if isinstance(value, dict):
        data, path = value.get("bytes"), value.get("path")
        if data is None and path:
            return read_file(path)
        value = data
    if value is None:
        raise Unreadable("the row holds no image bytes")
    return value


def _mapped(file: Path) -> Any:
    """Return a file in the stream or file format of Arrow IPC as a table, without reading rows."""
    import pyarrow as pa

    source = pa.memory_map(str(file))
    is_file_format = source.read(6) == b"ARROW1"
    source.seek(0)
    return (pa.ipc.open_file if is_file_format else pa.ipc.open_stream)(source).read_all()


def _arrow_files(folder: Path) -> list[Path]:
    """Return the Arrow files that state.json lists."""
    state = _json_object(folder / _STATE_FILE)
    if state.get("_indices_data_files"):
        hint = "load it and call flatten_indices() before save_to_disk"
        raise ValueError(f"{folder} is a selection of rows of an old version; {hint}")
    listed = state.get("_data_files")
    entries = listed if isinstance(listed, list) else []
    names = _texts([e.get("filename") if isinstance(e, dict) else None for e in entries])
    if not names:
        raise ValueError(f"{folder / _STATE_FILE} is damaged or lists no files of rows")
    found = [folder / Path(name).name for name in names]  # a name, never a path elsewhere
    if lost := [file for file in found if not file.is_file()]:
        many = f"{len(lost)} of {len(found)} files of rows are missing, such as {lost[0].name}"
        raise FileNotFoundError(f"{folder} is incomplete: {many}; copy or save it again")
    return found


def _names_in_info(folder: Path, label: str | None) -> list[str] | None:
    """Return the class names in dataset_info.json, or None."""
    if label is None or not (folder / _INFO_FILE).is_file():
        return None
    features = _json_object(folder / _INFO_FILE).get("features")
    feature = features.get(label) if isinstance(features, dict) else None
    return _texts(feature.get("names")) if isinstance(feature, dict) else None


def _texts(values: Any) -> list[str] | None:
    """Return a list of texts, or None for anything else."""
    is_valid = isinstance(values, list) and all(isinstance(value, str) for value in values)
    return values if is_valid else None


def _json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; raise ValueError with its name if it is damaged."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise FileNotFoundError(f"{path.parent} is incomplete: {path.name} is missing") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path} is damaged: it holds no JSON object")
    return found

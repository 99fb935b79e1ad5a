"""Sources of images in shards: parquet as written by Hugging Face, tar as written by WebDataset."""

import io
import json
import os
import re
import tarfile
import threading
import warnings
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from compressive.data.decode import EXTENSIONS, Unreadable, first_line
from compressive.data.source import ImageSource, Source, labeled
from compressive.distributed import launched
from compressive.platforms.files import read_at
from compressive.platforms.memory import total_host_memory

_LARGE = 16  # a row group is large if it needs more than 1/16 of the cache
_BATCH = 2**28  # bytes decompressed at once; Arrow cannot read nested columns of 2 GiB
_LABELS = ("label", "labels", "fine_label", "cls", "class", "target")


def open_parquet(path: Path, files: list[Path]) -> Source:
    """Open parquet files as one source; `path` is the file or folder that the user named."""
    from pyarrow import ArrowException, parquet

    values = []
    try:
        metadata = [parquet.read_metadata(file, memory_map=True) for file in files]
        schema = parquet.read_schema(files[0], memory_map=True)
        label, image = _label_column(schema), _image_column(schema, path)
        for file in files:
            columns = parquet.read_schema(file, memory_map=True).names
            needed = {name.partition(".")[0] for name in (image, label) if name}
            if lost := needed.difference(columns):
                lacks = f"has no column {min(lost)!r}, unlike {files[0].name}"
                raise ValueError(f"{file} {lacks}: its columns are {', '.join(columns)}")
        for file in files if label else []:
            values += parquet.read_table(file, columns=[label], memory_map=True)[0].to_pylist()
    except ArrowException as error:
        raise ValueError(f"{path}: cannot read parquet: {first_line(error)}") from error
    for file, about in zip(files, metadata, strict=True):
        counts = [about.row_group(g).num_rows for g in range(about.num_row_groups)]
        size = file.stat().st_size  # each row takes at least one byte
        if min(counts, default=0) < 0 or not 0 <= sum(counts) <= size:
            raise ValueError(f"{file} is damaged: {sum(counts):,} rows in a file of {size:,} bytes")
    rows = _RowGroups(files, metadata, image)
    if label and len(values) != rows.starts[-1]:
        numbers = f"{len(values):,} labels for {rows.starts[-1]:,} rows"
        raise ValueError(f"{path}: cannot read parquet: it has {numbers}")
    return ImageSource(
        name=path.resolve().name,
        count=rows.starts[-1],
        read=rows.cell,
        place=rows.place,
        root=str(path),
        **labeled(values, _class_names(schema, label)),
    )


def _class_names(schema: Any, label: str | None) -> list[str] | None:
    """Return the class names in Hugging Face's schema metadata, or None if absent or invalid."""
    try:
        about = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        names = about.get("info", {}).get("features", {}).get(label, {}).get("names")
    except (ValueError, AttributeError, RecursionError):
        return None
    is_valid = isinstance(names, list) and all(isinstance(name, str) for name in names)
    return names if is_valid else None


class _RowGroups:
    """Cells of a column of parquet files, read by row group and cached while they fit."""

    # Parquet has no random access to rows, only to row groups (100 to 1,000 images), which are
    # compressed as a whole. The cache uses up to a quarter of the machine's memory, so that each
    # group is read only once if possible.

    def __init__(self, files: Sequence[Path], metadata: Sequence[Any], column: str) -> None:
        self.files, self.metadata, self.column = files, metadata, column
        self.groups = [(k, g) for k, m in enumerate(metadata) for g in range(m.num_row_groups)]
        sizes = [metadata[k].row_group(g) for k, g in self.groups]
        self.starts = [0, *accumulate(size.num_rows for size in sizes)]
        memory = total_host_memory() // 4
        self.room = memory // max(1, launched("LOCAL_WORLD_SIZE", 1))
        self.kept: dict[int, Any] = {}
        self.door = threading.Lock()
        large = threading.Lock()  # shared: one large group is read at a time
        limit = self.room // _LARGE
        self.busy = [large if s.total_byte_size > limit else threading.Lock() for s in sizes]
        total = sum(size.total_byte_size for size in sizes)
        if total > self.room:
            warnings.warn(
                f"{files[0].parent} has {total / 2**30:.3g} GiB uncompressed, more than the "
                f"{self.room / 2**30:.3g} GiB of the cache: most images will need a read of a "
                "whole row group; use image files or tar shards, which are faster",
                stacklevel=4,
            )

    def place(self, i: int) -> str:
        """Return FILE:ROW of row i, with the row within its file."""
        k, g = self.groups[group := self._group(i)]
        return f"{self.files[k]}:{i - self.starts[group - g]}"

    def cell(self, i: int) -> bytes:
        """Return the bytes of row i."""
        group = self._group(i)
        found = self.kept.get(group)
        if found is None:
            with self.busy[group]:  # other threads wait while one reads this group
                found = self.kept.get(group)
                found = self._unpacked(group) if found is None else found
        row = i - self.starts[group]
        if row >= len(found):
            raise Unreadable("its row group has fewer rows than the metadata of the file")
        value = found[row].as_py()
        value = value["bytes"] if isinstance(value, dict) else value
        if value is None:
            raise Unreadable("the row holds no image bytes")
        return value

    def _group(self, i: int) -> int:
        return bisect_right(self.starts, i) - 1

    def _unpacked(self, group: int) -> Any:
        from pyarrow import ArrowException, ArrowMemoryError, chunked_array, parquet

        k, g = self.groups[group]
        file, metadata = self.files[k], self.metadata[k]
        size = metadata.row_group(g)
        rows = max(1, size.num_rows * _BATCH // max(1, size.total_byte_size))
        options = {"row_groups": [g], "columns": [self.column], "use_threads": False}
        try:
            # One reader per call: Arrow does not guarantee that threads may share one.
            with parquet.ParquetFile(file, memory_map=True, metadata=metadata) as reader:
                batches = reader.iter_batches(batch_size=rows, **options)
                found = chunked_array([batch.column(0) for batch in batches])
        except ArrowMemoryError:  # does not depend on the image
            whole = (
                f"row group {g} of {file}, {size.total_byte_size / 2**20:,.0f} MiB, is read whole"
            )
            hint = "write smaller row groups, or use image files or tar shards"
            raise ValueError(f"{whole} and does not fit into memory; {hint}") from None
        except ArrowException as error:
            raise Unreadable(first_line(error)) from error
        with self.door:
            self.kept[group] = found
            used = sum(column.nbytes for column in self.kept.values())
            while used > self.room:
                used -= self.kept.pop(next(iter(self.kept))).nbytes
        return found


def _image_column(schema: Any, path: Path) -> str:
    """Return the column of encoded images: `image.bytes` as in Hugging Face, or plain bytes."""
    leaves = {}
    for field in schema:
        kind = str(field.type)
        if kind in ("binary", "large_binary"):
            leaves[field.name] = field.name
        elif re.match(r"struct<.*\bbytes: (large_)?binary", kind):
            leaves[field.name] = f"{field.name}.bytes"
    for name in ("image", "img", *leaves):
        if name in leaves:
            return leaves[name]
    raise ValueError(f"{path} has no column of image bytes; it has {', '.join(schema.names)}")


def _label_column(schema: Any) -> str | None:
    """Return the column with one class per row, or None."""
    kinds = {field.name: str(field.type) for field in schema}
    allowed = re.compile(r"u?int|bool|(large_)?string")
    return next((name for name in _LABELS if allowed.match(kinds.get(name, ""))), None)


def open_tar(path: Path, files: list[Path]) -> Source:
    """Open tar files as one source; `path` is the file or folder that the user named."""
    shard, names, spans, values = [], [], [], []
    for k, file in enumerate(files):
        try:
            with open(file, "rb", buffering=0) as tar:
                for image, label in _samples(tar):
                    shard.append(k)
                    names.append(image.name)
                    spans.append((image.offset, image.size))
                    values.append(label)
        except (ValueError, RecursionError, tarfile.TarError) as error:
            raise ValueError(f"{file} cannot be read as a WebDataset tar: {error}") from error
    where = np.array(spans)

    def read(i: int) -> bytes:
        # Open per read: a set may have more shards than a process may have open files.
        with open(files[shard[i]], "rb", buffering=0) as tar:
            return read_at(tar.fileno(), int(where[i, 1]), int(where[i, 0]))

    return ImageSource(
        name=path.resolve().name,
        count=len(names),
        read=read,
        place=lambda i: f"{files[shard[i]]}:{names[i]}",
        root=str(path),
        **labeled(values),
    )


class _Member(NamedTuple):
    name: str
    offset: int
    size: int


def _members(tar: io.FileIO) -> list[_Member]:
    """List the files in a tar by its headers; use tarfile if a header is not plain."""
    # tarfile takes 39 us per file and this 3 us: ImageNet's 2.6 million take 8 s instead of 100 s.
    end, at, found = os.fstat(tar.fileno()).st_size, 0, []
    while at < end:
        head = read_at(tar.fileno(), 512, at)
        if head[:1] == b"\0":
            break
        kind, digits, start = head[156:157], head[124:136].rstrip(b"\0 "), at + 512
        plain = head[257:262] == b"ustar" and kind in (b"0", b"\0", b"5", b"x")
        if not plain or not digits.isdigit():
            return _members_by_tarfile(tar)
        size = int(digits, 8)
        if start + size > end:
            raise ValueError("it is truncated in the middle of a file")
        if kind == b"x" and re.search(rb" (path|size)=", read_at(tar.fileno(), size, start)):
            return _members_by_tarfile(tar)
        if kind in (b"0", b"\0"):
            parts = (part.split(b"\0")[0] for part in (head[345:500], head[:100]))
            name = b"/".join(part for part in parts if part)
            found.append(_Member(os.fsdecode(name), start, size))
        at = start + -(-size // 512) * 512
    return found


def _members_by_tarfile(tar: io.FileIO) -> list[_Member]:
    tar.seek(0)
    with tarfile.open(fileobj=tar, mode="r:") as archive:
        return [_Member(m.name, m.offset_data, m.size) for m in archive if m.isfile()]


def _samples(tar: io.FileIO) -> list[tuple[_Member, int | str | None]]:
    """Return images and labels of a tar; files with the same name up to its first dot are one."""
    groups: dict[str, dict[str, _Member]] = {}
    for member in _members(tar):
        if match := re.match(r"((?:.*/)?[^./][^./]*)\.([^/]*)$", member.name):
            groups.setdefault(match[1], {})[match[2].lower()] = member
    samples = []
    for parts in groups.values():
        if kinds := [kind for kind in parts if f".{kind.rpartition('.')[2]}" in EXTENSIONS]:
            label = None
            for about in filter(None, (parts.get("json"), parts.get("cls"))):
                label = _label_in(read_at(tar.fileno(), about.size, about.offset).decode())
            samples.append((parts[kinds[0]], label))
    return samples


def _label_in(text: str) -> int | str | None:
    """Return the class in `key.cls` (a number or a name) or in an entry of `key.json`."""
    if not text.lstrip().startswith("{"):
        return int(text) if text.strip().lstrip("-").isdigit() else text.strip()
    entries = json.loads(text)
    return next((entries[name] for name in _LABELS if name in entries), None)

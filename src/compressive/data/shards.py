"""Sources of images in shards: parquet as written by Hugging Face, tar as written by WebDataset."""

import json
import re
import threading
import warnings
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from compressive.data.decode import Unreadable, first_line
from compressive.data.shard_file import (
    LABEL_NAMES,
    ShardFile,
    file_size,
    name_and_root,
    parquet_input,
)
from compressive.data.source import ImageSource, Source, labeled
from compressive.data.tar_shards import open_tar
from compressive.distributed import launched
from compressive.platforms.memory import total_host_memory
from compressive.storage.remote_file import RemoteFile

__all__ = ["open_parquet", "open_tar"]

_LARGE = 16  # a row group is large if it needs more than 1/16 of the cache
_BATCH = 2**28  # bytes decompressed at once; Arrow cannot read nested columns of 2 GiB


def open_parquet(path: Path | str, files: Sequence[ShardFile]) -> Source:
    """Open parquet files as one source; `path` is the file or folder that the user named."""
    from pyarrow import ArrowException, parquet

    values = []
    try:
        schemas, metadata = zip(*_heads(files), strict=True)
        schema = schemas[0]
        label, image = label_column(schema), image_column(schema, path)
        for file, columns in zip(files, (each.names for each in schemas), strict=True):
            needed = {name.partition(".")[0] for name in (image, label) if name}
            if lost := needed.difference(columns):
                lacks = f"has no column {min(lost)!r}, unlike {files[0].name}"
                raise ValueError(f"{file} {lacks}: its columns are {', '.join(columns)}")
        for file in files if label else []:
            table = parquet.read_table(parquet_input(file), columns=[label], memory_map=True)
            values += table[0].to_pylist()
    except (ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno:  # of the disk, not of the content
            raise
        raise ValueError(f"{path}: cannot read parquet: {first_line(error)}") from error
    for file, about in zip(files, metadata, strict=True):
        counts = [about.row_group(g).num_rows for g in range(about.num_row_groups)]
        size = file_size(file)  # each row takes at least one byte
        if min(counts, default=0) < 0 or not 0 <= sum(counts) <= size:
            raise ValueError(f"{file} is damaged: {sum(counts):,} rows in a file of {size:,} bytes")
    rows = _RowGroups(files, metadata, image)
    if label and len(values) != rows.starts[-1]:
        numbers = f"{len(values):,} labels for {rows.starts[-1]:,} rows"
        raise ValueError(f"{path}: cannot read parquet: it has {numbers}")
    return ImageSource(
        count=rows.starts[-1],
        read=rows.cell,
        place=rows.place,
        ahead=rows.fetch_ahead if isinstance(files[0], RemoteFile) else None,
        **name_and_root(path),
        **labeled(values, class_names(schema, label)),
    )


def _heads(files: Sequence[ShardFile]) -> Iterator[tuple[Any, Any]]:
    """Yield schema and metadata of parquet files."""
    from pyarrow import parquet

    for file in files:  # the metadata is at the end
        if isinstance(file, RemoteFile):
            file.prefetch(max(0, file.size - 1), 1)
    for file in files:
        with parquet.ParquetFile(parquet_input(file), memory_map=True) as reader:
            yield reader.schema_arrow, reader.metadata


def class_names(schema: Any, label: str | None) -> list[str] | None:
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

    def __init__(self, files: Sequence[ShardFile], metadata: Sequence[Any], column: str) -> None:
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
            folder = str(files[0]).rpartition("/")[0]
            warnings.warn(
                f"{folder} has {total / 2**30:.3g} GiB uncompressed, more than the "
                f"{self.room / 2**30:.3g} GiB of the cache: most images will need a read "
                "of a whole row group; use image files or tar shards, which are faster",
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

    def fetch_ahead(self, indices: Sequence[int]) -> None:
        """Start to fetch the row groups of these rows into the cache on disk."""
        for group in dict.fromkeys(map(self._group, indices)):
            k, g = self.groups[group]
            if group not in self.kept and isinstance(file := self.files[k], RemoteFile):
                about = self.metadata[k].row_group(g)
                for column in map(about.column, range(about.num_columns)):
                    if column.path_in_schema == self.column:
                        start = column.dictionary_page_offset or column.data_page_offset
                        file.prefetch(start, column.total_compressed_size)

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
            with parquet.ParquetFile(
                parquet_input(file), memory_map=True, metadata=metadata, pre_buffer=False
            ) as reader:
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


def image_column(schema: Any, path: Path | str) -> str:
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


def label_column(schema: Any) -> str | None:
    """Return the column with one class per row, or None."""
    kinds = {field.name: str(field.type) for field in schema}
    allowed = re.compile(r"u?int|bool|(large_)?string")
    return next((name for name in LABEL_NAMES if allowed.match(kinds.get(name, ""))), None)

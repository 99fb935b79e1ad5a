"""Write shards of encoded images: tar as WebDataset reads it, parquet as Hugging Face reads it."""

import io
import json
import os
import re
import tarfile
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

_ROWS = 100  # per row group, as in Hugging Face's image sets; a reader decompresses whole groups


class PackedImage(NamedTuple):
    """An encoded image, its place in the split, its name, its kind and its class."""

    index: int
    name: str
    kind: str  # extension without a dot
    content: bytes
    label: int  # -1: none


class TarWriter:
    """Write one tar file; equal images give equal bytes."""

    def __init__(self, path: Path, classes: tuple[str, ...] | None) -> None:
        self._tar = tarfile.open(path, "w", format=tarfile.USTAR_FORMAT)  # noqa: SIM115

    def add(self, image: PackedImage) -> None:
        """Write an image and its class as KEY.EXTENSION and KEY.cls."""
        stem = re.sub(r"[^A-Za-z0-9_-]+", "_", os.path.splitext(image.name)[0])[-60:]
        key = f"{image.index:08d}-{stem}"
        self._write(f"{key}.{image.kind}", image.content)
        if image.label >= 0:
            self._write(f"{key}.cls", str(image.label).encode())

    def _write(self, name: str, content: bytes) -> None:
        member = tarfile.TarInfo(name)  # time, user and group are 0
        member.size = len(content)
        self._tar.addfile(member, io.BytesIO(content))

    def __enter__(self) -> "TarWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with suppress(*([Exception] if kind else [])):  # keep the first error
            self._tar.close()


class ParquetWriter:
    """Write one parquet file with Hugging Face's features of images and classes."""

    def __init__(self, path: Path, classes: tuple[str, ...] | None) -> None:
        import pyarrow as pa
        from pyarrow import parquet

        features: dict[str, Any] = {"image": {"_type": "Image"}}
        cell = pa.struct({"bytes": pa.binary(), "path": pa.string()})
        fields = [pa.field("image", cell)]
        if classes is not None:
            features["label"] = {"names": list(classes), "_type": "ClassLabel"}
            fields.append(pa.field("label", pa.int64()))
        about = json.dumps({"info": {"features": features}})
        self._schema = pa.schema(fields, metadata={"huggingface": about})
        self._writer = parquet.ParquetWriter(path, self._schema)
        self._rows: list[PackedImage] = []

    def add(self, image: PackedImage) -> None:
        """Add a row."""
        self._rows.append(image)
        if len(self._rows) == _ROWS:
            self._flush()

    def _flush(self) -> None:
        import pyarrow as pa

        columns: dict[str, list[Any]] = {
            "image": [{"bytes": each.content, "path": each.name} for each in self._rows]
        }
        if "label" in self._schema.names:
            columns["label"] = [each.label for each in self._rows]
        if self._rows:
            self._writer.write_table(pa.table(columns, schema=self._schema))
        self._rows = []

    def __enter__(self) -> "ParquetWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self._flush()
            self._writer.close()
        else:
            with suppress(Exception):  # the file is deleted, and the first error is reported
                self._writer.close()


ShardWriter = TarWriter | ParquetWriter
WRITERS: dict[str, type[TarWriter] | type[ParquetWriter]] = {
    "tar": TarWriter,
    "parquet": ParquetWriter,
}

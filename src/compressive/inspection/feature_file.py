"""Read features that `embed` wrote: parquet, npz or csv."""

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from compressive.evaluation.embed import FINGERPRINT, FORMATS, METADATA_KEY


class FeatureFile(NamedTuple):
    """Features of images, their names, and their classes if they have any."""

    features: NDArray[np.float32]
    image: list[str]
    label: Sequence[str | None]
    fingerprint: str | None  # of the encoder; None: unknown


def is_feature_file(place: str) -> bool:
    """Return whether this is a file of features, and not a shard of images."""
    path = Path(place).expanduser()
    if not path.is_file() or path.suffix.lower() not in FORMATS:
        return False
    if path.suffix.lower() == ".parquet":
        from pyarrow import ArrowException, parquet

        try:
            return {"image", "features"} <= set(parquet.read_schema(path).names)
        except (ArrowException, OSError):
            return False
    if path.suffix.lower() == ".csv":
        with path.open(newline="", errors="replace") as file:
            return "feature_0" in next(csv.reader(file), [])
    return True


def read_features(place: str | Path) -> FeatureFile:
    """Return the content of a file of features; raise ValueError if it is not one."""
    path = Path(place).expanduser()
    read = {".parquet": _read_table, ".npz": _read_npz, ".csv": _read_csv}[path.suffix.lower()]
    try:
        found = read(path)
    except Exception as error:  # each format raises its own types
        why = str(error).split("\n")[0] or type(error).__name__
        raise ValueError(f"{path} is not a features file of embed: {why}") from None
    if found.features.ndim != 2 or len(found.features) != len(found.image):
        raise ValueError(f"{path} is not a features file of embed: it has no vector per image")
    return found


def _read_table(path: Path) -> FeatureFile:
    from pyarrow import parquet

    table = parquet.read_table(path)
    vectors = table["features"].combine_chunks()
    width = vectors.type.list_size
    features = vectors.flatten().to_numpy().reshape(-1, width)
    label = table["class"].to_pylist() if "class" in table.column_names else [None] * len(table)
    stored = (table.schema.metadata or {}).get(METADATA_KEY.encode())
    return FeatureFile(features, table["image"].to_pylist(), label, _fingerprint(stored))


def _read_npz(path: Path) -> FeatureFile:
    with np.load(path, allow_pickle=False) as file:
        image, label = file["image"].tolist(), [None] * len(file["image"])
        if "label" in file and "classes" in file:
            names = file["classes"].tolist()
            label = [names[k] if k >= 0 else None for k in file["label"].tolist()]
        stored = str(file[METADATA_KEY]) if METADATA_KEY in file else None
        return FeatureFile(file["features"], image, label, _fingerprint(stored))


def _read_csv(path: Path) -> FeatureFile:
    with path.open(newline="") as file:
        rows = csv.reader(file)
        head = next(rows)
        first, has_class = head.index("feature_0"), "class" in head[: head.index("feature_0")]
        image, label, vectors = [], list[str | None](), []
        for row in rows:
            image.append(row[head.index("image")])
            label.append((row[head.index("class")] or None) if has_class else None)
            vectors.append(np.array(row[first:], np.float32))
    return FeatureFile(np.stack(vectors), image, label, None)


def _fingerprint(stored: Any) -> str | None:
    return None if stored is None else json.loads(stored).get(FINGERPRINT)

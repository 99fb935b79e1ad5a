"""The table of an inspection: one row per image, as parquet or csv."""

import csv
import io
import math
from typing import Any

from compressive.evaluation.embed import as_text
from compressive.inspection.findings import Findings

INSPECTION_FORMATS = (".parquet", ".csv")


def inspection_columns(found: Findings) -> dict[str, list[Any]]:
    """Return the columns; None means no value."""
    scan, copies = found.scan, found.duplicates
    places = range(len(scan))
    columns: dict[str, list[Any]] = {
        "image": [as_text(scan.origin(i)) for i in places],
        "split": [scan.splits[k].name for k in scan.split],
        "width": _numbers(scan.width, missing=0),
        "height": _numbers(scan.height, missing=0),
        "format": [kind or None for kind in scan.kind],
        "bytes": _numbers(scan.size, missing=0),
        "unreadable": [scan.reasons.get(i) for i in places],
        "exact_group": _numbers(copies.exact, missing=-1),
        "near_group": _numbers(copies.near, missing=-1),
        "similarity": _numbers(copies.similarity, missing=0),
        "leak": found.is_leak.tolist(),
    }
    if found.outlier_score is not None and found.cluster is not None:
        columns["outlier_score"] = _numbers(found.outlier_score)
        columns["cluster"] = _numbers(found.cluster, missing=-1)
    if scan.classes:
        columns["class"] = [as_text(name) if (name := scan.class_name(i)) else None for i in places]
    if found.labels is not None:
        suggested = found.labels.suggested
        names = [as_text(scan.classes[k]) if k >= 0 else None for k in suggested]
        columns["likely_label_error"] = found.labels.is_error.tolist()
        columns["suggested_class"] = names
        columns["label_support"] = _numbers(found.labels.support)
    return columns


def table_bytes(columns: dict[str, list[Any]], suffix: str) -> bytes:
    """Return a table as the content of a parquet or csv file."""
    if suffix == ".parquet":
        import pyarrow as pa
        from pyarrow import parquet

        binary = io.BytesIO()
        parquet.write_table(pa.table(columns), binary)
        return binary.getvalue()
    text = io.StringIO(newline="")
    lines = csv.writer(text)
    lines.writerow(columns)
    for row in zip(*columns.values(), strict=True):
        lines.writerow(f"{cell:.6g}" if isinstance(cell, float) else cell for cell in row)
    return text.getvalue().encode()


def _numbers(values: Any, missing: float | None = None) -> list[Any]:
    """Return Python numbers; None for the missing value and for NaN."""
    return [
        None if value == missing or (isinstance(value, float) and math.isnan(value)) else value
        for value in values.tolist()
    ]

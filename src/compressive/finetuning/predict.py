"""Predict the classes of images and write them to a table."""

import csv
import io
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from compressive.classifier import Classifier, load_classifier
from compressive.config import Data
from compressive.data.location import ImageData
from compressive.data.several import count_table
from compressive.data.source import Source
from compressive.data.sources import open_source
from compressive.device import pick_device, precision
from compressive.evaluation.embed import as_text, check_table_path
from compressive.finetuning.classify import Classified, classify
from compressive.platforms.float64 import to_float64
from compressive.progress import Display
from compressive.rundir.files import write_bytes

TABLE_FORMATS = (".parquet", ".csv")
_MOST_CLASSES = 5  # most probable classes of each image
Columns = dict[str, list[str] | list[float] | list[str | None]]


class Predicted(NamedTuple):
    """The table that was written."""

    path: Path
    count: int
    unreadable: list[tuple[str, str]]  # origin, reason
    accuracy: float | None  # None if no image has a label, or its class is unknown
    labeled: int  # images that have a label
    unknown: tuple[str, ...]  # classes of the images that the classifier does not have


def predict(
    classifier: str | Path,
    images: ImageData,
    out: str | Path = "predictions.parquet",
    *,
    split: str = "train",
    device: str = "auto",
    display: Display | None = None,
) -> Predicted:
    """Write the predicted class of each image of a split, its probability, and the next four.

    The arguments are those of `compressive predict`. The ending of `out` chooses the format.
    Unreadable images are left out.
    """
    out = check_table_path(out, images, TABLE_FORMATS, "predictions")
    if out.exists():
        raise ValueError(f"--out {out} exists; delete it, or choose another file")
    where = pick_device(device, called="--device")
    model = load_classifier(classifier, where)
    source = open_source(images, split, max_pixels=Data().max_pixels)
    with display or Display() as shown:
        for line in count_table(source):
            shown.say(line)
        dtype = precision("auto", where)
        found = classify(model, source, precision=dtype, display=shown, title="predicting")
    columns = _columns(model, source, found)
    write = {".parquet": _table_parquet, ".csv": _table_csv}[out.suffix.lower()]
    write_bytes(out, write(columns))
    truth = [name for name in columns.get("class", []) if name is not None]
    unknown = tuple(sorted({str(name) for name in truth} - {*map(as_text, model.classes)}))
    pairs = zip(columns["predicted"], columns.get("class", []), strict=False)
    right = sum(one == other for one, other in pairs)
    accuracy = right / len(truth) if truth and not unknown else None
    return Predicted(out, len(found.index), found.unreadable, accuracy, len(truth), unknown)


def _columns(model: Classifier, source: Source, found: Classified) -> Columns:
    """Return one row per readable image."""
    probabilities, classes = (
        to_float64(found.logits).softmax(1).sort(dim=1, descending=True, stable=True)
    )
    columns: Columns = {"image": [as_text(source.origin(int(i))) for i in found.index]}
    names = [as_text(name) for name in model.classes]
    for rank in range(min(_MOST_CLASSES, len(names))):
        ending = f"_{rank + 1}" if rank else ""
        columns[f"predicted{ending}"] = [names[i] for i in classes[:, rank].tolist()]
        columns[f"probability{ending}"] = probabilities[:, rank].tolist()
    if source.labels is not None and source.classes is not None:
        columns["class"] = _label_names(found.labels, source.classes)
    return columns


def _label_names(labels: Tensor, names: tuple[str, ...]) -> list[str | None]:
    return [as_text(names[i]) if i >= 0 else None for i in labels.tolist()]


def _table_parquet(columns: Columns) -> bytes:
    import pyarrow as pa
    from pyarrow import parquet

    kinds = {name: pa.float64() if "probability" in name else pa.string() for name in columns}
    file = io.BytesIO()
    parquet.write_table(pa.table(columns, pa.schema(kinds)), file)
    return file.getvalue()


def _table_csv(columns: Columns) -> bytes:
    file = io.StringIO(newline="")
    lines = csv.writer(file)
    lines.writerow(columns)
    for row in zip(*columns.values(), strict=True):
        lines.writerow(f"{cell:.9g}" if isinstance(cell, float) else cell for cell in row)
    return file.getvalue().encode()

"""Read predictions-TASK.safetensors: what a classifier predicts for each test image."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

PREDICTED_TASKS = ("linear", "logistic")  # classifiers whose predictions are stored


class Predictions(NamedTuple):
    """Label, predicted class and confidence of each test image, and images of some errors."""

    dataset: str
    images: str  # fingerprint of the test images, in this order
    classes: Sequence[str]
    label: np.ndarray
    predicted: np.ndarray
    confidence: np.ndarray
    error: np.ndarray  # positions of the most confident errors, the most confident first
    error_image: np.ndarray  # their thumbnails, uint8 [error, side, side, 3]


def predictions_file(task: str) -> str:
    """Return the name of the file for a task."""
    return f"predictions-{task}.safetensors"


def read_predictions(folder: Path, missing: list[str]) -> dict[str, Predictions]:
    """Return predictions by task, and list damaged files in `missing`; older results have none."""
    found = {}
    for task in PREDICTED_TASKS:
        path = folder / predictions_file(task)
        if not path.is_file():
            continue
        try:
            found[task] = _read(path)
        except (SafetensorError, OSError, TypeError, ValueError, KeyError, RecursionError):
            missing.append(f"{path.name}: damaged, or still being written")
    return found


def _read(path: Path) -> Predictions:
    """Return the content of a file; raise ValueError if its parts do not fit together."""
    with safe_open(path, framework="numpy") as file:
        arrays: dict[str, Any] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        about = file.metadata() or {}
    classes = json.loads(about["classes"])
    label, predicted, error = (arrays[name] for name in ("label", "predicted", "error"))
    image = arrays.get("error_image", np.zeros((0, 1, 1, 3), np.uint8))
    confidence = arrays["confidence"]
    fits = (
        isinstance(classes, list)
        and label.ndim == 1
        and label.shape == predicted.shape == confidence.shape
        and all(array.dtype.kind == "i" for array in (label, predicted, error))
        and bool(np.isfinite(confidence).all())
        and bool(((predicted >= 0) & (predicted < len(classes)) & (label < len(classes))).all())
        and bool(((error >= 0) & (error < len(label))).all())
        and (image.ndim, image.shape[-1], image.dtype) == (4, 3, np.uint8)
        and len(image) == len(error)
    )
    if not fits:
        raise ValueError(path)
    names = [str(name) for name in classes]
    about = about["dataset"], about["images"]
    return Predictions(*about, names, label, predicted, confidence, error, image)

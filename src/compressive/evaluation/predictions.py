"""Write what a classifier predicts for each test image, for the report."""

import json
from pathlib import Path

from jaxtyping import Float
from safetensors.torch import save as serialize
from torch import Tensor

from compressive.evaluation.context import EvalContext
from compressive.evaluation.thumbnails import crop_thumbnails
from compressive.platforms.float64 import to_float64
from compressive.rundir.files import write_bytes
from compressive.rundir.predictions_file import predictions_file

_MOST_ERRORS = 64  # errors whose images are kept; at most 1.8 MB of thumbnails


def write_predictions(
    context: EvalContext,
    task: str,
    logits: Float[Tensor, "test classes"],
    folder: Path,
) -> Path:
    """Write label, predicted class and confidence of each test image.

    Also write the images of the most confident errors. An image that one encoder gets right and
    another one wrong is an error of the latter, so no other images are needed.
    """
    test = context.features("test")
    confidence, predicted = to_float64(logits).softmax(1).max(1)
    labels = test.labels.to(predicted.device)
    wrong = (predicted != labels) & (labels >= 0)
    errors = wrong.nonzero()[:, 0]
    order = confidence[errors].argsort(descending=True, stable=True)
    errors = errors[order[:_MOST_ERRORS]]
    tensors = {
        "label": labels.int(),
        "predicted": predicted.int(),
        "confidence": confidence.float(),
        "error": errors.int(),
    }
    if len(errors):
        tensors["error_image"] = crop_thumbnails(
            context, "test", test.index[errors.to(test.index.device)]
        )
    names = context.splits.test.classes or ()
    numbers = (str(i) for i in range(len(names), context.classes))
    about = {
        "task": task,
        "dataset": context.splits.name,
        "images": context.images("test", test.index),
        "classes": json.dumps([*names, *numbers]),
    }
    path = folder / predictions_file(task)
    content = {name: value.cpu().contiguous() for name, value in tensors.items()}
    write_bytes(path, serialize(content, about))
    return path

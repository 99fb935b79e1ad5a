"""Compare the outputs of an export with those of the encoder, on images."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import UInt8
from torch import Tensor

from compressive.data.decode import Unreadable, first_line
from compressive.data.source import Source, pixels
from compressive.data.sources import open_source
from compressive.exporting.model import ExportModel
from compressive.rundir.folder import read_config
from compressive.rundir.places import describe_places

TOLERANCE, HALF_TOLERANCE = 1e-4, 1e-2
_COUNT = 8  # images
_DEFAULT = "builtin"

Image = UInt8[Tensor, "3 _ _"]  # the sizes in a list differ
Runner = Callable[[ExportModel, Path, Sequence[Tensor]], Mapping[str, list[Tensor]]]


class Parity(NamedTuple):
    """How much the outputs of an export differ from those of the encoder."""

    difference: float  # largest, as a share of the largest output
    largest_output: float
    tolerance: float
    images: str  # where they are from
    count: int


def parity_images(images: str | Path, run: Path | None) -> tuple[list[Image], str]:
    """Return images and their origin: those given, else the run's, else the built-in ones."""
    if str(images):
        return _spread(open_source(images)), str(images)
    if run is not None:
        with suppress(ValueError, OSError):  # the images of a run may be elsewhere by now
            place = read_config(run).data.source
            return _spread(open_source(place)), describe_places(place)
    return _spread(open_source(_DEFAULT)), _DEFAULT


def _spread(source: Source) -> list[Image]:
    """Return readable images, spread over the source."""
    found: list[Image] = []
    step = max(1, len(source) // _COUNT)
    for i in range(0, len(source), step):
        with suppress(Unreadable):
            found.append(pixels(source, i))
        if len(found) == _COUNT:
            break
    if not found:
        raise ValueError(f"no image of {source.name} can be read; give others with --images")
    return found


def with_larger_image(images: list[Image], side: int) -> list[Image]:
    """Add an image with a side above `side` if there is none, so that shrinking is compared too."""
    if any(max(image.shape[1:]) > side for image in images):
        return images
    times = side // min(images[0].shape[1:]) + 1
    large = images[0].repeat_interleave(times, 1).repeat_interleave(times, 2)
    return [*images, large[:, : side + 1]]


def largest_difference(expected: Tensor, found: Tensor) -> float:
    """Return the largest difference as a share of the largest expected value."""
    if expected.shape != found.shape:
        raise ValueError(
            f"the export returns outputs of shape {tuple(found.shape)}, not {tuple(expected.shape)}"
        )
    scale = expected.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    return float(((found.float() - expected).abs().max() / scale).item())


def compare_outputs(
    expected: Tensor, found: Mapping[str, Tensor], *, tolerance: float, images: str
) -> Parity:
    """Return the largest difference; raise ValueError if it is above the tolerance."""
    worst = 0.0
    for loader, outputs in found.items():
        difference = largest_difference(expected, outputs)
        if not difference <= tolerance:  # also for NaN
            raise ValueError(
                f"the export is wrong and was deleted: outputs in {loader} differ by "
                f"{difference:.2g} of the largest output, above the limit of {tolerance:g}"
            )
        worst = max(worst, difference)
    return Parity(worst, float(expected.abs().max()), tolerance, images, len(expected))


def loaded_outputs(
    run: Runner, model: ExportModel, path: Path, inputs: Tensor | Sequence[Image]
) -> dict[str, Tensor]:
    """Return outputs of an export; raise ValueError if it cannot be loaded.

    Inputs are preprocessed images or, for a graph with preprocessing, images; of those, images of
    equal size are in one batch.
    """
    groups = [list(range(len(inputs)))]
    batches = [inputs] if isinstance(inputs, Tensor) else []
    if not batches:
        sizes = dict.fromkeys(image.shape for image in inputs)
        groups = [[i for i, image in enumerate(inputs) if image.shape == size] for size in sizes]
        batches = [torch.stack([inputs[i] for i in group]) for group in groups]
    try:
        found = run(model, path, batches)
    except Exception as error:  # of the other library
        reason = first_line(error)
        raise ValueError(f"the export does not load again and was deleted: {reason}") from None
    order = torch.tensor([i for group in groups for i in group]).argsort()
    return {loader: torch.cat(list(outputs))[order] for loader, outputs in found.items()}

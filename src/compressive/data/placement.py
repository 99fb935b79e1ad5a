"""Place decoded images of different sizes into one batch on the device."""

import functools
from collections.abc import Callable, Sequence

import torch
from jaxtyping import UInt8
from torch import Tensor

# Arguments: the batch, images, and the place of each in the batch.
Placement = Callable[[Tensor, Sequence[Tensor], Sequence[int]], None]


def place_by_copies(
    canvas: UInt8[Tensor, "batch 3 side side"], images: Sequence[Tensor], places: Sequence[int]
) -> None:
    """Copy images to the top left corners of their places in a batch; set the rest to 0."""
    for image, place in zip(images, places, strict=True):
        _, height, width = image.shape
        canvas[place].zero_()
        canvas[place, :, :height, :width].copy_(image)


@functools.cache
def fastest_placement(device: torch.device) -> Placement:
    """Return a single Triton kernel if it works on this device, else one copy per image."""
    # 256 small kernels per batch would take 1 to 2 % of a training step from the network.
    if device.type != "cuda":
        return place_by_copies
    try:
        from compressive.data.placement_kernel import place_by_kernel

        return place_by_kernel if is_same_placement(place_by_kernel, device) else place_by_copies
    except Exception:  # Triton is missing, cannot compile here, or does not know this GPU
        return place_by_copies


def is_same_placement(place: Placement, device: torch.device) -> bool:
    """Return whether a function places some images as `place_by_copies` does."""
    sizes = [(40, 33), (1, 1), (40, 40), (7, 40), (39, 8)]
    images = [torch.randint(0, 256, (3, *s), dtype=torch.uint8, device=device) for s in sizes]
    found = [
        torch.full((6, 3, 40, 40), 9, dtype=torch.uint8, device=device) for _ in range(2)
    ]  # one place is not used
    for canvas, each in zip(found, (place, place_by_copies), strict=True):
        each(canvas, images, [3, 0, 5, 1, 2])
    return torch.equal(*found)

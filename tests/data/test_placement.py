"""Images of different sizes are placed into a batch, by copies and by a Triton kernel."""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from compressive.data.placement import fastest_placement, is_same_placement, place_by_copies


def test_images_are_in_the_corner_and_the_rest_is_zero() -> None:
    canvas = torch.full((3, 3, 8, 8), 7, dtype=torch.uint8)
    images = [torch.randint(1, 256, (3, *size), dtype=torch.uint8) for size in ((5, 8), (8, 2))]
    place_by_copies(canvas, images, [2, 0])
    for place, image in ((2, images[0]), (0, images[1])):
        _, height, width = image.shape
        assert torch.equal(canvas[place, :, :height, :width], image)
        assert canvas[place].long().sum() == image.long().sum()
    assert (canvas[1] == 7).all()


def shifted(canvas: Tensor, images: list[Tensor], places: list[int]) -> None:
    place_by_copies(canvas, images, [places[0], *places[:0:-1]])


def dirty(canvas: Tensor, images: list[Tensor], places: list[int]) -> None:
    for image, place in zip(images, places, strict=True):
        canvas[place, :, : image.shape[1], : image.shape[2]] = image


def test_comparison_detects_wrong_placements() -> None:
    cpu = torch.device("cpu")
    assert is_same_placement(place_by_copies, cpu)
    assert not is_same_placement(shifted, cpu)  # pyright: ignore[reportArgumentType]
    assert not is_same_placement(dirty, cpu)  # pyright: ignore[reportArgumentType]
    assert fastest_placement(cpu) is place_by_copies


INTERPRETED = """
import torch
from compressive.data.placement import is_same_placement, place_by_copies
from compressive.data.placement_kernel import place_by_kernel

assert is_same_placement(place_by_kernel, torch.device("cpu"))
turned = torch.randint(0, 256, (3, 20, 33), dtype=torch.uint8).mT  # not contiguous
found = [torch.full((2, 3, 36, 36), 9, dtype=torch.uint8) for _ in range(2)]
for place, canvas in zip((place_by_kernel, place_by_copies), found):
    place(canvas, [turned, turned[:, 1:]], [1, 0])
assert torch.equal(*found)
place_by_kernel(found[0], [], [])
assert torch.equal(*found)
print("same")
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_kernel_places_images_like_copies_in_the_interpreter() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=env, capture_output=True, text=True
    )
    assert run.stdout == "same\n", run.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_kernel_places_images_like_copies_on_a_gpu() -> None:
    from compressive.data.placement_kernel import place_by_kernel

    device = torch.device("cuda", 0)
    assert is_same_placement(place_by_kernel, device)
    assert fastest_placement(device) is place_by_kernel
    images = [
        torch.randint(0, 256, (3, 300 + i % 213, 500 - i % 97), dtype=torch.uint8, device=device)
        for i in range(200)
    ]
    found = [torch.full((200, 3, 512, 512), 5, dtype=torch.uint8, device=device) for _ in range(2)]
    order = torch.randperm(200).tolist()
    for canvas, place in zip(found, (place_by_kernel, place_by_copies), strict=True):
        place(canvas, images, order)
    assert torch.equal(*found)

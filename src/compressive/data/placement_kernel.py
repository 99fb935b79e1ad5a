"""A Triton kernel that places images into a batch; import it only if Triton is installed."""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import UInt8
from torch import Tensor

_LINES = 8  # rows of the batch per program


@triton.jit(do_not_specialize=["count"])
def _place_lines(
    table, canvas, count, side: tl.constexpr, lines: tl.constexpr, columns: tl.constexpr
):
    """Copy or clear some rows of an image; `table` has address, height, width and place of each."""
    image = tl.program_id(0)
    source = tl.load(table + image).to(tl.pointer_type(tl.uint8))
    height = tl.load(table + count + image)
    width = tl.load(table + 2 * count + image)
    place = tl.load(table + 3 * count + image)
    line = tl.program_id(1) * lines + tl.arange(0, lines)  # of all three planes
    plane, row = line // side, line % side
    column = tl.arange(0, columns)
    start = (plane * height + row) * width
    is_inside = ((line < 3 * side) & (row < height))[:, None] & (column < width)[None, :]
    value = tl.load(source + start[:, None] + column[None, :], mask=is_inside, other=0)
    target = canvas + (place * 3 * side + line)[:, None] * side + column[None, :]
    tl.store(target, value, mask=(line < 3 * side)[:, None] & (column < side)[None, :])


def place_by_kernel(
    canvas: UInt8[Tensor, "batch 3 side side"], images: Sequence[Tensor], places: Sequence[int]
) -> None:
    """Do what `placement.place_by_copies` does, in one launch."""
    if not images:
        return
    side, held = canvas.shape[-1], [image.contiguous() for image in images]
    sizes = [image.shape[1:] for image in held]
    addresses = [image.data_ptr() for image in held]
    rows = [addresses, [size[0] for size in sizes], [size[1] for size in sizes], [*places]]
    table = torch.tensor(rows, dtype=torch.int64)
    if canvas.is_cuda:
        table = table.pin_memory().to(canvas.device, non_blocking=True)
    launch: Any = _place_lines[(len(held), triton.cdiv(3 * side, _LINES))]
    columns = triton.next_power_of_2(side)
    launch(table, canvas, len(held), side=side, lines=_LINES, columns=columns)

"""The order of images in a run, as a function of the seed and the step."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from compressive.rng import threefry

_ORDER_STREAM = 0x6F726465  # no view of `rng.image_keys` has this number


class BatchIndices(NamedTuple):
    """Images of one forward pass: their indices in the data set, and the epoch of each."""

    index: Int[Tensor, " batch"]
    epoch: Int[Tensor, " batch"]


def batch_index_stream(
    count: int,
    batch: int,
    *,
    seed: int,
    attempt: int = 0,
    step: int = 0,
    portions: int = 1,
    rank: int | None = 0,
    world: int = 1,
) -> Iterator[BatchIndices]:
    """Yield an endless sequence of micro-batches, starting at `step`; `portions` make one step.

    Each epoch is a permutation; a batch may span several epochs. The micro-batches of all ranks,
    concatenated, equal the micro-batch of a single process; `rank=None` yields all of them.
    `attempt` selects another order, for a run that restarts.
    """
    if batch % (portions * world):
        rule = f"divisible by grad_accum_steps x processes, {portions} x {world}"
        raise ValueError(f"train.batch_size must be {rule}, got {batch}")
    joined = batch // portions
    share, offset = (joined, 0) if rank is None else (joined // world, rank * joined // world)
    orders: dict[int, Int[Tensor, " count"]] = {}  # by epoch, those of the current batch
    for first in itertools.count(step * batch + offset, joined):
        places = torch.arange(first, first + share)
        epochs, index = places // count, []
        each = range(first // count, (first + share - 1) // count + 1)
        # With 1e8 images an order has 400 MB, so earlier ones are dropped before the next is drawn.
        orders = {epoch: order for epoch, order in orders.items() if epoch in each}
        for epoch in each:
            if epoch not in orders:
                orders[epoch] = _order(count, seed, attempt, epoch)
            index.append(orders[epoch][places[epochs == epoch] % count].long())
        yield BatchIndices(torch.cat(index), epochs)


def _order(count: int, seed: int, attempt: int, epoch: int) -> Int[Tensor, " count"]:
    key, counter = torch.tensor([seed, attempt]), torch.tensor([epoch, _ORDER_STREAM])
    high, low = threefry((key[0], key[1]), (counter[0], counter[1]))
    generator = torch.Generator().manual_seed(int(high) << 31 | int(low) >> 1)
    # The type does not change the order.
    kind = torch.int32 if count <= torch.iinfo(torch.int32).max else torch.int64
    return torch.randperm(count, generator=generator, dtype=kind)

"""The order of images in a run, as a function of the seed and the step."""

import itertools
from collections.abc import Iterator
from functools import lru_cache, partial
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
    rank: int = 0,
    world: int = 1,
) -> Iterator[BatchIndices]:
    """Yield an endless sequence of micro-batches, starting at `step`; `portions` make one step.

    Each epoch is a permutation; a batch may span several epochs. The micro-batches of all ranks,
    concatenated, equal the micro-batch of a single process. `attempt` selects another order, for a
    run that restarts.
    """
    if batch % (portions * world):
        rule = f"divisible by grad_accum_steps x processes, {portions} x {world}"
        raise ValueError(f"train.batch_size must be {rule}, got {batch}")
    share = batch // portions // world
    order = lru_cache(maxsize=2)(partial(_order, count, seed, attempt))  # a batch may span two
    for first in itertools.count(step * batch + rank * share, share * world):
        epoch, place = divmod(first, count)
        if place + share <= count:
            yield BatchIndices(order(epoch)[place : place + share], torch.full((share,), epoch))
            continue
        places = torch.arange(first, first + share)
        epochs = places // count
        each = epochs.unique().tolist()
        index = [order(epoch)[places[epochs == epoch] % count] for epoch in each]
        yield BatchIndices(torch.cat(index), epochs)


def _order(count: int, seed: int, attempt: int, epoch: int) -> Int[Tensor, " count"]:
    key, counter = torch.tensor([seed, attempt]), torch.tensor([epoch, _ORDER_STREAM])
    high, low = threefry((key[0], key[1]), (counter[0], counter[1]))
    generator = torch.Generator().manual_seed(int(high) << 31 | int(low) >> 1)
    return torch.randperm(count, generator=generator)

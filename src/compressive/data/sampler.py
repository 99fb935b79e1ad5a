"""Which images come when: the whole order of a run as a function of its seed and the step."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from compressive.rng import threefry

_ORDER_STREAM = 0x6F726465  # a stream of its own: no view of `views.image_keys` has this number


class BatchIndices(NamedTuple):
    """Images of one forward pass: their places in the data set, and the epoch each is seen in."""

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
    """Portions without end, from a step on; `portions` of them make a step.

    Epochs are permutations, one after the other; a batch may begin in one and end in the next, so
    none is cut short and a batch may be larger than the set. The processes' shares of a portion,
    in the order of ranks, are the portion that one process would have: what is trained on does not
    depend on their number. `attempt` gives another order, for a run that starts again.
    """
    if batch % (portions * world):
        raise ValueError(
            f"train.batch_size must be divisible by grad_accum_steps x processes, {portions} x "
            f"{world}, "
            f"got {batch}"
        )
    share = batch // portions // world
    orders = _Orders(count, seed, attempt)
    for first in itertools.count(step * batch + rank * share, share * world):
        epoch, place = divmod(first, count)
        if place + share <= count:
            yield BatchIndices(orders[epoch][place : place + share], torch.full((share,), epoch))
            continue
        places = torch.arange(first, first + share)
        epochs = places // count
        each = epochs.unique().tolist()
        index = [orders[epoch][places[epochs == epoch] % count] for epoch in each]
        yield BatchIndices(torch.cat(index), epochs)


class _Orders(dict[int, Int[Tensor, " count"]]):
    """Permutations by epoch, the last few at hand."""

    def __init__(self, count: int, seed: int, attempt: int) -> None:
        super().__init__()
        self.count, self.seed, self.attempt = count, seed, attempt

    def __missing__(self, epoch: int) -> Int[Tensor, " count"]:
        self.pop(epoch - 2, None)  # a portion may span two, and more of them if the set is small
        self[epoch] = _order(self.count, self.seed, epoch, self.attempt)
        return self[epoch]


def _order(count: int, seed: int, epoch: int, attempt: int) -> Int[Tensor, " count"]:
    words = threefry(_uint32_pair(seed, attempt), _uint32_pair(epoch, _ORDER_STREAM))
    generator = torch.Generator().manual_seed(int(words[0]) << 31 | int(words[1]) >> 1)
    return torch.randperm(count, generator=generator)


def _uint32_pair(first: int, second: int) -> tuple[Tensor, Tensor]:
    return torch.tensor(first), torch.tensor(second)

"""The order of images in a run."""

import weakref
from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from compressive.data import sampler
from compressive.data.sampler import batch_index_stream
from compressive.rng import threefry

STREAM = torch.tensor(0x6F726465)


def test_every_epoch_has_every_image_once() -> None:
    """10 images in batches of 4: epochs end inside a batch."""
    portions = list(islice(batch_index_stream(10, 4, seed=1), 15))
    index = torch.cat([p.index for p in portions])
    epoch = torch.cat([p.epoch for p in portions])
    assert epoch.tolist() == [i // 10 for i in range(60)]
    for e in range(6):
        assert sorted(index[epoch == e].tolist()) == list(range(10))
    assert index[:10].tolist() != index[10:20].tolist()


@pytest.mark.slow
@given(st.integers(1, 40), st.sampled_from([4, 8, 24]), st.integers(0, 20))
def test_resumed_run_has_the_uninterrupted_order(count: int, batch: int, step: int) -> None:
    whole = list(islice(batch_index_stream(count, batch, seed=3), step + 3))[step:]
    resumed = list(islice(batch_index_stream(count, batch, seed=3, step=step), 3))
    for a, b in zip(whole, resumed, strict=True):
        assert torch.equal(a.index, b.index)
        assert torch.equal(a.epoch, b.epoch)


@pytest.mark.parametrize(("world", "portions"), [(2, 1), (4, 1), (1, 3), (2, 3)])
def test_ranks_and_microbatches_partition_the_batch(world: int, portions: int) -> None:
    whole = list(islice(batch_index_stream(50, 24, seed=2), 4))
    parts = [
        list(
            islice(
                batch_index_stream(50, 24, seed=2, rank=r, world=world, portions=portions),
                4 * portions,
            )
        )
        for r in range(world)
    ]
    for step, batch in enumerate(whole):
        joined = [
            parts[r][step * portions + p].index for p in range(portions) for r in range(world)
        ]
        assert torch.equal(torch.cat(joined), batch.index)


def test_seed_and_attempt_change_the_order() -> None:
    orders = {
        tuple(next(batch_index_stream(100, 100, seed=seed, attempt=attempt)).index.tolist())
        for seed, attempt in [(0, 0), (1, 0), (0, 1), (1, 1)]
    }
    assert len(orders) == 4


def test_indivisible_batch_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"grad_accum_steps.* 1 x 3.* 8"):
        next(batch_index_stream(10, 8, seed=0, world=3))


@pytest.mark.parametrize("count", [3, 5, 8])
def test_batch_across_epochs_concatenates_them(count: int) -> None:
    one_by_one = [p.index for p in islice(batch_index_stream(count, 1, seed=4), 64)]
    at_once = torch.cat([p.index for p in islice(batch_index_stream(count, 16, seed=4), 4)])
    assert torch.equal(at_once, torch.cat(one_by_one))


@pytest.mark.parametrize(("count", "batches"), [(3, 40), (1000, 400)])
def test_order_equals_a_permutation_of_64_bit_integers(count: int, batches: int) -> None:
    """Orders are stored with 32 bits, and dropped when their epoch is over; runs do not change."""
    found = list(islice(batch_index_stream(count, 8, seed=5, attempt=1), batches))
    index = torch.cat([each.index for each in found])
    assert index.dtype == torch.int64
    for epoch in range(8 * batches // count):
        words = threefry((torch.tensor(5), torch.tensor(1)), (torch.tensor(epoch), STREAM))
        high, low = map(int, words)
        generator = torch.Generator().manual_seed(high << 31 | low >> 1)
        expected = torch.randperm(count, generator=generator)
        assert torch.equal(index[epoch * count : (epoch + 1) * count], expected)


def test_only_orders_of_the_current_batch_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    draw = sampler._order

    def order(*arguments: int) -> Tensor:
        drawn = draw(*arguments)
        assert len(alive) <= 1
        alive.add(drawn)
        return drawn

    monkeypatch.setattr(sampler, "_order", order)
    batches = batch_index_stream(10, 4, seed=0)
    for first in range(0, 100, 4):
        next(batches)
        assert len(alive) == len({first // 10, (first + 3) // 10})

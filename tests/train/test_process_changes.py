"""What is random depends on the seed and the step, not on the number of processes."""

from itertools import islice
from typing import Any

import pytest
import timm
import torch
from timm.layers.drop import DropPath
from tiny import tiny
from torch import Tensor, nn

from compressive import objectives
from compressive.data.loaders import Batch
from compressive.data.sampler import batch_index_stream
from compressive.distributions.vmf import VonMisesFisher
from compressive.train import drop_path
from compressive.train.loop import seed_step
from compressive.train.step import view_maker

WORLDS = [1, 2, 4, 1]  # each trains for three steps
COUNT, BATCH = 50, 24


def as_process(monkeypatch: pytest.MonkeyPatch, module: Any, rank: int, world: int) -> None:
    monkeypatch.setattr(module, "rank", lambda: rank)
    monkeypatch.setattr(module, "world_size", lambda: world)


def test_order_of_images_does_not_depend_on_the_processes() -> None:
    """Processes join and leave every three steps; the images equal those of one process."""
    whole = list(islice(batch_index_stream(COUNT, BATCH, seed=2), 3 * len(WORLDS)))
    for i, world in enumerate(WORLDS):
        streams = [
            batch_index_stream(COUNT, BATCH, seed=2, step=3 * i, rank=rank, world=world)
            for rank in range(world)
        ]
        for batch in whole[3 * i : 3 * i + 3]:
            parts = [next(stream) for stream in streams]
            assert torch.equal(torch.cat([part.index for part in parts]), batch.index)
            assert torch.equal(torch.cat([part.epoch for part in parts]), batch.epoch)


@pytest.mark.parametrize("world", [2, 4])
def test_views_do_not_depend_on_the_processes(world: int) -> None:
    make = view_maker(tiny(), torch.float32, compiled=False)
    images = torch.randint(256, (BATCH, 3, 20, 20), dtype=torch.uint8)
    side = torch.full((BATCH,), 20)
    (indices,) = islice(batch_index_stream(COUNT, BATCH, seed=2, step=7), 1)
    whole = make(Batch(images, side, side, *indices, side))
    parts = [make(Batch(*rows)) for rows in zip(*[
        each.chunk(world) for each in (images, side, side, *indices, side)
    ], strict=True)]  # fmt: skip
    for view in (0, 1):
        torch.testing.assert_close(torch.cat([part[view] for part in parts]), whole[view])


@pytest.mark.parametrize("world", [2, 4])
def test_noise_of_z_does_not_depend_on_the_processes(
    world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    mu = nn.functional.normalize(torch.randn(BATCH, 16), dim=1)

    def drawn(rows: Tensor) -> Tensor:
        seed_step(0, 0, 5)
        return objectives.distributed_rsample(VonMisesFisher(rows, 30.0))

    whole, parts = drawn(mu), []
    for rank, rows in enumerate(mu.chunk(world)):
        as_process(monkeypatch, objectives, rank, world)
        parts.append(drawn(rows))
    torch.testing.assert_close(torch.cat(parts), whole)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("views", [1, 2])
def test_dropped_paths_equal_those_of_timm_in_one_process(
    world: int, views: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, share = DropPath(0.4), BATCH // world
    x = 1 + torch.rand(views, BATCH, 5, 3)
    torch.manual_seed(3)
    whole = layer(x.flatten(0, 1)).view_as(x)
    for rank in range(world):
        as_process(monkeypatch, drop_path, rank, world)
        torch.manual_seed(3)
        rows = slice(rank * share, (rank + 1) * share)
        out = drop_path.SharedDropPath(layer, share)(x[:, rows].flatten(0, 1))
        torch.testing.assert_close(out.view(views, share, 5, 3), whole[:, rows])
        kept = (torch.rand(4), torch.rand(4))  # later random numbers are equal, too
        torch.manual_seed(3)
        layer(x.flatten(0, 1))
        assert torch.equal(kept[0], torch.rand(4))


def test_drop_paths_of_a_network_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    network = timm.create_model("test_vit", num_classes=0, drop_path_rate=0.2)
    before = [type(each) for each in network.modules()].count(DropPath)
    drop_path.share_drop_path(network, 4)
    assert [type(each) for each in network.modules()].count(DropPath) == before > 0
    as_process(monkeypatch, drop_path, 0, 2)
    drop_path.share_drop_path(network, 4)
    kinds = [type(each) for each in network.modules()]
    assert kinds.count(DropPath) == 0
    assert kinds.count(drop_path.SharedDropPath) == before
    network.train()(torch.rand(4, 3, 160, 160))
    x = torch.rand(4, 3, 160, 160)
    assert torch.equal(network.eval()(x), network(x))

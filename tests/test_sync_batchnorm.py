"""Two gloo processes normalize as one process does on the joined batch."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torch.distributed as dist
from processes import together
from torch import Tensor, nn

from compressive.distributed import all_sum
from compressive.networks import _BiasedBatchNorm2d, mlp
from compressive.sync_batchnorm import TorchSyncBatchNorm, _Sharing, synchronize

RANKS = 2
PER_RANK = 3


def networks() -> dict[str, nn.Module]:
    """Return norms of images and vectors: torch's, TensorFlow's, and timm's with an activation."""
    torch.manual_seed(0)
    made = {
        "images": nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=0.3, eps=1e-3)),
        "plain": nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, affine=False)),
        "vectors": nn.Sequential(nn.Flatten(), mlp(3 * 25, 7, 4, last_norm=True)),
        "biased": nn.Sequential(nn.Flatten(), mlp(3 * 25, 7, 4, biased_variance=True)),
        "biased images": nn.Sequential(nn.Conv2d(3, 4, 3), _BiasedBatchNorm2d(4)),
        "activated": nn.Sequential(nn.Conv2d(3, 4, 3), timm.layers.BatchNormAct2d(4)),
    }
    for network in made.values():
        for name, p in network.named_parameters():
            nn.init.normal_(p, mean=float("weight" in name), std=0.5)
    return {name: network.double() for name, network in made.items()}


def images() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    shape = RANKS * PER_RANK, 3, 5, 5
    return 3 + torch.randn(*shape, dtype=torch.float64, generator=generator)


def outcome(network: nn.Module, x: Tensor, share: int) -> dict[str, Any]:
    """Return outputs, state, and gradients of a loss averaged over the process's images."""
    x = x.clone().requires_grad_()
    out = network(x)
    factor = torch.linspace(-1, 2, out[0].numel(), dtype=torch.float64).view_as(out[0])
    (out.sin() * factor).flatten(1).sum(1).mean().backward()
    evaluated = network.eval()(x).detach()
    return {
        "out": out.detach(),
        "x": x.grad / share if x.grad is not None else None,
        "grads": {name: p.grad for name, p in network.named_parameters()},
        "state": dict(network.state_dict()),
        "evaluated": evaluated,
    }


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    mine = images()[rank * PER_RANK : (rank + 1) * PER_RANK]
    found = {}
    for name, network in networks().items():
        params = list(network.parameters())
        network = synchronize(network, biased_variance="biased" in name)
        assert not any(type(m).__name__.endswith(("Norm1d", "Norm2d")) for m in network.modules())
        assert all(p is q for p, q in zip(params, network.parameters(), strict=True))
        found[name] = outcome(network, mine, RANKS)
    narrow = networks()["images"].float()
    with torch.autocast("cpu", torch.bfloat16):
        assert synchronize(narrow)(mine.float()).dtype == torch.bfloat16
    refused(rank)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def refused(rank: int) -> None:
    for network, word in ((networks()["biased"], "'1.1' is a _BiasedBatchNorm1d"),):
        with pytest.raises(ValueError, match=word):
            synchronize(network)
    with pytest.raises(ValueError, match="running statistics"):
        synchronize(nn.BatchNorm1d(3, track_running_stats=False))
    value = torch.tensor([1.0, 2.0], requires_grad=True)
    total = all_sum(value * (rank + 1))
    assert total.tolist() == [3, 6]
    (total * torch.tensor([1.0, 10.0]) * (rank + 1)).sum().backward()
    assert value.grad is not None
    assert value.grad.tolist() == [3 * (rank + 1), 30 * (rank + 1)]


@pytest.mark.slow
@pytest.mark.distributed
def test_processes_match_one_on_the_joined_batch(tmp_path: Path) -> None:
    together(worker, (str(tmp_path),), RANKS)
    each = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(RANKS)]
    for name, network in networks().items():
        joined = outcome(network, images(), 1)
        for key in ("out", "x", "evaluated"):
            joined_up = torch.cat([found[name][key] for found in each])
            torch.testing.assert_close(joined_up, joined[key], rtol=1e-11, atol=1e-12)
        for found in each:
            torch.testing.assert_close(
                found[name]["state"], joined["state"], rtol=1e-12, atol=1e-12
            )
            assert list(found[name]["state"]) == list(joined["state"])
        for weight, grad in joined["grads"].items():
            averaged = torch.stack([found[name]["grads"][weight] for found in each]).mean(0)
            torch.testing.assert_close(averaged, grad, rtol=1e-10, atol=1e-11)


GROUP_RANKS = 4


def group_worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=GROUP_RANKS)
    x = torch.cat([images(), -2 * images()])[rank * PER_RANK :][:PER_RANK]
    found = {}
    for name, network in networks().items():
        made = synchronize(network, biased_variance="biased" in name, ranks=2)
        found[name] = outcome(made, x, 2)
    alone = networks()["images"]
    assert synchronize(alone, ranks=1) is alone
    assert type(alone[1]) is nn.BatchNorm2d  # pyright: ignore
    with pytest.raises(ValueError, match=r"train\.batch_norm_ranks.* 4, got 3"):
        synchronize(networks()["images"], ranks=3)
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.distributed
def test_groups_of_ranks_match_their_joined_batches(tmp_path: Path) -> None:
    """Of 4 processes, each pair normalizes as one process on its images does."""
    together(group_worker, (str(tmp_path),), GROUP_RANKS)
    each = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(GROUP_RANKS)]
    for name in networks():
        for number, x in enumerate((images(), -2 * images())):
            joined = outcome(networks()[name], x, 1)
            pair = [found[name] for found in each[2 * number : 2 * number + 2]]
            for key in ("out", "x", "evaluated"):
                both = torch.cat([found[key] for found in pair])
                torch.testing.assert_close(both, joined[key], rtol=1e-11, atol=1e-12)
            for found in pair:
                torch.testing.assert_close(found["state"], joined["state"], rtol=1e-12, atol=1e-12)
            for weight, grad in joined["grads"].items():
                averaged = torch.stack([found["grads"][weight] for found in pair]).mean(0)
                torch.testing.assert_close(averaged, grad, rtol=1e-10, atol=1e-11)


def test_groups_need_several_processes() -> None:
    with pytest.raises(ValueError, match=r"train\.batch_norm_ranks.* 1, got 2"):
        synchronize(networks()["images"], ranks=2)


def test_single_process_changes_nothing() -> None:
    network = networks()["images"]
    assert synchronize(network) is network
    assert type(network[1]) is nn.BatchNorm2d  # pyright: ignore
    value = torch.ones(3)
    assert all_sum(value) is value


@pytest.mark.parametrize("name", ["images", "biased", "activated"])
def test_gpu_path_matches_torchs_norm(name: str) -> None:
    """Run the GPU path, torch's forward with our variance, without processes."""
    before, after = networks()[name], networks()[name]
    place: Any = after[1] if name == "biased" else after  # pyright: ignore
    place[1] = TorchSyncBatchNorm(place[1], _Sharing(name == "biased", None, 1))
    ours, theirs = outcome(after, images(), 1), outcome(before, images(), 1)
    torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)

"""Two and three gloo processes match the loss and gradient of one, to 1e-12."""

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import unit_vectors
from processes import together

from compressive import distributed
from compressive import info_nce as info_nce_module
from compressive.objectives import byol_loss, cbyol_loss, csimclr_loss, info_nce, simclr_loss

PER_RANK = 4
DIM = 8


def network(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ weight)


def losses(x: torch.Tensor, y: torch.Tensor, z: torch.Tensor, weight: torch.Tensor) -> dict:
    """Return every objective on projections of a shared linear map; DDP averages its gradient."""
    r_x, r_y = network(x, weight), network(y, weight)
    given = {"z_x": z, "z_y": z.flip(-1), "kappa_e": 50.0}
    mu_x, mu_y = F.normalize(r_x, dim=-1), F.normalize(r_y, dim=-1)
    nce = info_nce(z, mu_y, 5.0, own=mu_x).mean()
    return {
        "simclr": simclr_loss(r_x, r_y).loss,
        "simclr across": simclr_loss(r_x, r_y, own_view_negatives=False).loss,
        "csimclr": csimclr_loss(r_x, r_y, **given).loss,
        "csimclr across": csimclr_loss(r_x, r_y, own_view_negatives=False, **given).loss,
        "byol": byol_loss(r_x, r_y).loss,
        "cbyol": cbyol_loss(r_x, r_y, r_x, r_y, z=z).loss,
        "info_nce": distributed.mean_value(nce),
    }


def data(ranks: int) -> tuple[torch.Tensor, ...]:
    x, y, z = unit_vectors(3, ranks * PER_RANK, DIM)
    weight = torch.randn(DIM, DIM, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    return x, y, z, weight


def gradients(batch: tuple[torch.Tensor, ...]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    x, y, z, weight = batch
    weight = weight.clone().requires_grad_()
    return {
        name: (loss.detach(), torch.autograd.grad(loss, weight, retain_graph=True)[0])
        for name, loss in losses(x, y, z, weight).items()
    }


def worker(rank: int, ranks: int, folder: str, streamed: bool) -> None:
    torch.set_num_threads(1)
    if streamed:
        info_nce_module._KEEP, info_nce_module._LOGITS_PER_BLOCK = 0, 3 * 2 * ranks * PER_RANK
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=ranks)
    *inputs, weight = data(ranks)
    mine = tuple(x[rank * PER_RANK : (rank + 1) * PER_RANK] for x in inputs)
    results = gradients((*mine, weight))
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.distributed
@pytest.mark.parametrize(("ranks", "streamed"), [(2, False), (3, False), (2, True)])
def test_distributed_losses_match_one_process(ranks: int, streamed: bool, tmp_path: Path) -> None:
    together(worker, (ranks, str(tmp_path), streamed), ranks)
    joined = gradients(data(ranks))
    each = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(ranks)]
    for name, (loss, grad) in joined.items():
        for results in each:  # every process reports the loss of the joined batch
            torch.testing.assert_close(results[name][0], loss, rtol=1e-12, atol=1e-12)
        averaged = torch.stack([results[name][1] for results in each]).mean(0)  # as DDP does
        torch.testing.assert_close(averaged, grad, rtol=1e-12, atol=1e-12)
        assert all(not torch.equal(results[name][1], grad) for results in each)


def bound_worker(rank: int, ranks: int, folder: str) -> None:
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=ranks)
    x, y = unit_vectors(2, PER_RANK, DIM)
    assert distributed.world_size() == ranks
    assert distributed.rank() == rank
    assert csimclr_loss(x, y).bound == math.log(2 * ranks * PER_RANK - 1)
    assert simclr_loss(x, y, own_view_negatives=False).bound == math.log(ranks * PER_RANK)
    gathered = distributed.gather(torch.full((2, 3), float(rank)))
    assert gathered[:, 0].tolist() == [0, 0, 1, 1]
    dist.destroy_process_group()


@pytest.mark.distributed
def test_bound_counts_candidates_of_all_processes(tmp_path: Path) -> None:
    together(bound_worker, (2, str(tmp_path)), 2)


def uneven_worker(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
    x, y = unit_vectors(2, 4 - rank, DIM)
    with pytest.raises(ValueError, match=r"rows.* 4, 3"):
        simclr_loss(x, y)
    dist.destroy_process_group()


@pytest.mark.distributed
def test_uneven_batches_are_rejected(tmp_path: Path) -> None:
    together(uneven_worker, (str(tmp_path),), 2)


def test_single_process_needs_no_process_group() -> None:
    rows = torch.randn(3, 4)
    assert distributed.gather(rows) is rows
    assert distributed.mean_value(rows.sum()) == rows.sum()
    assert distributed.world_size() == 1
    assert distributed.rank() == 0

"""One, two and four gloo processes make the same step on the same global batch, to 1e-10."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from compiled_methods import tiny
from processes import together
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from compressive.config import METHODS
from compressive.distributions.vmf import VonMisesFisher
from compressive.sync_batchnorm import synchronize

BATCH = 8
ADAPTIVE = [
    f"{name} bottleneck.schedule=adaptive bottleneck.adaptive_weight={weight}"
    for name in METHODS
    if name.startswith("c-")
    for weight in ("likelihood", "rank")
]
APART = "byol without synchronized norms"


class NoiseByImage:
    """Draw z from noise tied to the images, regardless of the process that has them."""

    def __init__(self, mine: slice) -> None:
        generator = torch.Generator().manual_seed(3)
        noise = torch.randn(2, BATCH, 16, dtype=torch.float64, generator=generator)
        self.of_views = iter(noise[:, mine])

    def __call__(self, e: VonMisesFisher) -> Tensor:
        return F.normalize(e.mean_direction + 0.05 * next(self.of_views), dim=-1)


def outcome(name: str, mine: slice, parallel: bool) -> dict[str, Any]:
    """Return loss, gradients and state after one step on a part of the batch."""
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, BATCH, 3, 8, 8, dtype=torch.float64, generator=generator)[:, mine]
    method = tiny(*(word for word in name.split() if "=" in word or word in METHODS)).double()
    if method.channel is not None:
        method.channel = method.channel._replace(sample=NoiseByImage(mine))
    step: Any = method
    if parallel:
        step = method if name == APART else synchronize(method)
        step = DistributedDataParallel(step)
    found = step((x, y), 0.5)
    found.loss.backward()
    method.update_target(0.9)
    grads = {key: p.grad for key, p in method.named_parameters() if p.grad is not None}
    return {
        "loss": found.loss.detach(),
        "grads": grads,
        "state": dict(method.state_dict()),
        "beta": found.effective_beta,
    }


def worker(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=ranks)
    mine = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
    found = {name: outcome(name, mine, parallel=True) for name in (*METHODS, *ADAPTIVE, APART)}
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.distributed
@pytest.mark.parametrize(
    "ranks", [pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.stress)]
)
def test_distributed_step_matches_one_process(ranks: int, tmp_path: Path) -> None:
    """Negatives and batch norms span all processes; DistributedDataParallel averages gradients."""
    together(worker, (ranks, str(tmp_path)), ranks)
    each = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(ranks)]
    for name in (*METHODS, *ADAPTIVE):
        alone = outcome(name, slice(BATCH), parallel=False)
        beta = alone.pop("beta")
        betas = [found[name].pop("beta") for found in each]  # over the images of each process
        for found in each:
            torch.testing.assert_close(found[name], alone, rtol=1e-10, atol=1e-10)
        if name in ADAPTIVE:
            torch.testing.assert_close(torch.stack(betas).mean(), beta, rtol=1e-10, atol=0)
    apart = each[0][APART]["grads"]["encoder.0.weight"]
    joined = each[0]["byol"]["grads"]["encoder.0.weight"]
    assert float((apart - joined).norm()) > 0.01 * float(joined.norm()), (
        "synchronized norms must make a difference"
    )

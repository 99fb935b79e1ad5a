"""On a GPU: CPU results, no host synchronization, CUDA graphs and low memory."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import golden_json, unit_vectors
from exact import CosineLaw
from processes import printed
from tiny import silent, tensors, tiny
from torch.distributions import kl_divergence

from compressive import VonMisesFisher
from compressive.distributions import special
from compressive.objectives import byol_loss, cbyol_loss, csimclr_loss, simclr_loss
from compressive.train.loop import apply_gradients, compute_gradients
from compressive.train.run import Run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]


@pytest.fixture
def _no_synchronization() -> Iterator[None]:
    """Raise an error if the host waits for the device."""
    for n, kappa in ((3, 0.5), (256, torch.tensor(300.0).cuda())):  # copies their tables once
        VonMisesFisher(unit_vectors(n, dtype=torch.float32).cuda(), kappa).sample()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def test_special_functions_match_the_cpu() -> None:
    """exp and log differ by a few units in the last place."""
    table = golden_json("vmf_table")
    kappa = torch.tensor(table["kappa"], dtype=torch.float64)
    for n in table["n"]:
        for name in special.Constants._fields:
            ours = getattr(special, name)(kappa.cuda(), n).cpu()
            torch.testing.assert_close(
                ours, getattr(special, name)(kappa, n), rtol=1e-13, atol=1e-13
            )


def draw_and_score(mu: torch.Tensor, kappa: float | torch.Tensor) -> torch.Tensor:
    p = VonMisesFisher(mu, kappa)
    return p.log_prob(p.rsample())


@pytest.mark.usefixtures("_no_synchronization")
def test_objectives_and_sampling_do_not_synchronize() -> None:
    r_x, r_y = (torch.randn(64, 256, device="cuda", requires_grad=True) for _ in range(2))
    mu = F.normalize(r_x, dim=-1)
    learned = torch.full((64,), 300.0, device="cuda", requires_grad=True)
    for n, kappa in ((256, 1024.0), (256, learned), (3, 0.5), (256, 0.0)):
        p = VonMisesFisher(F.normalize(r_x[:, :n], dim=-1), kappa)
        total = draw_and_score(p.mean_direction, kappa).sum() + p.entropy().sum()
        torch.autograd.grad(total + kl_divergence(p, p).sum(), r_x, retain_graph=True)
    z = VonMisesFisher(mu, 16384.0).rsample()
    total = simclr_loss(r_x, r_y).loss + csimclr_loss(r_x, r_y).loss + byol_loss(r_x, r_y).loss
    total = total + cbyol_loss(r_x, r_y, r_x, r_y, z=z).loss
    torch.autograd.grad(total, (r_x, r_y))


@pytest.mark.parametrize("kind", ["fixed", "learned", "no polynomial", "closed form"])
def test_sampling_works_in_a_cuda_graph(kind: str) -> None:
    """Every replay draws new samples from the correct distribution, with their log density."""
    n, kappa = (3, 0.5) if kind in ("no polynomial", "closed form") else (64, 100.0)
    mu = unit_vectors(n, dtype=torch.float32).cuda().expand(20_000, n)
    is_tensor = kind in ("learned", "closed form")
    given = torch.full((20_000,), kappa, device="cuda") if is_tensor else kappa
    p = VonMisesFisher(mu, given)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        p.log_prob(p.sample())
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        z = p.sample()
        score = p.log_prob(z)
    draws = []
    for _ in range(2):
        graph.replay()
        assert torch.equal(score, p.log_prob(z))
        near, far = (torch.linalg.vector_norm(x.double(), dim=-1) for x in (z - mu, z + mu))
        draws.append((2 * torch.atan2(near, far)).cpu())
    assert not torch.equal(*draws)
    assert all(CosineLaw(n, kappa).ks(angle.numpy()) > 1e-4 for angle in draws)


def test_objectives_match_the_cpu() -> None:
    x, y, z = (unit_vectors(32, 64, seed=s) for s in range(3))
    for loss in (
        lambda x, y, z: simclr_loss(x, y).loss,
        lambda x, y, z: csimclr_loss(x, y, z_x=z, z_y=z).loss,
        lambda x, y, z: cbyol_loss(x, y, x, y, z=z).loss,
    ):
        values = []
        for device in ("cpu", "cuda"):
            r_x, r_y = (t.to(device).requires_grad_() for t in (x, y))
            value = loss(r_x, r_y, z.to(device))
            grads = torch.autograd.grad(value, (r_x, r_y))
            values.append([t.detach().cpu() for t in (value, *grads)])
        for cpu, gpu in zip(*values, strict=True):
            torch.testing.assert_close(gpu, cpu, rtol=1e-11, atol=1e-11)


def test_autocast_has_no_effect() -> None:
    r_x, r_y = (torch.randn(64, 256, device="cuda") for _ in range(2))
    torch.manual_seed(0)
    outside = csimclr_loss(r_x, r_y, kappa_e=16384.0)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        torch.manual_seed(0)
        inside = csimclr_loss(r_x, r_y, kappa_e=16384.0)
    for name in ("loss", "nll_x", "residual_x", "predictive_x", "entropy_e", "reducible_residual"):
        assert torch.equal(getattr(inside, name), getattr(outside, name))


def test_batch_of_16384_fits_in_a_gigabyte_and_a_half() -> None:
    r_x, r_y = (torch.randn(16384, 256, device="cuda", requires_grad=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    csimclr_loss(r_x, r_y).loss.backward()
    assert (torch.cuda.max_memory_allocated() - before) / 2**30 < 1.5


def test_values_are_validated_only_on_request() -> None:
    nan = torch.full((4, 8), math.nan, device="cuda")
    assert simclr_loss(nan, nan).loss.isnan()
    with (
        torch.autograd.set_detect_anomaly(True),
        pytest.raises(ValueError, match=r"r_x .*finite"),
    ):
        simclr_loss(nan, nan)
    with pytest.raises(ValueError, match=r"r_y .*cuda:0.* cpu"):
        simclr_loss(nan, nan.cpu())


def test_recomputation_keeps_gradients_and_saves_memory() -> None:
    """Use torch's inductor in float64; sums have another order."""
    script = Path(__file__).parent / "recomputed.py"
    difference, share = map(float, printed(script.read_text(), "cuda", "inductor").split())
    assert difference < 1e-9
    assert 0.3 < share < 0.5


@pytest.mark.parametrize("name", ["lars", "sgd", "adamw"])
def test_resumed_run_updates_weights_without_synchronization(name: str, tmp_path: Path) -> None:
    """Cover optimizers, target, controller and metrics. LARS allocates in its first step."""
    config = tiny(
        "method=c-byol",
        "bottleneck.target_residual=1",
        f"optim.name={name}",
        "train.device=cuda",
        "train.compile=no",
        "train.steps=9",
        "train.log_every=9",
    )
    for first in (0, 2):
        run = Run(config, tmp_path, silent(), resume=True)
        run.restore()
        assert run.step == first
        for _ in range(2):
            _, residual = compute_gradients(run, run.batches())
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error" if run.step % 2 else "default")
            try:
                apply_gradients(run, residual)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        found = tensors({name: part.state_dict() for name, part in run._parts().items()})
        kinds = {n: leaf.device.type for n, leaf in found.items() if isinstance(leaf, torch.Tensor)}
        assert all(n.endswith(".step") for n, kind in kinds.items() if kind == "cpu")
        run.save()
        run.close()

"""The controller drives beta to its target for simulated responses and a small C-SimCLR network."""

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from processes import together
from torch import Tensor, nn

from compressive.objectives import AdaptiveWeight, csimclr_loss
from compressive.rundir import checkpoint
from compressive.train.rate_controller import LEAST, MOST, Controller

# Steady-state reducible nats as a function of beta, the target, and the beta that reaches it. The
# name ends with the elasticity d log nats / d log beta there.
RESPONSES: dict[str, tuple[Callable[[float], float], float, float]] = {
    "hardly yields, 0.2": (lambda beta: 3 * beta**-0.2, 2.5, 2.49),
    "square root, 0.5": (lambda beta: 2 * beta**-0.5, 0.7, 8.16),
    "hyperbola, 0.8": (lambda beta: 5 / (1 + beta), 1.0, 4.0),
    "exponential, 1.6": (lambda beta: 5 * math.exp(-beta), 1.0, 1.61),
    "steep, 2.4": (lambda beta: 3 / (1 + (beta / 5) ** 3), 0.6, 7.94),
    "cliff, 3.2": (lambda beta: 3 / (1 + (beta / 2) ** 4), 0.6, 2.83),
    "downward, 0.2": (lambda beta: 1 / (1 + beta), 0.8, 0.25),
}

# A slow network is harder to control; the extremes of the elasticity also have a fast one.
CASES = [*((name, 50) for name in RESPONSES), ("hardly yields, 0.2", 5), ("cliff, 3.2", 5)]


def test_responses_match_their_table() -> None:
    for name, (response, target, beta) in RESPONSES.items():
        assert response(beta) == pytest.approx(target, rel=0.01)
        slope = -math.log(response(1.01 * beta) / response(beta / 1.01)) / (2 * math.log(1.01))
        assert slope == pytest.approx(float(name.split()[-1]), rel=0.05)


def simulate(
    response: Callable[[float], float], target: float, *, lag: float, noise: float, steps: int
) -> tuple[list[float], list[float]]:
    """Return nats without noise, and betas; nats follow beta with a lag, and batches are noisy."""
    controller = Controller(target)
    random = np.random.default_rng(0)
    nats, betas, log_nats = [], [], math.log(response(1.0))
    for _ in range(steps):
        controller.update(torch.tensor(math.exp(log_nats) * (1 + noise * random.normal())))
        betas.append(controller.beta.item())
        log_nats += (math.log(response(betas[-1])) - log_nats) / max(lag, 1)
        nats.append(math.exp(log_nats))
    return nats, betas


def settled(nats: list[float], target: float, within: float) -> int:
    """Return the step after which nats stay within a fraction `within` of the target."""
    outside = [i for i, value in enumerate(nats) if abs(value / target - 1) > within]
    return outside[-1] + 1 if outside else 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "lag"), CASES)
def test_nats_converge_to_the_target(name: str, lag: int) -> None:
    """Nats stay within 5 % after a horizon per factor of e plus the documented decay.

    Three time constants reduce an error of 1 to 5 %; a fourth allows for noise.
    """
    response, target, beta = RESPONSES[name]
    steps = int(200 * (abs(math.log(beta)) + 4 / float(name.split()[-1])))
    nats, betas = simulate(response, target, lag=lag, noise=0.05, steps=steps + 500)
    assert settled(nats, target, 0.05) < steps
    assert betas[-1] == pytest.approx(beta, rel=0.2)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "lag"), CASES)
def test_nats_do_not_oscillate(name: str, lag: int) -> None:
    """Without noise, nats cross the target at most once and overshoot by at most 5 %."""
    response, target, _ = RESPONSES[name]
    nats, _ = simulate(response, target, lag=lag, noise=0.0, steps=2500)
    side = np.sign(np.array(nats) / target - 1)
    # Below 0.1 % counts as settled: float32 sums have a smallest step.
    moving = np.abs(np.array(nats) / target - 1) > 1e-3
    turns = np.count_nonzero(np.diff(side[moving]))
    assert turns <= 1
    beyond = [value for value, s in zip(nats, side, strict=True) if s == -side[0]]
    assert max((abs(value / target - 1) for value in beyond), default=0.0) < 0.05


@pytest.mark.slow
def test_slow_response_overshoots_little_and_settles() -> None:
    """The lag is three quarters of the horizon, on the steepest slope."""
    response, target, _ = RESPONSES["cliff, 3.2"]
    nats, _ = simulate(response, target, lag=150, noise=0.0, steps=3000)
    assert min(nats) > 0.75 * target
    assert settled(nats, target, 0.05) < 1500


@pytest.mark.slow
def test_unreachable_target_does_not_wind_up() -> None:
    """Beta waits at its limit and leaves it as soon as the nats change."""
    controller = Controller(1.0)
    for _ in range(5000):
        controller.update(torch.tensor(0.2))
    assert controller.beta.item() == pytest.approx(LEAST)
    for _ in range(80):  # a few times the averaging window
        controller.update(torch.tensor(5.0))
    assert controller.beta.item() > 1.2 * LEAST
    for _ in range(5000):
        controller.update(torch.tensor(5.0))
    assert controller.beta.item() == pytest.approx(MOST)
    for _ in range(80):  # a few times the averaging window
        controller.update(torch.tensor(0.2))
    assert controller.beta.item() < MOST / 1.2


def test_single_step_matches_the_formula() -> None:
    """The average starts at the first value, then takes 0.95 of itself and 0.05 of the next."""
    controller = Controller(2.0, beta=0.5)
    controller.update(torch.tensor(3.0))
    first = math.log(1.5)
    assert controller.beta.item() == pytest.approx(0.5 * math.exp(first / 200 + 0.3 * first))
    controller.update(torch.tensor(1.0))
    average = (0.05 * 0.95 * 3 + 0.05 * 1) / (0.05 * 0.95 + 0.05)
    second = math.log(average / 2)
    expected = 0.5 * math.exp((first + second) / 200 + 0.3 * second)
    assert controller.beta.item() == pytest.approx(expected, rel=1e-5)
    controller.update(torch.tensor(1e9))  # the error is clipped at a factor of e
    assert controller.beta.item() == pytest.approx(
        0.5 * math.exp((first + second + 1) / 200 + 0.3), rel=1e-5
    )


def test_nonfinite_values_leave_beta_finite() -> None:
    controller = Controller(1.0, beta=0.0)
    assert controller.beta.item() == pytest.approx(LEAST)
    for value in (math.nan, 0.0, math.inf, -math.inf, 0.0, 1e-30):
        controller.update(torch.tensor(value))
        assert LEAST * 0.99 <= controller.beta.item() <= MOST
    healthy = Controller(1.0)
    healthy.update(torch.tensor(math.nan))
    assert healthy.beta.item() == pytest.approx(1.0), "NaN counts as on target"
    for bad in (0.0, -1.0, math.inf):
        with pytest.raises(ValueError, match=r"target must .* 0"):
            Controller(bad)


def test_update_before_backward_keeps_the_gradient() -> None:
    controller = Controller(1.0)
    weight = torch.tensor(2.0, requires_grad=True)
    loss = controller.beta * weight.square()
    controller.update(weight.square())
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.item() == 4.0
    assert not controller.beta.requires_grad


def test_controller_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    values = torch.rand(50) + 0.5
    whole, first, second = Controller(0.7), Controller(0.7), Controller(0.7, beta=30.0)
    for value in values:
        whole.update(value)
    for value in values[:20]:
        first.update(value)
    checkpoint.save(tmp_path / "a.safetensors", first.state_dict())
    second.load_state_dict(checkpoint.load(tmp_path / "a.safetensors"))
    assert torch.equal(second.beta, first.beta)
    for value in values[20:]:
        second.update(value)
    assert torch.equal(second.beta, whole.beta)


# --- a real network --------------------------------------------------------------------------


def trained(
    controller: Controller | None, steps: int, adaptive_weight: AdaptiveWeight | None = None
) -> list[float]:
    """Return reducible nats per step of C-SimCLR on noisy vectors, beta controlled or 0."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16))
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
    mix = torch.randn(16, 32) / 4
    nats = []
    for _ in range(steps):
        shared = torch.randn(128, 16) @ mix
        x, y = (shared + 0.35 * torch.randn(128, 32) for _ in range(2))
        r_x, r_y = network(torch.cat([x, y])).chunk(2)
        beta: float | Tensor = 0.0 if controller is None else controller.beta
        out = csimclr_loss(
            r_x, r_y, beta=beta, residual_estimator="analytic", adaptive_weight=adaptive_weight
        )
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
        if controller is not None:
            controller.update(out.reducible_residual.mean())
        nats.append(out.reducible_residual.mean().item())
    return nats


@cache
def free_nats() -> float:
    """Return the reducible nats at beta = 0."""
    return float(np.mean(trained(None, 400)[-100:]))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("share", "adaptive_weight", "beta"),
    [
        pytest.param(0.5, None, 3.8, marks=pytest.mark.stress),
        pytest.param(0.5, "likelihood", 9.6, marks=pytest.mark.slow),
        pytest.param(0.2, "rank", 27.3, marks=pytest.mark.stress),
    ],
)
def test_network_keeps_the_target_fraction_of_its_nats(
    share: float, adaptive_weight: AdaptiveWeight | None, beta: float
) -> None:
    """Means over 50 steps vary by 1 %: a batch's nats vary by 6 %, divided by the root of 50.

    `beta` is the first measured value.
    """
    target = share * free_nats()
    controller = Controller(target, horizon=50)
    nats = trained(controller, 500, adaptive_weight)
    for start in (350, 400, 450):
        assert np.mean(nats[start : start + 50]) == pytest.approx(target, rel=0.05)
    assert controller.beta.item() == pytest.approx(beta, rel=0.3)


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_likelihood_weighting_limits_compression() -> None:
    """Images that z no longer predicts are penalized less, so nats stop above a low target.

    There is no collapse. First measured at 1.2 of the target, with beta at its upper limit.
    """
    target = 0.2 * free_nats()
    controller = Controller(target, horizon=50)
    nats = trained(controller, 500, "likelihood")
    assert controller.beta.item() == pytest.approx(MOST)
    assert 1.1 < np.mean(nats[-100:]) / target < 1.3


# --- processes and devices -------------------------------------------------------------------


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
    controller = Controller(1.0)
    for value in process_nats():
        controller.update(value[rank])
    torch.save(controller.beta, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def process_nats() -> Tensor:
    return torch.rand(30, 2, generator=torch.Generator().manual_seed(3)) * 4


@pytest.mark.slow
@pytest.mark.distributed
def test_processes_update_beta_by_their_common_mean(tmp_path: Path) -> None:
    """Equal up to the rounding of a float32 mean that is computed in two parts."""
    together(worker, (str(tmp_path),), 2)
    alone = Controller(1.0)
    for value in process_nats():
        alone.update(value.mean())
    for rank in range(2):
        beta = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        torch.testing.assert_close(beta, alone.beta, rtol=1e-6, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_update_does_not_synchronize_the_gpu() -> None:
    there, here = Controller(1.0, device="cuda"), Controller(1.0)
    values = torch.rand(20) * 3
    on_device = values.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for i in range(20):
            there.update(on_device[i])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for value in values:
        here.update(value)
    torch.testing.assert_close(there.beta.cpu(), here.beta, rtol=1e-5, atol=0)

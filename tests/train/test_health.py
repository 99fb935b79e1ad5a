"""Metrics are correct means, and divergence and collapse are detected."""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import unit_vectors
from processes import together
from torch import Tensor, nn

from compressive import config, metrics
from compressive.objectives import csimclr_loss
from compressive.rundir import checkpoint
from compressive.rundir.metrics_log import MetricsLogger
from compressive.train.health import (
    AsyncMetrics,
    EmbeddingStats,
    Health,
    HealthStatus,
    Reading,
    embedding_stats,
)

# --- embedding statistics --------------------------------------------------------------------


def naive_stats(r: Tensor) -> list[float]:
    """Compute the definitions pair by pair and eigenvalue by eigenvalue, in float64."""
    rows = [row / np.linalg.norm(row) for row in r.double().numpy()]
    n, dim = len(rows), len(rows[0])
    deviations = np.std(np.array(rows), axis=0, ddof=1)
    cosines = [rows[i] @ rows[j] for i in range(n) for j in range(n) if i != j]
    values = np.linalg.eigvalsh(np.cov(np.array(rows).T))
    return [
        float(deviations.mean() * math.sqrt(dim)),
        float(np.mean(cosines)),
        float(values.sum() ** 2 / (values**2).sum()),
    ]


@pytest.mark.parametrize("shape", [(40, 8), (8, 40), (2, 2), (17, 17)])
def test_embedding_stats_match_their_definitions(shape: tuple[int, int]) -> None:
    """Tolerance 1e-5: float32 sums of up to 40 values against float64."""
    r = 3 * torch.randn(shape) + torch.linspace(0, 4, shape[1])
    torch.testing.assert_close(
        torch.stack(embedding_stats(r)), torch.tensor(naive_stats(r)), rtol=1e-5, atol=1e-5
    )


def test_embedding_stats_of_uniform_and_collapsed_directions() -> None:
    """n uniform directions in dim dimensions have a ratio of about n dim / (n + dim)."""
    uniform = embedding_stats(unit_vectors(4096, 32, dtype=torch.float32))
    assert float(uniform.embedding_std) == pytest.approx(1, abs=0.01)
    assert float(uniform.cosine) == pytest.approx(0, abs=0.001)
    assert float(uniform.participation_ratio) == pytest.approx(4096 * 32 / (4096 + 32), rel=0.01)

    direction = unit_vectors(1, 32, dtype=torch.float32)
    point = embedding_stats(direction * torch.rand(64, 1).add(0.1))
    assert float(point.embedding_std) < 1e-3
    assert float(point.cosine) == pytest.approx(1, abs=1e-5)
    assert not torch.stack(embedding_stats(torch.ones(64, 4))).isnan().any()

    line = embedding_stats(direction * torch.randn(64, 1).sign())
    assert float(line.participation_ratio) == pytest.approx(1, abs=1e-4)


def test_embedding_stats_use_float32_under_autocast() -> None:
    r = torch.randn(64, 16).bfloat16()
    expected = torch.tensor(naive_stats(r.float()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = torch.stack(embedding_stats(r))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert not found.requires_grad


def test_participation_ratio_is_below_the_effective_rank() -> None:
    """Rényi entropies fall with their order: 2 on variances here, 1 on their square roots there."""
    r = torch.randn(64, 16) * torch.logspace(0, -2, 16)
    rank = metrics.effective_rank(torch.nn.functional.normalize(r, dim=1), center=True)
    assert 1 < embedding_stats(r).participation_ratio < rank


def test_untrained_network_is_not_a_collapse() -> None:
    """Check the numbers in the docstring of EmbeddingStats.

    Batch norm separates directions from the start.
    """
    from compressive import networks  # not at the top: every subprocess would import timm

    torch.manual_seed(1)
    network = nn.Sequential(networks.backbone("resnet18"), networks.mlp(512, 512, 256))
    with torch.no_grad():
        found = embedding_stats(network(torch.randn(32, 3, 32, 32)))
    assert found.embedding_std > 0.7
    assert found.cosine < 0.5
    assert found.participation_ratio > 5


# --- metrics ---------------------------------------------------------------------------------


def numbers(*values: float) -> Iterator[Tensor]:
    return map(torch.tensor, values)


def test_reading_averages_each_name_over_its_own_calls() -> None:
    readings = AsyncMetrics()
    assert readings.poll(wait=True) is None
    for loss, rate in [(1.0, 5.0), (2.0, 7.0), (6.0, 0.0)]:
        readings.add({"loss": torch.tensor(loss).requires_grad_(), "rate": torch.tensor(rate)})
    readings.add({"seldom": torch.tensor(9.0, dtype=torch.bfloat16)})
    readings.flush(30)
    readings.flush(35)  # nothing was added
    readings.add({"loss": torch.tensor(math.nan)})
    readings.flush(40)
    assert readings.poll() == Reading(30, {"loss": 3.0, "rate": 4.0, "seldom": 9.0})
    late = readings.poll()
    assert late is not None
    assert late.step == 40
    assert math.isnan(late.means["loss"])
    assert readings.poll() is None


def test_partial_means_survive_a_checkpoint(tmp_path: Path) -> None:
    once, before, after = AsyncMetrics(), AsyncMetrics(), AsyncMetrics()
    values = torch.rand(6)
    for i, value in enumerate(values):
        once.add({"loss": value})
        (before if i < 4 else after).add({"loss": value})
        if i == 3:
            before.add({"other": value})
            once.add({"other": value})
            checkpoint.save(tmp_path / "a.safetensors", {"metrics": before.state_dict()})
            after.load_state_dict(checkpoint.load(tmp_path / "a.safetensors")["metrics"])
    once.flush(6)
    after.flush(6)
    assert after.poll() == once.poll() is not None


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
    readings = AsyncMetrics()
    readings.add(dict(zip("abc", numbers(1.0 + rank, 0.1 * (rank + 1), 3.0), strict=True)))
    readings.flush(1)
    reading = readings.poll()
    assert reading is not None
    journal = MetricsLogger(Path(folder), tensorboard=True)
    journal.write(1, {"rank": rank})
    journal.close()
    Path(folder, f"{rank}.json").write_text(json.dumps(reading.means))
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.distributed
def test_processes_read_equal_means_and_only_rank_0_writes(tmp_path: Path) -> None:
    together(worker, (str(tmp_path),), 2)
    first, second = (json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2))
    assert first == second, "bitwise"
    assert first == pytest.approx({"a": 1.5, "b": 0.15, "c": 3.0}, rel=1e-6)
    _, line = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {"step": 1, "rank": 0}
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


# --- health ------------------------------------------------------------------------------------

WELL = {"loss": 5.0, "embedding_std": 0.9, "cosine": 0.1, "participation_ratio": 40.0}
NARROW = {**WELL, "embedding_std": 0.02, "participation_ratio": 30.0}
FLAT = {**WELL, "participation_ratio": 1.1}


def verdicts(health: Health, *points: dict[str, float], start: int = 0) -> list[str]:
    """Return the states of readings 10 steps apart."""
    return [health.check(Reading(start + 10 * i, p)).state for i, p in enumerate(points)]


def test_nonfinite_loss_is_a_failure() -> None:
    health = Health(config.Config(method="byol"), warmup=100)
    for value in (math.nan, math.inf, -math.inf):
        found = health.check(Reading(1, {**WELL, "loss": value}))
        assert found.is_failed
        assert not health.is_well
        assert re.search(r"^nan: .*optim\.lr .*optim\.warmup_epochs", found.text)
    assert health.check(Reading(2, {**WELL, "embedding_std": math.nan})).state == "nan"
    found = health.check(Reading(3, WELL))
    assert found.state == "ok"
    assert re.search(r"^ok: .* 0\.90 .* 40\.0 of 256$", found.text)
    assert health.is_well


def test_collapse_needs_three_consecutive_log_points() -> None:
    health = Health(config.Config(), warmup=0)
    assert verdicts(health, WELL, NARROW, NARROW, WELL, NARROW, NARROW) == ["ok"] * 6
    assert not health.is_well, "nothing is saved while a collapse is suspected"
    found = health.check(Reading(60, NARROW))
    assert found.state == "collapse"
    assert re.search(r"^collapse: .* 0\.02 .* 30\.0 of 256; .*bottleneck\.beta", found.text)
    assert re.search(r"optim\.lr .*optim\.warmup_epochs$", found.text)
    assert found.is_failed
    flat = Health(config.Config(), warmup=0)
    assert verdicts(flat, WELL, FLAT, FLAT, FLAT) == ["ok", "ok", "ok", "collapse"]


def test_low_spread_and_rank_are_allowed_during_warmup() -> None:
    def states(*points: dict[str, float]) -> list[str]:
        return verdicts(Health(config.Config(), warmup=100), *points)

    assert states(*[NARROW] * 10) == ["ok"] * 10
    assert states(*[NARROW] * 13) == ["ok"] * 12 + ["collapse"], "steps 100, 110, 120"
    assert states(*[FLAT] * 13) == ["ok"] * 12 + ["collapse"]
    assert states(WELL, *[FLAT] * 9) == ["ok"] * 10
    assert states(WELL, *[NARROW] * 3) == ["ok"] * 3 + ["collapse"], (
        "a healthy reading ends the grace period"
    )


def test_collapse_limits_come_from_the_settings() -> None:
    mild = replace(
        config.Config(), health=config.Health(collapse_std=0.01, min_participation_ratio=1.05)
    )
    assert verdicts(Health(mild, warmup=0), *[NARROW, FLAT] * 3) == ["ok"] * 6
    strict = replace(
        config.Config(), health=config.Health(collapse_std=0.95, min_participation_ratio=2.0)
    )
    assert verdicts(Health(strict, warmup=0), *[WELL] * 3)[-1] == "collapse"
    steered = config.override(config.Config(), "bottleneck.target_residual=0.5")
    health = Health(steered, warmup=0)
    verdicts(health, NARROW, NARROW)
    text = health.check(Reading(9, NARROW)).text
    assert re.search(r"bottleneck\.target_residual.*optim\.lr", text)


def test_required_rank_is_capped_by_the_batch_size() -> None:
    """Four well-spread images vary along at most three axes, two along one."""
    for batch, accumulate in ((2, 1), (4, 1), (8, 2)):
        settings = config.Train(batch_size=batch, grad_accum_steps=accumulate)
        health = Health(config.Config(method="byol", train=settings), warmup=0)
        portions = (embedding_stats(torch.randn(batch // accumulate, 256)) for _ in range(20))
        points = [{"loss": 1.0, **{k: v.item() for k, v in p._asdict().items()}} for p in portions]
        assert verdicts(health, *points) == ["ok"] * 20


def losses(count: int, seed: int = 0) -> list[float]:
    """Return losses with slope -0.01 per step and noise of standard deviation 0.05."""
    noise = np.random.default_rng(seed).normal(0, 0.05, count)
    return [5 - 0.01 * i + float(noise[i]) for i in range(count)]


def test_spikes_are_found_and_do_not_mask_each_other() -> None:
    series = losses(100)
    for place, height in ((50, 5.0), (53, 0.6), (90, 0.6)):  # all far above the noise
        series[place] += height
    found = verdicts(Health(config.Config(), warmup=0), *[{**WELL, "loss": x} for x in series])
    assert [i for i, state in enumerate(found) if state == "spike"] == [50, 53, 90]


def test_spike_is_reported_but_not_a_failure() -> None:
    health = Health(config.Config(), warmup=0)
    verdicts(health, *[{**WELL, "loss": x} for x in (5.0, 5.2, 5.1, 4.9, 5.0)])
    found = health.check(Reading(60, {**WELL, "loss": 6.0}))
    # mean 5.04, deviation 0.11402: (6 - 5.04) / 0.11402 = 8.42
    assert found.state == "spike"
    assert re.search(r"^spike: loss 6, 8\.4 ", found.text)
    assert not found.is_failed
    assert health.is_well


def test_constant_loss_may_rise_by_a_small_fraction() -> None:
    """The deviation is almost 0, so 1 % of the mean is used instead."""
    series = [5.0] * 10 + [5.1, 5.2]
    found = verdicts(Health(config.Config(), warmup=0), *[{**WELL, "loss": x} for x in series])
    assert found == ["ok"] * 11 + ["spike"]


def test_data_wait_names_no_setting_that_is_used() -> None:
    data = config.Data(decode_on_device="yes")
    health = Health(config.Config(data=data), warmup=0)
    assert "decode_on_device" not in health.check(Reading(0, WELL), data_wait_fraction=0.5).text


def test_data_wait_is_reported_but_not_a_failure() -> None:
    health = Health(config.Config(), warmup=0)
    assert health.check(Reading(0, WELL), data_wait_fraction=0.09).state == "ok"
    found = health.check(Reading(1, WELL), data_wait_fraction=0.43)
    assert found.state == "starved"
    assert re.search(r"43%.*data\.cache_on_device=yes.*data\.decode_on_device=yes", found.text)
    assert not found.is_failed
    assert health.is_well


@pytest.mark.slow
def test_health_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    series = [{**WELL, "loss": x} for x in losses(40)]
    series[25]["loss"] += 1
    series[29:33] = [NARROW] * 4
    whole = Health(config.Config(), warmup=1000)
    expected = [whole.check(Reading(i, p)) for i, p in enumerate(series)]
    assert {v.state for v in expected} == {"ok", "spike", "collapse"}
    for cut in range(len(series)):
        first, second = Health(config.Config(), warmup=1000), Health(config.Config(), warmup=1000)
        found = [first.check(Reading(i, p)) for i, p in enumerate(series[:cut])]
        second.load_state_dict(json.loads(json.dumps(first.state_dict())))
        found += [second.check(Reading(cut + i, p)) for i, p in enumerate(series[cut:])]
        assert found == expected
    checkpoint.save(tmp_path / "a.safetensors", whole.state_dict())
    assert checkpoint.load(tmp_path / "a.safetensors") == whole.state_dict()


def trained(beta: float, steps: int) -> list[HealthStatus]:
    """Train a small C-SimCLR network on pairs of noisy vectors, with 10 steps per log point."""
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Linear(32, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16, bias=False)
    )
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    settings = replace(config.Config(), network=config.Network(projection_dim=16))
    readings, health, found = AsyncMetrics(), Health(settings, warmup=0), []
    for step in range(1, steps + 1):
        shared = torch.randn(64, 32)
        r_x, r_y = (network(shared + 0.5 * torch.randn(64, 32)) for _ in range(2))
        out = csimclr_loss(r_x, r_y, beta=beta, residual_estimator="analytic")
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
        readings.add({"loss": out.loss, **embedding_stats(r_x)._asdict()})
        if step % 10 == 0:
            readings.flush(step)
            reading = readings.poll(wait=True)
            assert reading is not None
            found.append(health.check(reading))
    return found


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_high_beta_collapses_and_moderate_beta_does_not() -> None:
    fair, dear = trained(1.0, 150), trained(100.0, 150)
    assert not any(v.is_failed for v in fair), fair
    assert dear[-1].state == "collapse", dear


# --- on a GPU --------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_reading_does_not_synchronize_the_gpu() -> None:
    r, big = torch.randn(512, 256, device="cuda"), torch.randn(8192, 8192, device="cuda")
    expected = embedding_stats(r.cpu())
    readings = AsyncMetrics()
    readings.add(embedding_stats(r)._asdict())  # the first pinned memory allocation synchronizes
    readings.flush(0)
    readings.poll(wait=True)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            big = big @ big / 8192
        for _ in range(3):
            readings.add(embedding_stats(r)._asdict())
        readings.flush(1)
        too_early = readings.poll()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert too_early is None, "the device was still multiplying"
    reading = readings.poll(wait=True)
    assert reading is not None
    found = torch.tensor([reading.means[name] for name in EmbeddingStats._fields])
    torch.testing.assert_close(found, torch.stack(expected), rtol=1e-4, atol=1e-4)


def test_required_rank_depends_on_the_microbatch_size() -> None:
    """Two images vary along one axis, below 1.5, so a rank of only (2 - 1) / 4 is required."""
    settings = config.Train(batch_size=32, grad_accum_steps=16)
    health = Health(config.Config(method="byol", train=settings), warmup=0)
    portions = (embedding_stats(torch.randn(2, 256)) for _ in range(5))
    points = [{"loss": 1.0, **{k: v.item() for k, v in p._asdict().items()}} for p in portions]
    assert verdicts(health, *points) == ["ok"] * 5

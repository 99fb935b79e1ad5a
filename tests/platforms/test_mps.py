"""Training and evaluation on a device without float64, compared with the CPU (`emulated_mps`)."""

import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from emulated_mps import EmulatedTensor, emulated_mps
from safetensors.torch import load_file
from tiny import silent, tiny
from torch import Tensor
from torch.distributions import kl_divergence

from compressive import metrics
from compressive.augment.ops import augment, center_crop
from compressive.augment.params import paper_views
from compressive.augment.published_crop import PublishedCrop
from compressive.corruptions.corrupt import EXTRAS, NAMES, corrupt
from compressive.distributions.uniform import HypersphericalUniform
from compressive.distributions.vmf import VonMisesFisher
from compressive.evaluation import logistic
from compressive.evaluation.suite import evaluate
from compressive.evaluation.tasks.tsne import tsne
from compressive.platforms.float64 import from_float64, to_float64
from compressive.rng import image_keys
from compressive.train.loop import pretrain

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def device() -> Iterator[torch.device]:
    with emulated_mps() as found:
        yield found


def host(found: Any) -> list[Tensor]:
    """Return all tensors of nested tuples on the CPU."""
    if isinstance(found, Tensor):
        return [found.detach().cpu()]
    return [tensor for each in found for tensor in host(each)] if isinstance(found, tuple) else []


def assert_same(function: Callable[[torch.device], Any]) -> None:
    """Compare a function of the device on the CPU and on the emulated MPS, bit by bit."""
    expected = host(function(torch.device("cpu")))
    with emulated_mps() as device:
        found = function(device)
        tensors = host(found)
    assert tensors
    assert all(map(torch.equal, tensors, expected))


def test_emulated_device_rejects_what_the_real_one_rejects(device: torch.device) -> None:
    x = torch.arange(3, device=device).float()
    assert isinstance(x, EmulatedTensor)
    assert x.device.type == "mps"
    for make in (
        x.double,
        lambda: x.to(torch.float64),
        lambda: torch.zeros(3, dtype=torch.float64, device=device),
        lambda: x.new_full((), 1.0, dtype=torch.float64),
        lambda: x.sum(dtype=torch.float64),
        lambda: torch.ones(3, dtype=torch.float64).to(device),
        lambda: torch.tensor([1.0], dtype=torch.float64, device=device),
    ):
        with pytest.raises(TypeError, match="float64"):
            make()
    with pytest.raises(RuntimeError, match="on mps:0"):
        _ = x + torch.ones(3)
    assert type(x.cpu() + torch.ones(3)) is Tensor


def test_float64_values_leave_the_device_and_return_rounded(device: torch.device) -> None:
    x = torch.tensor([1.0, 3.0], device=device)
    exact = to_float64(x)
    assert (exact.device.type, exact.dtype) == ("cpu", torch.float64)
    back = from_float64(exact / 3, device)
    assert (back.device.type, back.dtype) == ("mps", torch.float32)
    assert torch.equal(back.cpu(), (torch.tensor([1.0, 3.0], dtype=torch.float64) / 3).float())
    assert from_float64(exact, torch.device("cpu")) is exact


@pytest.mark.parametrize("dim", [8, 64])
def test_von_mises_fisher_gives_the_same_samples_densities_and_gradients(dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    directions = torch.nn.functional.normalize(torch.randn(2, 5, dim, generator=generator), dim=-1)
    kappas = torch.rand(5, generator=generator) * 20

    def measure(device: torch.device) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        mu, other = directions.clone().to(device)
        mu, kappa = mu.detach().requires_grad_(), kappas.clone().to(device).requires_grad_()
        found: list[Tensor] = []
        for concentration in (10.0, kappa):
            e, b = VonMisesFisher(mu, concentration), VonMisesFisher(other, 3.0)
            z = e.rsample()
            found += [z, e.log_prob(z), e.entropy(), e.mean, e.variance, e.log_normalizer]
            found += [kl_divergence(e, b), kl_divergence(e, HypersphericalUniform(dim))]
        sum(each.sum() for each in found).backward()  # pyright: ignore[reportAttributeAccessIssue]
        assert mu.grad is not None
        assert kappa.grad is not None
        return (*found, mu.grad, kappa.grad)

    assert_same(measure)


def test_views_and_crops_are_the_same() -> None:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (6, 3, 20, 24), generator=generator).byte()

    def make(device: torch.device) -> tuple[Tensor, ...]:
        x, height = images.to(device), torch.full((6,), 20, device=device)
        sizes: Any = {"height": height, "width": height + 4}
        keys = image_keys(torch.arange(6, device=device), seed=1, epoch=2, view=1)
        views = [augment(x, keys, view, 16, **sizes) for view in paper_views()]
        return *views, center_crop(x, 16, **sizes), PublishedCrop()(x, 16)

    assert_same(make)


@pytest.mark.parametrize("name", sorted({*NAMES, *EXTRAS} - {"frost"}))
def test_corruptions_are_the_same(name: str) -> None:
    images = torch.randint(256, (2, 3, 32, 32), generator=torch.Generator().manual_seed(0)).byte()
    index = torch.arange(2)
    assert_same(lambda device: corrupt(images.to(device), name, 3, index=index.to(device)))


def test_metrics_are_the_same_and_on_the_device() -> None:
    generator = torch.Generator().manual_seed(0)
    given = torch.randn(40, 6, generator=generator)
    classes = torch.randint(6, (40,), generator=generator)

    def measure(device: torch.device) -> tuple[Any, ...]:
        x, labels = given.to(device), classes.to(device)
        found = (
            metrics.ece(x, labels),
            metrics.brier(x, labels),
            metrics.effective_rank(x, center=True),
            metrics.uniformity(x),
            metrics.alignment(x, x.flip(0)),
            *metrics.bootstrap_interval(x[:, 0]),
            tsne(x, steps=20),
        )
        assert {each.device.type for each in found} == {device.type}
        return found

    assert_same(measure)


def test_logistic_regression_is_the_same() -> None:
    generator = torch.Generator().manual_seed(0)
    given = torch.randn(60, 5, generator=generator)
    classes = torch.randint(3, (60,), generator=generator)

    def measure(device: torch.device) -> tuple[Tensor, ...]:
        feats, labels = given.to(device), classes.to(device)
        parts = (feats[:40], labels[:40]), (feats[40:], labels[40:])
        options: Any = {"classes": 3, "penalties": (0.1, 1.0, 10.0)}
        chosen = logistic.select(*parts, metrics.top_k_accuracy, **options)
        logits = chosen.fit.logits(feats)
        assert logits.device.type == device.type
        return logits.float(), chosen.fit.weight, chosen.sweep.loss

    assert_same(measure)


def trained(method: str, device: str, folder: Path) -> Path:
    """Train two steps, resume, and return the run of four steps."""
    # Outside of the emulation, the CPU is as it is, and takes a third of the time.
    with emulated_mps() if device == "mps" else nullcontext():
        config = tiny(f"method={method}", f"train.device={device}", "train.steps=4")
        run = folder / device
        with pytest.MonkeyPatch.context() as same:
            # ARM CPUs have convolutions of their own, which round differently.
            same.setattr("compressive.train.arm_convolutions.has_slow_gradients", lambda _: False)
            with pytest.MonkeyPatch.context() as early:
                early.setattr("compressive.train.loop._should_stop", lambda run, *_: run.step == 2)
                assert pretrain(config, run, display=silent()).step == 2
            assert pretrain(config, run, display=silent()).step == 4
    return run


def evaluated(run: Path, tasks: str) -> tuple[dict[tuple[str, ...], float], dict[str, Any]]:
    """Evaluate a run on the device of its name; return all values and the description."""
    with emulated_mps():
        evaluate(run, device=run.name, tasks=tasks, epochs=1, display=silent())
    found = json.loads((run / "evaluation" / "results.json").read_text())
    values = {(r["task"], r["dataset"], r["metric"]): r["value"] for r in found["records"]}
    return values, found["about"]


@pytest.mark.slow
def test_run_is_trained_resumed_and_evaluated_as_on_the_cpu(tmp_path: Path) -> None:
    check_run("c-simclr", "geometry", 4, tmp_path)


@pytest.mark.stress
def test_every_task_gives_the_results_of_the_cpu(tmp_path: Path) -> None:
    check_run("c-simclr", "", 40, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["c-byol", "c-moco-v3", "vicreg", "dcl"])
def test_methods_are_trained_as_on_the_cpu(method: str, tmp_path: Path) -> None:
    check_weights([trained(method, name, tmp_path) for name in ("cpu", "mps")])


def check_weights(runs: list[Path]) -> None:
    cpu, mps = (load_file(run / "encoder.safetensors") for run in runs)
    assert all(torch.equal(mps[name], weight) for name, weight in cpu.items())


def check_run(method: str, tasks: str, least: int, folder: Path) -> None:
    runs = [trained(method, name, folder) for name in ("cpu", "mps")]
    check_weights(runs)
    (cpu, _), (mps, about) = (evaluated(run, tasks) for run in runs)
    assert len(cpu) >= least
    assert mps == pytest.approx(cpu, rel=1e-6, nan_ok=True)
    assert about["device"] == "Apple GPU"

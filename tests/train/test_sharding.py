"""Runs with sharded weights (FSDP2) match DistributedDataParallel; sharded checkpoints resume."""

import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import together
from safetensors.torch import load_file
from tiny import differences, silent, tiny
from torch import Tensor, nn

from compressive.config import Config
from compressive.distributed import is_sharded, shard, whole_tensor
from compressive.methods import build
from compressive.optim import LARS, parameter_groups
from compressive.rundir import checkpoint
from compressive.rundir.sharded_checkpoint import load_shards
from compressive.train import sharding
from compressive.train.loop import pretrain
from compressive.train.sharding import shard_learner
from compressive.train.step import Learner

needs_fsdp = pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11), reason="FSDP2 on CPUs"
)
METHODS = ("c-simclr", "c-byol")


def config_of(method: str, parallel: str, *changes: str) -> Config:
    return tiny(
        f"method={method}",
        f"train.parallel={parallel}",
        "optim.name=lars",
        "optim.clip_norm=5",
        "train.steps=5",
        "bottleneck.beta=0.1",
        "train.precision=float32",
        *changes,
    )


def whole_state(run: Path) -> dict[str, Any]:
    """Return the last checkpoint with whole tensors, read in one process."""
    found = checkpoint.latest(run / "checkpoints")
    assert found is not None
    state = load_shards(*found, "cpu", sharded=False)
    state.pop("run_id")
    return state


def join(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=ranks)


def both_worker(rank: int, ranks: int, folder: str, configs: list[Config]) -> None:
    join(rank, ranks, folder)
    for config in configs:
        out = Path(folder) / f"{config.method}-{config.train.parallel}"
        pretrain(config, out, display=silent())
    dist.destroy_process_group()


@needs_fsdp
@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.stress)])
def test_five_steps_match_ddp(ranks: int, tmp_path: Path) -> None:
    """Weights, EMA target, momenta, statistics and kNN agree to rounding in float32.

    Convolutions get weights in another memory format, and gradients of the two views are summed
    after the average over processes, not before: 1e-4 of the largest value of a tensor.
    """
    configs = [config_of(method, kind) for method in METHODS for kind in ("ddp", "fsdp")]
    together(both_worker, (ranks, str(tmp_path), configs), ranks)
    for method in METHODS:
        ddp, fsdp = (tmp_path / f"{method}-{kind}" for kind in ("ddp", "fsdp"))
        old, new = whole_state(ddp), whole_state(fsdp)
        assert old["step"] == new["step"] == 5
        assert old["learner"].keys() == new["learner"].keys()
        for name, weight in old["learner"].items():
            close(new["learner"][name], weight, name)
        for key, moments in old["optimizer"]["state"].items():
            close(new["optimizer"]["state"][key]["momentum_buffer"], moments["momentum_buffer"])
        assert old["accuracy"][1:] == new["accuracy"][1:]  # kNN and the number of images
        encoders = [load_file(run / "encoder.safetensors") for run in (ddp, fsdp)]
        assert encoders[0].keys() == encoders[1].keys()
        for name, weight in encoders[0].items():
            close(encoders[1][name], weight, name)
        parts = sorted((fsdp / "checkpoints").glob("step_00000005.*.shards/*"))
        assert len(parts) == ranks
        assert not any(parts[0].parent.glob("*metadata*"))  # torch's default is a pickle


def close(found: Tensor, wanted: Tensor, name: str = "") -> None:
    assert found.shape == wanted.shape
    error = (found.double() - wanted.double()).abs().max()
    assert error <= 1e-4 * max(float(wanted.abs().max()), 1e-3), (name, float(error))


def lars_worker(rank: int, ranks: int, folder: str) -> None:
    """Compare LARS on sharded float64 weights with whole ones; 3 rows leave ranks without any."""
    join(rank, ranks, folder)
    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).double())
    shard([models[1]])
    assert is_sharded(models[1])
    assert not is_sharded(models[0])
    optimizers = [LARS(parameter_groups(m, weight_decay=0.1), 0.5) for m in models]
    for step in range(4):
        x = torch.randn(6, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        for model, optimizer in zip(models, optimizers, strict=True):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    for whole, part in zip(*(m.parameters() for m in models), strict=True):
        torch.testing.assert_close(whole_tensor(part), whole, rtol=1e-12, atol=1e-13)
    dist.destroy_process_group()


@needs_fsdp
@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("ranks", [2, 4])
def test_lars_uses_norms_of_whole_tensors(ranks: int, tmp_path: Path) -> None:
    together(lars_worker, (ranks, str(tmp_path)), ranks)


def run_worker(rank: int, ranks: int, folder: str, out: str, steps: int, config: Config) -> None:
    """Train until a step, at which a callback stops the run."""
    join(rank, ranks, folder)

    def stop(step: int, metrics: Mapping[str, float | str]) -> None:
        if step >= steps:
            raise RuntimeError("stop")

    with suppress(RuntimeError):
        callbacks = [stop] if steps < config.train.steps else []
        pretrain(config, out, display=silent(), callbacks=callbacks)
    dist.destroy_process_group()


def trained(folder: Path, name: str, *parts: tuple[int, int]) -> dict[str, Any]:
    """Train in parts, each with a number of ranks and the step at which it ends."""
    config = config_of("c-byol", "fsdp", "optim.name=adamw", "train.steps=6")
    for number, (ranks, steps) in enumerate(parts):
        meeting = folder / f"{name}-{number}"
        meeting.mkdir()
        arguments = ranks, str(meeting), str(folder / name), steps, config
        together(run_worker, arguments, ranks)
    return whole_state(folder / name)


@needs_fsdp
@pytest.mark.stress
@pytest.mark.distributed
def test_sharded_checkpoints_resume(tmp_path: Path) -> None:
    """Resume bitwise with 2 ranks, and with 4 to rounding."""
    whole = trained(tmp_path, "whole", (2, 6))
    resumed = trained(tmp_path, "resumed", (2, 3), (2, 6))
    assert differences(whole, resumed) == []
    others = trained(tmp_path, "others", (2, 3), (4, 6))
    for name, weight in whole["learner"].items():
        error = (others["learner"][name].double() - weight.double()).norm()
        assert error <= 1e-2 * weight.double().norm() + 1e-3, name


def save_worker(rank: int, ranks: int, folder: str) -> None:
    from compressive.rundir.sharded_checkpoint import save_sharded_step

    join(rank, ranks, folder)
    torch.manual_seed(0)
    model = nn.Linear(6, 5)
    shard([model])
    place = Path(folder) / "checkpoints"
    for step in (1, 2, 3):
        state = {"learner": model.state_dict(), "step": step, "list": [1, {"x": model.weight}]}
        save_sharded_step(place, step, state)
    if rank == 0:
        assert sorted(path.name.split(".")[0] for path in place.glob("*.shards")) == [
            "step_00000002",
            "step_00000003",
        ]
    dist.destroy_process_group()


@needs_fsdp
@pytest.mark.slow
@pytest.mark.distributed
def test_incomplete_or_damaged_parts_are_skipped(tmp_path: Path) -> None:
    together(save_worker, (2, str(tmp_path)), 2)
    place = tmp_path / "checkpoints"
    torch.manual_seed(0)
    expected = nn.Linear(6, 5)
    path = place / "step_00000003.safetensors"
    state = load_shards(path, checkpoint.load(path), "cpu", sharded=False)
    assert torch.equal(state["learner"]["weight"], expected.weight)
    assert torch.equal(state["list"][1]["x"], expected.weight)
    part = sorted(place.glob("step_00000003.*.shards/*"))[1]
    content = part.read_bytes()
    part.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(checkpoint.Damaged, match="checksum"):
        load_shards(path, checkpoint.load(path), "cpu", sharded=False)
    part.write_bytes(content[:-1])
    found = checkpoint.latest(place)
    assert found is not None
    assert found[1]["step"] == 2
    shutil.rmtree(next(place.glob("step_00000002.*.shards")))
    with pytest.raises(ValueError, match="damaged"):
        checkpoint.latest(place)


def test_foreign_folder_of_parts_is_rejected(tmp_path: Path) -> None:
    state = {"shards": {"folder": "../elsewhere", "files": []}}
    with pytest.raises(checkpoint.Damaged, match="elsewhere"):
        load_shards(tmp_path / "step_00000001.safetensors", state, "cpu", sharded=False)


def test_sharding_is_rejected_where_it_does_not_work(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"train\.compile.*train\.parallel=fsdp"):
        config_of("c-simclr", "fsdp", "train.compile=yes")
    config = config_of("c-simclr", "fsdp")
    learner = Learner(build(config), 0)
    shard_learner(learner, config)  # one process: nothing to split
    assert not is_sharded(learner)
    monkeypatch.setattr(sharding, "world_size", lambda: 2)
    monkeypatch.setattr(torch, "__version__", "2.6.0+cpu")
    with pytest.raises(ValueError, match=r"train\.parallel=fsdp.*torch 2\.11.*2\.6\.0"):
        shard_learner(learner, config)

"""Machines without a shared file system get copies of the files of the first one."""

import os
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import together
from tiny import Written, tiny
from torch import nn

from compressive.config import Config
from compressive.distributed import machines
from compressive.methods import Method, build
from compressive.rundir import checkpoint
from compressive.rundir.machine_copies import (
    collect_from_machines,
    copied_folder,
    copy_to_machines,
)
from compressive.train.loop import pretrain

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
NEEDED = ("config.json", "checkpoints")
# Processes of each machine, and the folder that it sees: 1 shares that of 0.
MACHINES = [0, 0, 1, 2, 2, 3]
FOLDERS = {0: "a", 1: "a", 2: "b", 3: "c"}


def worker(rank: int, folder: str, check: Callable[[int, Path], None]) -> None:
    torch.set_num_threads(1)
    machines._SENT_BYTES = 7  # so that small files have several parts
    os.environ["GROUP_RANK"] = str(MACHINES[rank])
    size = len(MACHINES)
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=size)
    check(rank, Path(folder, FOLDERS[MACHINES[rank]]))
    dist.destroy_process_group()


def contents(folder: Path) -> dict[str, bytes]:
    found = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in found}


def write(folder: Path, **files: bytes) -> None:
    for name, content in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


FIRST = {"checkpoints/1": b"a" * 20, "checkpoints/empty": b"", "config.json": b"{}"}


def copy_and_collect(rank: int, place: Path) -> None:
    run, pending = place / "run", place / "run.pending"
    with copied_folder(run, pending, NEEDED):
        if place.name == "a":
            assert contents(run) == FIRST | {"metrics.jsonl": b"first"}
        else:
            own = {"metrics.jsonl": b"own"} if place.name == "b" else {}
            assert contents(run) == FIRST | own
            assert not pending.exists()
        dist.barrier()
        # Each process writes a part, which the first machine gets and the others delete.
        write(run, **{f"checkpoints__2.shards__{rank}": bytes([rank]) * 10 * rank})
        dist.barrier()
        collect_from_machines(run / "checkpoints/2.shards")
        parts = {str(k): bytes([k]) * 10 * k for k in range(len(MACHINES))}
        expected = parts if place.name == "a" else {}
        assert contents(run / "checkpoints/2.shards") == expected
        dist.barrier()
        copy_to_machines(run)
        assert contents(run / "checkpoints/2.shards") == parts
        dist.barrier()
    # Afterwards nothing is copied.
    write(run, **{"checkpoints__3": place.name.encode()})
    dist.barrier()
    copy_to_machines(run)
    assert contents(run)["checkpoints/3"] == place.name.encode()


def test_needed_files_are_copied_and_parts_collected(tmp_path: Path) -> None:
    """Three folders on four machines; two of the machines share the first folder."""
    write(tmp_path / "a/run", **{n.replace("/", "__"): c for n, c in FIRST.items()})
    write(tmp_path / "a/run", **{"metrics.jsonl": b"first"})
    # An earlier state of another order of machines: the same size, but other bytes.
    write(tmp_path / "b/run", checkpoints__1=b"b" * 20, checkpoints__9=b"later")
    write(tmp_path / "b/run", **{"metrics.jsonl": b"own"})
    write(tmp_path / "b", **{"run.pending": b""})
    together(worker, (str(tmp_path), copy_and_collect), len(MACHINES))
    assert (tmp_path / "a/run.pending").exists()


def shared_worker(rank: int, place: Path) -> None:
    del rank
    with copied_folder(place / "run", place / "run.pending", NEEDED):
        collect_from_machines(place / "run/checkpoints/2.shards")
    assert contents(place / "run") == FIRST | {"checkpoints/2.shards/0": b"0"}


def shared(rank: int, folder: str) -> None:
    global FOLDERS
    FOLDERS = dict.fromkeys(FOLDERS, "a")
    worker(rank, folder, shared_worker)


def test_a_shared_folder_is_left_alone(tmp_path: Path) -> None:
    write(tmp_path / "a/run", **{n.replace("/", "__"): c for n, c in FIRST.items()})
    write(tmp_path / "a/run", **{"checkpoints__2.shards__0": b"0"})
    together(shared, (str(tmp_path),), len(MACHINES))


def diverge(rank: int, folder: str) -> None:
    """Train with a folder for each process; the third step has a NaN, once."""
    torch.set_num_threads(1)
    os.environ["GROUP_RANK"] = str(rank)
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
    steps = count(1)

    def spoil(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        views = [view.clone() for view in inputs[0]]
        views[0][0] *= torch.nan if next(steps) == 3 else 1
        return (views, *inputs[1:])

    def spoiled(config: Config) -> Method:
        method = build(config)
        method.register_forward_pre_hook(spoil)
        return method

    display, out = Written(), Path(folder, f"machine{rank}", "run")
    out.mkdir(parents=True)
    config = tiny("train.steps=4", "train.save_every=1e-9")
    with copied_folder(out, out.with_name("pending"), NEEDED):
        assert pretrain(config, out, display=display, method=spoiled).step == 4
    assert "resuming from step 2 of 4" in display.said
    assert len(checkpoint.steps(out / "checkpoints")) == 2
    dist.destroy_process_group()


def test_a_run_that_diverges_continues_on_all_machines(tmp_path: Path) -> None:
    """Only the first machine has the checkpoints since the start."""
    together(diverge, (str(tmp_path),), 2)

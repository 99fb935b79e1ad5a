"""Processes that hold a share of the images get the batches of one that holds all, bitwise."""

import ctypes
import os
import signal
import sys
from collections.abc import Iterable
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import together
from tiny import differences, journal, last, silent, tiny
from torch import Tensor

from compressive.config import Config, override
from compressive.data import shared_loader
from compressive.data.decode import Unreadable
from compressive.data.loaders import Batch, Resident, Streaming
from compressive.data.sampler import batch_index_stream
from compressive.data.shared_loader import open_shared_loader, split_bytes
from compressive.data.split_cache import SplitResident, routes, share_of
from compressive.train.loop import pretrain


class Numbered:
    """Images of different sizes and random pixels; some are unreadable, one may be an error."""

    name, classes = "numbered", None

    def __init__(self, count: int, side: int, bad: Iterable[int] = (), wrong: int = -1) -> None:
        self.side, self.bad, self.wrong = side, frozenset(bad), wrong
        self.labels = 3 * torch.arange(count) % 7
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, i: int) -> Tensor:
        self.read.append(i)
        if i in self.bad:
            raise Unreadable(f"reason {i}")
        if i == self.wrong:
            return torch.zeros(3, 4, 4)
        generator = torch.Generator().manual_seed(i)
        size = (3, 1 + i % self.side, self.side - i % 3)
        return torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)

    def origin(self, i: int) -> str:
        return f"place {i}"


def join(rank: int, world: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=world)


# images, batch, micro-batches, processes that hold the set together (0: all), side, damaged
CASES: dict[str, tuple[int, int, int, int, int, tuple[int, ...]]] = {
    "equal shares": (24, 12, 1, 0, 8, ()),
    "partial shares": (23, 12, 1, 0, 8, ()),
    "several epochs per batch": (5, 24, 2, 0, 6, ()),
    "a process without images": (2, 12, 1, 0, 5, ()),
    "rows of odd size": (13, 12, 1, 0, 5, ()),
    "damaged at the end of a share": (24, 12, 1, 0, 8, (5, 11, 23)),
    "damaged shares": (24, 24, 2, 0, 8, tuple(range(4, 19))),
    "pairs": (23, 12, 1, 2, 8, (5, 22)),
}


def unsplit(source: Numbered, batch: int, portions: int, side: int, steps: int) -> list[Batch]:
    """Return the batches of one process that holds all images."""
    plan = batch_index_stream(len(source), batch, seed=3, portions=portions)
    loader = Resident(source, side=side, device="cpu", workers=1)
    return list(islice(loader.batches(plan), steps * portions))


def compare_cases(rank: int, world: int, folder: Path, names: list[str]) -> None:
    join(rank, world, folder)
    for name in names:
        count, batch, portions, holders, side, bad = CASES[name]
        source, steps = Numbered(count, side, bad), 6
        holders = holders or world
        loader = SplitResident(source, side=side, device="cpu", processes=holders, workers=2)
        own = share_of(count, rank % holders, holders)
        if not bad:
            assert sorted(source.read) == list(own), name  # decodes its share and nothing else
        assert loader.bytes_held == len(own) * 3 * side**2
        whole = Resident(Numbered(count, side, bad), side=side, device="cpu", workers=1)
        assert loader.bad == whole.bad == sorted(bad), name
        assert loader.unreadable == whole.unreadable, name
        expected = unsplit(Numbered(count, side, bad), batch, portions, side, steps)
        share = batch // portions // world
        # From the start, and resumed in the middle; the first pass ends before its plan does.
        for step in (0, 2, 5):
            plan = batch_index_stream(
                count, batch, seed=3, step=step, portions=portions, rank=None, world=world
            )
            batches = loader.batches_of_rank(plan)
            wanted = expected[step * portions :]
            for k, (ours, theirs) in enumerate(zip(islice(batches, len(wanted)), wanted)):  # noqa: B905
                for field, a, b in zip(Batch._fields, ours, theirs, strict=True):
                    part = b[rank * share : (rank + 1) * share]
                    assert torch.equal(a, part), (name, step, k, field)
            batches.close()
        if rank == 0:  # one process alone, as for the online evaluation
            plan = batch_index_stream(count, batch, seed=3, portions=portions)
            for ours, theirs in zip(islice(loader.batches(plan), 3), expected[:3], strict=True):
                assert all(map(torch.equal, ours, theirs)), name
        loader.close()
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.distributed
def test_four_processes_match_one_bitwise(tmp_path: Path) -> None:
    together(compare_cases, (4, tmp_path, list(CASES)), 4)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("world", [2, 3, 6])
def test_other_numbers_of_processes_match_one_bitwise(world: int, tmp_path: Path) -> None:
    names = [name for name in CASES if name != "pairs" or world % 2 == 0]
    together(compare_cases, (world, tmp_path, names), world)


@pytest.mark.parametrize(("count", "processes", "own"), [(10, 4, 3), (3, 5, 2), (64, 8, 8)])
def test_routes_deliver_the_wanted_rows(count: int, processes: int, own: int) -> None:
    """Play all processes in one: deliver lists, and compare with plain indexing."""
    rows = torch.arange(count) * 11
    held = [rows[share_of(count, k, processes).start :][: len(share_of(count, k, processes))]
            for k in range(processes)]  # fmt: skip
    generator = torch.Generator().manual_seed(count)
    wanted = torch.randint(0, count, (processes, own), generator=generator)
    plans = [routes(wanted, count, k) for k in range(processes)]
    mail = [held[k][plan.send].split(plan.sent) for k, plan in enumerate(plans)]
    for k, plan in enumerate(plans):
        arrived = torch.cat([mail[holder][k] for holder in range(processes)])
        assert plan.received == [len(mail[holder][k]) for holder in range(processes)]
        assert torch.equal(arrived[plan.place], rows[wanted[k]])


@pytest.mark.parametrize(("count", "parts"), [(0, 3), (2, 4), (23, 4), (24, 4), (1_281_167, 8)])
def test_shares_are_disjoint_complete_and_balanced(count: int, parts: int) -> None:
    shares = [share_of(count, k, parts) for k in range(parts)]
    assert shares[0].start == 0
    assert shares[-1].stop == count
    assert all(a.stop == b.start for a, b in pairwise(shares))
    assert max(map(len, shares)) == -(-count // parts)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_memory_of_imagenet_on_eight_gpus() -> None:
    """252 GB of pixels: 31.5 GB each, with 9 batches of 512 images and 51 MB of numbers."""
    needed = split_bytes(1_281_167, 256, 8, 512)
    assert needed == 160_146 * 196_608 + 9 * 512 * 196_608 + 40 * 1_281_167
    assert needed / 1e9 == pytest.approx(31.49 + 0.91 + 0.05, abs=0.01)


def status(entry: str) -> int:
    """Return bytes of /proc/self/status: VmRSS now, VmHWM since the peak was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{entry}:"))


def measure_memory(rank: int, folder: Path) -> None:
    """Compare the formula with the memory of a process that trains on 100 of 200 images."""
    join(rank, 2, folder)
    count, side, batch = 200, 256, 64
    row = 3 * side**2
    source = Numbered(count, 8)
    ctypes.CDLL(None).mallopt(-3, 2**20)  # M_MMAP_THRESHOLD: return freed memory at once
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = status("VmRSS")
    loader = SplitResident(source, side=side, device="cpu", processes=2, workers=1)
    loader._held.images.fill_(1)  # padding takes memory only if it is written
    after = status("VmRSS") - before
    plan = batch_index_stream(count, 2 * batch, seed=0, rank=None, world=2)
    batches, peaks = loader.batches_of_rank(plan), list[int]()
    for _ in range(3):  # gloo's threads sometimes free memory late; growth would show in each
        Path("/proc/self/clear_refs").write_text("5")
        for _ in islice(batches, 12):
            pass
        peaks.append(status("VmHWM") - before)
    most = min(peaks)
    own = 100 * row  # the buffers in which images are decoded are freed or reused
    assert own < after < own + 4 * 100 * row
    # Sizes of exchanges vary, and gloo's threads may keep those of up to two.
    assert after + 3 * batch * row < most < after + shared_loader._BATCHES_HELD * batch * row
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.distributed
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_of_batches_is_bounded(tmp_path: Path) -> None:
    together(measure_memory, (tmp_path,), 2)


def choose(rank: int, folder: Path) -> None:
    """Choose a loader by memory: 96 images of 768 bytes, 2 per process, in pairs or all four."""
    join(rank, 4, folder)
    source = Numbered(96, 16)
    options: dict[str, Any] = {"side": 16, "device": "cpu", "batch": 2, "workers": 1}
    whole, pair, four = 73_728, 36_864 + 13_824 + 3_840, 18_432 + 13_824 + 3_840
    assert [split_bytes(96, 16, size, 2) for size in (2, 4)] == [pair, four]

    def chosen(free: int, setting: Any = "auto", local: int = 2) -> Any:
        # The processes of a machine share its memory. One of them has less free.
        os.environ["LOCAL_WORLD_SIZE"] = str(local)
        shared_loader.free_memory = lambda _: (free if rank == 3 else 10 * free) * local
        with open_shared_loader(source, cache_on_device=setting, **options) as loader:
            return loader.processes if isinstance(loader, SplitResident) else type(loader)

    # Half of the free memory is used by default, as by `open_loader`.
    assert [chosen(2 * whole - k) for k in (0, 1)] == [Resident, 2]
    assert [chosen(2 * pair - k) for k in (0, 1)] == [2, 4]
    assert [chosen(2 * four - k) for k in (0, 1)] == [4, Streaming]
    assert [chosen(2 * pair, local=k) for k in (1, 3, 4)] == [4, 4, 4]
    assert [chosen(2 * pair - k, "split") for k in (0, 1)] == [2, 4]
    assert chosen(10**9, "split") == 2
    assert chosen(four, "split") == 4
    assert chosen(10**9, "no") is Streaming
    assert chosen(10**9, "yes") is Resident
    with pytest.raises(ValueError, match=r"cache_on_device=split needs 0\.0 GB in each of 4 .*=no"):
        chosen(four - 1, "split")
    source = Numbered(96 + rank // 3, 16)
    with pytest.raises(ValueError, match=r"same images, got 96 .*, 97 images of 16 pixels$"):
        chosen(10**9)
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.distributed
def test_loader_is_chosen_by_the_memory_of_all_processes(tmp_path: Path) -> None:
    together(choose, (tmp_path,), 4)


def fail(rank: int, folder: Path) -> None:
    os.environ["COMPRESSIVE_COLLECTIVE_TIMEOUT"] = "60"  # a process that waits fails the test
    join(rank, 4, folder)
    kind, words = (ValueError, "place 13: ") if rank == 2 else (RuntimeError, "^process 2 .*13: ")
    with pytest.raises(kind, match=words):
        SplitResident(Numbered(24, 8, wrong=13), side=8, device="cpu", processes=4, workers=1)
    (folder / f"{rank}.txt").touch()
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.distributed
def test_all_processes_fail_with_one(tmp_path: Path) -> None:
    together(fail, (tmp_path,), 4)
    assert len(list(tmp_path.glob("*.txt"))) == 4


def train(rank: int, folder: Path, base: Config) -> None:
    """Train for 6 steps with all images in each process, and split with a stop in between."""
    join(rank, 2, folder)
    for name in ("yes", "split"):
        config = override(base, f"data.cache_on_device={name}")
        for stop in (3, 6) if name == "split" else (6,):

            def interrupt(step: int, _: Any, stop: int = stop) -> None:
                if step == stop < 6:
                    signal.raise_signal(signal.SIGTERM)

            done = pretrain(config, folder / name, display=silent(), callbacks=[interrupt])
            assert done.step == stop
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.distributed
def test_training_and_resuming_are_bitwise_equal(tmp_path: Path) -> None:
    settings = ("train.steps=6", "train.batch_size=16", "train.grad_accum_steps=2")
    together(train, (tmp_path, tiny("method=byol", *settings)), 2)
    assert not differences(last(tmp_path / "yes"), last(tmp_path / "split"))
    assert journal(tmp_path / "yes") == journal(tmp_path / "split")


def use_gpu(rank: int, folder: Path) -> None:
    join(rank, 2, folder)
    device = torch.device("cuda")
    source = Numbered(50, 64, bad=(24, 49))
    loader = SplitResident(source, side=64, device=device, processes=2, workers=2)
    plan = batch_index_stream(50, 32, seed=3, rank=None, world=2)
    busy = torch.rand(2048, 2048, device=device)
    found = []
    for batch in islice(loader.batches_of_rank(plan), 30):
        for _ in range(5):
            busy = (busy @ busy).clamp(0, 1)
        found.append([each.clone() for each in batch])
    for ours, theirs in zip(found, unsplit(source, 32, 1, 64, 30), strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert torch.equal(a.cpu(), b[16 * rank : 16 * rank + 16])
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.distributed
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_two_processes_on_a_busy_gpu_match_one_bitwise(tmp_path: Path) -> None:
    """gloo copies through the host; NCCL needs two GPUs."""
    together(use_gpu, (tmp_path,), 2)

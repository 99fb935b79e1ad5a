"""Both loaders match a plain loop over the source, and their threads end."""

import itertools
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from loader_endings import ENDINGS, stop_consumer
from PIL import Image
from torch import Tensor

from compressive.data import loaders
from compressive.data.batch_buffers import read_tasks
from compressive.data.decode import Unreadable, shrink
from compressive.data.loaders import (
    Batch,
    Resident,
    Streaming,
    canvas_side,
    free_memory,
    open_loader,
)
from compressive.data.sampler import BatchIndices
from compressive.data.source import ImageSource, require_source
from compressive.data.worker_threads import useful_threads
from compressive.platforms import memory

SIDE = 16
RAGGED = [(16, 16), (5, 16), (16, 3), (1, 1), (9, 12), (40, 24), (12, 9), (7, 33), (2, 16), (8, 8)]


class Memory:
    """Random images of given heights and widths, some of them unreadable."""

    name, classes = "memory", None

    def __init__(
        self, sizes: list[tuple[int, int]], bad: tuple[int, ...] = (), labels: bool = True
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        self.pictures = [
            torch.randint(0, 256, (3, *size), dtype=torch.uint8, generator=generator)
            for size in sizes
        ]
        self.bad, self.tried = bad, list[int]()
        self.labels = 100 + torch.arange(len(sizes)) if labels else None

    def __len__(self) -> int:
        return len(self.pictures)

    def image(self, i: int) -> Tensor:
        self.tried.append(i)
        if i in self.bad:
            raise Unreadable(f"reason {i}")
        return self.pictures[i]

    def origin(self, i: int) -> str:
        return f"place {i}"


def portions(*indices: list[int]) -> list[BatchIndices]:
    return [
        BatchIndices(torch.tensor(index), 7 * k + torch.arange(len(index)))
        for k, index in enumerate(indices)
    ]


def expected(source: Memory, portion: BatchIndices, side: int = SIDE) -> Batch:
    """Assemble a batch image by image."""
    images = torch.zeros(len(portion.index), 3, side, side, dtype=torch.uint8)
    numbers = []
    for canvas, index, epoch in zip(images, *map(Tensor.tolist, portion), strict=True):
        while index in source.bad:
            index = (index + 1) % len(source)
        image = shrink(source.pictures[index], side)
        _, height, width = image.shape
        canvas[:, :height, :width] = image
        label = -1 if source.labels is None else int(source.labels[index])
        numbers.append((height, width, index, epoch, label))
    return Batch(images, *torch.tensor(numbers).T)


def assert_equal(batches: list[Batch], wanted: list[Batch]) -> None:
    assert len(batches) == len(wanted)
    for ours, theirs in zip(batches, wanted, strict=True):
        for name, a, b in zip(Batch._fields, ours, theirs, strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=0, atol=0, msg=lambda m, n=name: n + m)


def decoders() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("decode-")]


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    yield
    assert not decoders()


PLAN = portions(
    [0, 1, 2, 3], [4, 5, 6], [9, 9, 9, 9, 9, 8, 7], [3, 2, 1, 0], [5], *([[3, 7, 4, 8, 0, 6]] * 5)
)


@pytest.mark.parametrize("bad", [(), (4, 5, 9)])
@pytest.mark.parametrize("labels", [True, False])
@pytest.mark.parametrize("workers", [1, 5])
def test_loaders_match_a_plain_loop_bitwise(
    bad: tuple[int, ...], labels: bool, workers: int
) -> None:
    """Cover images of all sizes, oversized images, odd batch sizes and reused buffers."""
    source = Memory(RAGGED, bad, labels)
    wanted = [expected(source, portion) for portion in PLAN]
    resident = Resident(source, side=SIDE, device="cpu", workers=workers)
    streaming = Streaming(source, side=SIDE, device="cpu", workers=workers, prefetch=2)
    assert_equal(list(resident.batches(PLAN)), wanted)
    assert_equal(list(streaming.batches(PLAN)), wanted)


def test_row_sizes_off_word_boundaries_are_supported() -> None:
    source = Memory([(5, 3), (5, 5), (1, 2)])
    plan = portions([2, 1], [0, 0, 1])
    resident = Resident(source, side=5, device="cpu", workers=2)
    assert_equal(list(resident.batches(plan)), [expected(source, p, 5) for p in plan])


BAD = {
    "float": torch.rand(3, 8, 8),
    "colors last": torch.zeros(8, 8, 3, dtype=torch.uint8),
    "gray": torch.zeros(8, 8, dtype=torch.uint8),
}


@pytest.mark.parametrize("kind", BAD)
def test_wrong_image_dtype_or_shape_is_rejected(kind: str) -> None:
    """Floats in [0, 1] would become 0 in uint8."""
    source = Memory([(8, 8)] * 4)
    source.image = lambda i: BAD[kind]  # pyright: ignore
    for look in (lambda: canvas_side(source, 8), lambda: open_loader(source, side=8, device="cpu")):
        with pytest.raises(ValueError, match=r"\d: .*uint8"):
            look()


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        ([0, 1, 0, 1], "int64 .*list"),
        (torch.zeros(4), r"int64 .*torch\.float32"),
        (torch.zeros(3, dtype=torch.int64), r"shape \(4,\).* \(3,\)"),
    ],
)
def test_wrong_label_type_or_shape_is_rejected(labels: object, words: str) -> None:
    source = ImageSource(name="a", count=4, read=lambda _: BAD["float"], place=str)
    source.__dict__["labels"] = labels
    with pytest.raises(ValueError, match=f"^labels .*{words}$"):
        require_source(source)
    with pytest.raises(ValueError, match=r"source .*name, .*list$"):
        require_source([1, 2])


@pytest.mark.parametrize(("height", "width"), [(40, 24), (24, 61), (300, 2), (17, 17), (1500, 900)])
def test_shrinking_matches_pillows_antialiased_bicubic(height: int, width: int) -> None:
    """Both round to integers after each axis, with weights of different precision.

    Results differ by at most 1.
    """
    noise = np.random.default_rng(0).random((height, width, 3))
    image = (noise * np.linspace(128, 255, height)[:, None, None]).astype(np.uint8)
    ours = shrink(torch.from_numpy(image).permute(2, 0, 1), SIDE).permute(1, 2, 0).numpy()
    scale = SIDE / max(height, width)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    theirs = np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BICUBIC))
    assert ours.shape == theirs.shape
    assert max(ours.shape) == SIDE
    assert np.abs(ours.astype(int) - theirs).max() <= 1
    assert theirs.std() > 10, "the image must not be flat"


@pytest.mark.parametrize(
    ("sides", "least", "size", "cut"),
    [
        ((64, 48), 16, (21, 16), (21, 16)),  # not 16 x 12
        ((48, 64), 12, (12, 16), (12, 16)),  # same as without a minimum
        ((20, 200), 16, (16, 160), (16, 32)),  # the longer side is cut to twice the shorter
        ((12, 100), 16, (12, 100), (12, 32)),  # nothing is enlarged
        ((16, 9), 16, (16, 9), (16, 9)),
    ],
)
def test_shorter_side_is_not_shrunk_below_the_minimum(
    sides: tuple[int, int], least: int, size: tuple[int, int], cut: tuple[int, int]
) -> None:
    """Long images are cropped to their middle."""
    image = np.random.default_rng(0).integers(0, 256, (*sides, 3), np.uint8)
    ours = shrink(torch.from_numpy(image).permute(2, 0, 1), 16, least).permute(1, 2, 0).numpy()
    height, width = size
    theirs = np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC))
    top, left = ((whole - kept) // 2 for whole, kept in zip(size, cut, strict=True))
    theirs = theirs[top : top + cut[0], left : left + cut[1]]
    assert ours.shape == theirs.shape == (*cut, 3)
    assert np.abs(ours.astype(int) - theirs).max() <= 1


def test_images_that_fit_are_not_resized() -> None:
    image = Memory([(16, 9)]).pictures[0]
    assert shrink(image, 16) is image


@pytest.mark.parametrize("kind", [Resident, Streaming])
def test_unreadable_images_are_listed_once_and_replaced_by_the_next(kind: type) -> None:
    source = Memory([(4, 4)] * 6, bad=(5, 2, 3))
    loader = kind(source, side=4, device="cpu", workers=1)
    batches = list(loader.batches(portions([0, 1, 2], [3, 4, 5], [2, 3, 5])))
    assert [batch.index.tolist() for batch in batches] == [[0, 1, 4], [4, 4, 0], [4, 4, 0]]
    assert [batch.label.tolist() for batch in batches] == [
        [100, 101, 104],
        [104, 104, 100],
        [104, 104, 100],
    ]
    reasons = [(f"place {i}", f"reason {i}") for i in (2, 3, 5)]
    assert loader.unreadable == reasons
    assert sorted(i for i in source.tried if i in source.bad) == [2, 3, 5]


def test_fully_unreadable_source_is_rejected() -> None:
    source = Memory([(4, 4)] * 3, bad=(0, 1, 2))
    words = r"3 images of memory.*place 0: reason 0$"
    with pytest.raises(ValueError, match=words):
        Resident(source, side=4, device="cpu", workers=2)
    with pytest.raises(ValueError, match=words):
        list(Streaming(source, side=4, device="cpu", workers=2).batches(portions([0, 1], [2])))


class Broken(Memory):
    """A source with a bug for one image, as opposed to an unreadable file."""

    def image(self, i: int) -> Tensor:
        if i == 4:
            raise ZeroDivisionError("a bug")
        return super().image(i)


def test_worker_exception_is_raised_in_batch_order() -> None:
    source = Broken([(4, 4)] * 6)
    plan = portions([0, 1], [2, 3], [4, 5], [0, 1])
    batches = Streaming(source, side=4, device="cpu", workers=3).batches(plan)
    first = next(batches)
    time.sleep(0.05)  # by now the third batch has failed
    assert_equal([first, next(batches)], [expected(source, portion, 4) for portion in plan[:2]])
    with pytest.raises(ZeroDivisionError, match="a bug"):
        next(batches)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        Resident(source, side=4, device="cpu", workers=3)


@pytest.mark.parametrize("index", [[0, 6], [-1], []])
@pytest.mark.parametrize("kind", [Resident, Streaming])
def test_out_of_range_indices_are_rejected(kind: type, index: list[int]) -> None:
    loader = kind(Memory([(4, 4)] * 6), side=4, device="cpu", workers=1)
    plan = [BatchIndices(torch.tensor(index, dtype=torch.int64), torch.zeros(len(index)).long())]
    with pytest.raises(ValueError, match="0 to 5"):
        list(loader.batches(plan))


@pytest.mark.parametrize("prefetch", [1, 3])
def test_infinite_plan_is_prefetched_up_to_the_limit(prefetch: int) -> None:
    taken = 0

    def plan() -> Iterator[BatchIndices]:
        nonlocal taken
        for i in itertools.count():
            taken += 1
            yield BatchIndices(torch.tensor([i % 10, 0]), torch.tensor([i, i]))

    source = Memory(RAGGED)
    loader = Streaming(source, side=SIDE, device="cpu", workers=2, prefetch=prefetch)
    batches = loader.batches(plan())
    assert taken == 0
    for i in range(20):
        batch = next(batches)
        time.sleep(0.002)  # nothing is prefetched while the consumer works
        assert batch.epoch.tolist() == [i, i]
        assert taken <= i + 1 + prefetch
    assert taken == 20 + prefetch
    assert len(source.tried) <= 2 * taken
    batches.close()  # pyright: ignore


class Meeting(Memory):
    """A source that returns an image only when four threads read at the same time."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # pyright: ignore
        self.barrier = threading.Barrier(4, timeout=10)

    def image(self, i: int) -> Tensor:
        self.barrier.wait()
        return super().image(i)


def test_workers_decode_in_parallel() -> None:
    source = Meeting([(4, 4)] * 8)
    plan = portions([0, 1, 2, 3, 4, 5, 6, 7])
    ours = list(Streaming(source, side=4, device="cpu", workers=4).batches(plan))
    assert_equal(ours, [expected(source, plan[0], 4)])


class Slow(Memory):
    """A source whose images take 0.03 s each."""

    def image(self, i: int) -> Tensor:
        time.sleep(0.03)
        return super().image(i)


def test_only_time_the_consumer_waits_is_counted() -> None:
    source = Slow([(4, 4)] * 4)
    loader = Streaming(source, side=4, device="cpu", workers=1, prefetch=2)
    batches = loader.batches(portions([0, 1], [2, 3]))
    assert loader.waited == 0
    next(batches)
    first = loader.waited
    assert first >= 0.06  # two images
    time.sleep(0.5)  # the other two are decoded meanwhile
    next(batches)
    assert loader.waited - first < 0.25
    assert next(batches, None) is None


@pytest.mark.parametrize("ending", ENDINGS)
def test_worker_threads_stop_with_the_consumer(ending: str) -> None:
    """They stop immediately: of 301 planned images, only those in progress are finished."""
    source = Slow([(4, 4)] * 100)
    loader = Streaming(source, side=4, device="cpu", workers=2, prefetch=3)
    held = [loader.batches(portions([0], *[list(range(100))] * 3))]
    next(held[0])
    assert len(decoders()) == 2
    stop_consumer(ending, loader, held)
    assert not decoders()
    assert len(source.tried) < 30


@pytest.mark.slow
def test_closing_the_loader_raises_in_a_waiting_consumer() -> None:
    source = Slow([(4, 4)] * 100)
    loader = Streaming(source, side=4, device="cpu", workers=1)
    closing = threading.Timer(0.1, loader.close)
    closing.start()
    with pytest.raises(RuntimeError, match="closed"):
        next(loader.batches(portions(list(range(100)))))
    closing.join()


def test_two_iterations_can_share_one_loader() -> None:
    """This happens when a run evaluates during training."""
    source = Memory(RAGGED)
    with Streaming(source, side=SIDE, device="cpu", workers=2, prefetch=2) as loader:
        training = loader.batches(PLAN)
        first = next(training)
        assert_equal(list(loader.batches(PLAN[3:])), [expected(source, p) for p in PLAN[3:]])
        assert_equal([first, *training], [expected(source, p) for p in PLAN])


DYING = """
import torch
from compressive.data.loaders import Streaming
from compressive.data.sampler import BatchIndices

class Heavy:
    name, labels, classes = "heavy", None, None
    def __len__(self): return 16
    def origin(self, i): return str(i)
    def image(self, i): return (torch.rand(3, 200, 200).sqrt() * 255).to(torch.uint8)

index = torch.arange(16)
plan = [BatchIndices(index, index)] * 9
batches = Streaming(Heavy(), side=200, device="cpu", workers=8).batches(plan)
next(batches)
raise SystemExit(5)
"""


@pytest.mark.slow
def test_exit_during_decoding_prints_nothing() -> None:
    run = subprocess.run([sys.executable, "-c", DYING], capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stderr) == (5, "")


@pytest.mark.parametrize(
    ("largest", "view_size", "side"),
    [
        ((375, 500), 224, 504),  # its own size, rounded up to a multiple of 8
        ((3000, 4000), 224, 512),
        ((900, 100), 160, 368),  # 366
        ((32, 32), 32, 32),
        ((28, 28), 28, 28),
        ((96, 96), 32, 96),
        ((96, 96), 64, 96),
        ((480, 640), 32, 128),
        ((480, 640), 64, 256),
        ((480, 640), 112, 256),
    ],
)
def test_padded_side_depends_on_image_and_view_size(
    largest: tuple[int, int], view_size: int, side: int
) -> None:
    source = Memory([(8, 8), largest, (8, 8)], bad=(0,))
    assert canvas_side(source, view_size) == side
    assert canvas_side(source, view_size, setting=77) == 77


def test_image_sizes_are_sampled_evenly() -> None:
    source = Memory([(8, 8)] * 1000)
    assert canvas_side(source, 32) == 8
    assert len(source.tried) == 256
    gaps = np.diff(source.tried)
    assert (gaps.min(), gaps.max()) == (3, 4)
    assert source.tried[-1] >= 1000 - 4


def test_source_is_cached_if_it_fits_in_memory() -> None:
    source = Memory([(4, 4)] * 8)
    free = free_memory(torch.device("cpu"))
    assert 1e8 < free < 1e14
    huge = int((free / 3) ** 0.5)  # one image takes all free memory
    assert isinstance(open_loader(source, side=4, device="cpu"), Resident)
    assert isinstance(open_loader(source, side=4, device="cpu", cache_on_device="no"), Streaming)
    assert isinstance(open_loader(source, side=huge, device="cpu"), Streaming)
    with pytest.raises(ValueError, match=r"data\.cache_on_device=yes .* GB .*data\.max_side$"):
        open_loader(source, side=2 * huge, device="cpu", cache_on_device="yes")


def test_progress_counts_to_the_end() -> None:
    seen: list[tuple[int, int]] = []
    source = Memory([(4, 4)] * 2100, bad=(2099,))
    open_loader(source, side=4, device="cpu", workers=2, progress=lambda *state: seen.append(state))
    assert seen == [(1024, 2100), (2048, 2100), (2100, 2100)]


gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
]


def checksum(batch: Batch) -> Tensor:
    """Return sums weighted by byte position, without synchronizing the device."""
    at = torch.arange(batch.images.shape[-1], device=batch.images.device)
    weight = (3 * at[:, None] + at) % 97
    return torch.stack([(batch.images.long() * weight).sum((1, 2, 3)), *batch[1:]])


@pytest.mark.parametrize(
    ("kind", "prefetch"),
    [
        pytest.param(kind, prefetch, marks=gpu)
        for kind, prefetch in [("yes", 4), ("no", 2), ("no", 4)]
    ],
)
def test_batches_are_correct_on_a_busy_gpu_without_synchronization(
    kind: Literal["yes", "no"], prefetch: int
) -> None:
    """Batches are read long after they were launched; buffers and device memory are reused."""
    source = Memory([(200 + i, 256 - i) for i in range(32)])
    generator = torch.Generator().manual_seed(0)
    plan = [
        BatchIndices(torch.randint(0, 32, (64,), generator=generator), torch.full((64,), i))
        for i in range(40)
    ]
    loader = open_loader(source, side=256, device="cuda", cache_on_device=kind, prefetch=prefetch)
    busy, sums = torch.rand(4096, 4096, device="cuda"), []
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in loader.batches(plan):
            for _ in range(5):
                busy = (busy @ busy).clamp(0, 1)
            sums.append(checksum(batch))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for portion, ours in zip(plan, sums, strict=True):
        assert torch.equal(ours.cpu(), checksum(expected(source, portion, 256)))


@pytest.mark.parametrize(("free", "kind"), [(768, Resident), (767, Streaming)])
def test_cache_uses_at_most_half_of_the_free_memory(
    monkeypatch: pytest.MonkeyPatch, free: int, kind: type
) -> None:
    """8 images of 3 x 4 x 4 bytes take 384 bytes."""
    monkeypatch.setattr(loaders, "free_memory", lambda _: free)
    assert isinstance(open_loader(Memory([(4, 4)] * 8), side=4, device="cpu"), kind)


@pytest.mark.parametrize(
    ("limit", "free"),
    [
        ("max", 8192 * 1024),
        ("1000000", 1_000_000 - 600_000 + 150_000),  # inactive file cache can be freed
        ("400000", 0),
        (f"{2**40}", 8192 * 1024),
    ],
)
def test_free_memory_respects_the_container_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, limit: str, free: int
) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 9999 kB\nMemAvailable:  8192 kB\n")
    (tmp_path / "memory.max").write_text(limit + "\n")
    (tmp_path / "memory.current").write_text("600000\n")
    (tmp_path / "memory.stat").write_text("anon 450000\ninactive_file 150000\n")
    monkeypatch.setattr(memory, "Path", lambda path: tmp_path / Path(path).name)
    assert free_memory(torch.device("cpu")) == free


@pytest.mark.parametrize(
    ("seconds", "cores", "threads"),
    [(20e-6, 16, 2), (110e-6, 16, 3), (2e-3, 16, 16), (2e-3, 4, 4), (20e-6, 1, 1)],
)
def test_number_of_threads_follows_the_time_of_a_read(
    seconds: float, cores: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = itertools.count()
    steps = [0.0, seconds] * 8 + [0.0, 1.0]  # the last read is slow, as on a cold disk
    times = list(itertools.accumulate(steps))
    monkeypatch.setattr(time, "perf_counter", lambda: times[next(clock)])
    read: list[int] = []
    assert useful_threads(read.append, list(range(9)), cores) == threads
    assert read == list(range(9))


def test_threads_are_chosen_with_the_first_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaders, "useful_threads", lambda _read, some, _cores: len(some))
    source = Memory(RAGGED)
    with Streaming(source, side=SIDE, device="cpu") as loader:
        assert_equal(list(loader.batches(PLAN)), [expected(source, p) for p in PLAN])
        assert loader.workers == len(PLAN[0].index[:9])
        assert list(loader.batches([])) == []


@pytest.mark.parametrize("count", [1, 7, 64, 256, 1024])
@pytest.mark.parametrize("workers", [1, 4, 16])
def test_tasks_are_the_whole_batch_and_enough_for_all_threads(count: int, workers: int) -> None:
    indices = list(range(100, 100 + count))
    tasks = list(read_tasks(indices, workers))
    assert [index for _, found in tasks for index in found] == indices
    assert all(found == indices[first : first + len(found)] for first, found in tasks)
    assert len(tasks) >= min(count, 2 * workers)
    assert max(len(found) for _, found in tasks) <= 32

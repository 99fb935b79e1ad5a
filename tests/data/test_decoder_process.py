import gc
import math
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from loader_endings import ENDINGS, stop_consumer
from PIL import Image
from processes import is_running
from server_in_thread import ServerInThread, use_threads, wait_until_ready
from torch import Tensor
from torchvision.io import ImageReadMode, decode_image

from compressive.data import decoder_process, shared_buffers
from compressive.data.batch_buffers import PinnedBuffer
from compressive.data.decoder_process import DecoderProcess, start_decoder_process
from compressive.data.decoder_worker import DecodeServer
from compressive.data.loaders import Batch, Streaming, open_loader
from compressive.data.sampler import BatchIndices
from compressive.data.shared_buffers import SharedBuffer
from compressive.data.source import Source, subset
from compressive.data.sources import open_source
from compressive.data.worker_threads import WorkerThreads, own_cores
from compressive.platforms import processes

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")
SIDE = 40
CPU = torch.device("cpu")
SIZES = [(7, 11), (40, 40), (64, 50), (1, 33), (40, 3), (90, 20), (38, 39), (12, 40)]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> type[ServerInThread]:
    return use_threads(monkeypatch)


def write_images(folder: Path, repeats: int = 2) -> list[Path]:
    """Write PNG and JPEG files of many sizes in two classes, and some that cannot be read."""
    rng = np.random.default_rng(0)
    paths = []
    for i, size in enumerate(SIZES * repeats):
        path = folder / "ab"[i % 2] / f"{i:03}{('.png', '.jpg', '.png')[i % 3]}"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(pixels if i % 5 else pixels[:, :, 0]).save(path)
        paths.append(path)
    (folder / "a" / "000x.jpg").write_bytes(b"\xff\xd8 damaged")
    (folder / "b" / "zz.png").write_bytes(b"")
    return paths


def plan(count: int, batch: int = 6, epochs: int = 3) -> list[BatchIndices]:
    generator = torch.Generator().manual_seed(3)
    return [
        BatchIndices(index, torch.full_like(index, epoch))
        for epoch in range(epochs)
        for index in torch.randperm(count, generator=generator).split(batch)
    ]


def apart(source: Source, device: Any = "cpu", **options: Any) -> Streaming:
    process = wait_until_ready(DecoderProcess())
    options = {"side": SIDE, "workers": 2, "prefetch": 3, **options}
    return Streaming(source, device=device, process=process, **options)


def by_threads(source: Source, portions: list[BatchIndices], **options: Any) -> list[Batch]:
    with Streaming(source, device="cpu", workers=2, **{"side": SIDE, **options}) as loader:
        return list(loader.batches(portions))


def assert_equal(found: list[Batch], expected: list[Batch]) -> None:
    for one, other in zip(found, expected, strict=True):
        for name, a, b in zip(Batch._fields, one, other, strict=True):
            assert torch.equal(a.cpu(), b), name


def assert_as_threads(source: Source) -> Streaming:
    """Compare batches and reports of the process with those of threads; return its loader."""
    portions = plan(len(source))
    with Streaming(source, side=SIDE, device="cpu", workers=2) as threads:
        expected = list(threads.batches(portions))
    with apart(source) as loader:
        assert_equal(list(loader.batches(portions)), expected)
    assert loader.unreadable == threads.unreadable
    assert loader.bad == threads.bad
    return loader


def decoded_by(server: ServerInThread) -> int:
    """Return how many images the server has decoded."""
    return server.server.decoded


def test_images_are_those_of_torchvision_padded_with_zeros(
    tmp_path: Path, stand_in: type[ServerInThread]
) -> None:
    rng = np.random.default_rng(0)
    sizes = [(SIDE, SIDE), (5, 9), (30, 2), (1, SIDE), (17, 17)] * 4
    for i, size in enumerate(sizes):
        pixels = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{i:02}.jpg")
    source = open_source(tmp_path)
    with apart(source) as loader:
        for batch, portion in zip(loader.batches(plan(20, 7)), plan(20, 7), strict=True):
            expected = torch.zeros(len(portion.index), 3, SIDE, SIDE, dtype=torch.uint8)
            for place, i in enumerate(portion.index.tolist()):
                data = torch.from_numpy(np.fromfile(source.origin(i), np.uint8))
                image = decode_image(data, ImageReadMode.RGB)
                assert (int(batch.height[place]), int(batch.width[place])) == image.shape[1:]
                expected[place, :, : image.shape[1], : image.shape[2]] = image
            assert torch.equal(batch.images, expected)
            assert torch.equal(batch.index, portion.index)
            assert torch.equal(batch.epoch, portion.epoch)
    assert [decoded_by(server) for server in stand_in.servers] == [60]


def write_tar(folder: Path, paths: list[Path]) -> Path:
    folder.mkdir()
    with tarfile.open(folder / "train-0.tar", "w") as tar:
        for i, path in enumerate(paths):
            tar.add(path, f"{i:03}{path.suffix}")
            label = folder / f"{i:03}.cls"
            label.write_text(str(i % 3))
            tar.add(label, label.name)
            label.unlink()
    return folder


@pytest.mark.parametrize("kind", ["folder", "list", "tar", "subset", "several", "relative"])
def test_batches_and_reports_are_those_of_threads(
    kind: str, tmp_path: Path, stand_in: type[ServerInThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    place: Any = tmp_path / "images"
    paths = write_images(place)
    damaged = 2
    if kind == "list":
        place = tmp_path / "list.csv"
        place.write_text("path,label\n" + "".join(f"{p},{p.parent.name}\n" for p in paths))
        damaged = 0
    elif kind == "tar":
        place = write_tar(tmp_path / "shards", [*paths, tmp_path / "images/b/zz.png"])
        damaged = 1
    elif kind == "several":
        write_images(tmp_path / "more", 1)
        place, damaged = [place, tmp_path / "more"], 4
    elif kind == "relative":
        monkeypatch.chdir(tmp_path)
        place = "images"
    source = open_source(place)
    if kind == "subset":
        source = subset(source, torch.arange(1, len(source), 2))
    assert len(assert_as_threads(source).bad) == damaged
    (server,) = stand_in.servers
    readable = 3 * len(source) - 3 * damaged
    assert readable <= decoded_by(server) <= 3 * len(source)


def test_images_above_the_limit_of_pixels_are_reported(
    tmp_path: Path, stand_in: type[ServerInThread]
) -> None:
    write_images(tmp_path)
    source = open_source(tmp_path, max_pixels=1700)
    reasons = [reason for _, reason in assert_as_threads(source).unreadable]
    assert sum("pixels" in reason for reason in reasons) == 4


def test_threads_read_until_the_process_is_ready(
    tmp_path: Path, stand_in: type[ServerInThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stand_in, "is_slow", True)
    write_images(tmp_path)
    source = open_source(tmp_path)
    process = DecoderProcess()
    loader = Streaming(source, side=SIDE, device="cpu", workers=2, prefetch=2, process=process)
    with loader:
        batches, portions = loader.batches(plan(len(source))), plan(len(source))
        found = [next(batches) for _ in range(2)]
        (server,) = stand_in.servers
        assert not process.is_ready
        server.start()
        wait_until_ready(process)
        assert_equal([*found, *batches], by_threads(source, portions))
        assert 0 < decoded_by(server) < 3 * len(source)


def test_threads_continue_if_the_process_ends(
    tmp_path: Path, stand_in: type[ServerInThread]
) -> None:
    write_images(tmp_path)
    source = open_source(tmp_path)
    portions = plan(len(source), epochs=6)
    loader = apart(source)
    with loader:
        batches = loader.batches(portions)
        read = [next(batches) for _ in range(4)]
        stand_in.servers[0].kill()
        stand_in.servers[0].wait()
        with pytest.warns(UserWarning, match=r"has ended \(exit code -9\)") as found:
            read += batches
    assert_equal(read, by_threads(source, portions))
    assert len(found) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_threads_continue_after_an_answer_that_makes_no_sense(
    tmp_path: Path, stand_in: type[ServerInThread]
) -> None:
    write_images(tmp_path)
    source = open_source(tmp_path)
    portions = plan(len(source), epochs=6)
    with apart(source) as loader:
        batches = loader.batches(portions)
        read = [next(batches)]
        stand_in.servers[0].connection.send(("done",))  # without a number
        stand_in.servers[0].thread.join(10)
        assert not stand_in.servers[0].thread.is_alive(), "the process must be ended"
        with pytest.warns(UserWarning, match="has ended"):
            read += batches
    assert_equal(read, by_threads(source, portions))


def test_interrupted_message_ends_the_process(
    tmp_path: Path, stand_in: type[ServerInThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process would wait for the rest of the message, and the next plan for the process."""
    write_images(tmp_path)
    source = open_source(tmp_path)
    portions = plan(len(source))
    with apart(source) as loader:
        batches = loader.batches(portions)
        next(batches)
        process = loader.process
        assert process is not None

        descriptor = process._connection.fileno()

        def send(_: object) -> None:
            os.write(descriptor, (10**6).to_bytes(4))  # the length of a message, and no message
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(process, "_connection", SimpleNamespace(send=send))
            with pytest.raises(KeyboardInterrupt):
                list(batches)
        (server,) = stand_in.servers
        server.thread.join(10)
        assert not server.thread.is_alive()
        with pytest.warns(UserWarning, match="has ended"):
            assert_equal(list(loader.batches(portions)), by_threads(source, portions))


def test_buffer_that_is_freed_during_a_message_does_not_wait_for_it(
    stand_in: type[ServerInThread],
) -> None:
    """A search for reference cycles in a thread that sends can free a buffer."""
    process = wait_until_ready(DecoderProcess())
    first, second = process.new_buffer(2, SIDE, CPU), process.new_buffer(2, SIDE, CPU)
    with process._sending:  # as during a message
        first.close()
    third = process.new_buffer(2, SIDE, CPU)  # the next message frees the first buffer
    assert_known(stand_in.servers[0].server, second, third)
    second.close()
    assert_known(stand_in.servers[0].server, third)
    process.close()


def assert_known(server: DecodeServer, *buffers: PinnedBuffer) -> None:
    """Wait until the server knows only these buffers."""
    expected = {buffer.number for buffer in buffers if isinstance(buffer, SharedBuffer)}
    assert len(expected) == len(buffers)
    until = time.monotonic() + 10
    while server._buffers.keys() != expected and time.monotonic() < until:
        time.sleep(0.005)
    assert server._buffers.keys() == expected


def test_process_ends_with_a_loader_that_is_not_closed(
    tmp_path: Path, stand_in: type[ServerInThread]
) -> None:
    write_images(tmp_path)
    source = open_source(tmp_path)
    loader = apart(source)
    list(loader.batches(plan(len(source))))
    assert loader.process is not None
    end = loader.process.close
    del loader
    gc.collect()
    assert not end.alive  # type: ignore[attr-defined]
    stand_in.servers[0].thread.join(10)
    assert not stand_in.servers[0].thread.is_alive()


def test_partly_written_batch_of_a_lost_process_is_read_again(
    tmp_path: Path, stand_in: type[ServerInThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server writes garbage into the shared buffer and ends without an answer."""
    write_images(tmp_path)
    source = open_source(tmp_path)
    loader = apart(source)

    def break_down(server: DecodeServer, _number: int, buffer: int, *_: object) -> None:
        canvas = server._buffers[buffer]
        canvas.images.fill_(77)
        canvas._used[:] = 2
        raise EOFError

    monkeypatch.setattr(DecodeServer, "_begin", break_down)
    portions = plan(len(source))
    with loader, pytest.warns(UserWarning, match="has ended"):
        assert_equal(list(loader.batches(portions)), by_threads(source, portions))


@pytest.mark.parametrize("ending", ENDINGS)
def test_every_ending_closes_process_buffers_and_files(
    ending: str, tmp_path: Path, stand_in: type[ServerInThread]
) -> None:
    write_images(tmp_path)
    source = open_source(tmp_path)
    folder = Path("/proc/self/fd")
    before = len(list(folder.iterdir())) if folder.exists() else 0
    loader = apart(source)
    held: list[Any] = [loader.batches(plan(len(source), epochs=300))]
    next(held[0])
    (server,) = stand_in.servers
    assert 1 <= len(server.server._buffers) <= loader.prefetch + 1
    if ending == "interrupt":
        held[0] = iter(sleepy(held[0]))
    stop_consumer(ending, loader, held)
    held.clear()
    until = time.monotonic() + 10
    while ending in ("close", "drop") and server.server._buffers and time.monotonic() < until:
        time.sleep(0.01)
    if ending in ("close", "drop"):
        assert not server.server._buffers  # the process remains for the next plan
        assert_equal(list(loader.batches(plan(18)))[:1], by_threads(source, plan(18)[:1]))
    loader.close()
    server.thread.join(10)
    assert not server.thread.is_alive()
    stand_in.servers.clear()
    del server
    gc.collect()
    if folder.exists():  # a mapping has a file descriptor
        assert len(list(folder.iterdir())) <= before
    assert_equal(list(loader.batches(plan(18)))[:1], by_threads(source, plan(18)[:1]))


def sleepy(batches: Iterator[Batch]) -> Iterator[Batch]:
    time.sleep(10)  # the signal arrives here
    yield next(batches)


@pytest.mark.parametrize("shared", [0, 1, 2])
def test_memory_that_cannot_be_pinned_is_left_to_threads(
    shared: int, tmp_path: Path, stand_in: type[ServerInThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    created: list[int] = []

    def create(size: int) -> int:
        if len(created) == shared:
            raise OSError("no memory")
        created.append(size)
        return shared_buffers.create_shared_file(size)

    write_images(tmp_path)
    source = open_source(tmp_path)
    monkeypatch.setattr(decoder_process, "create_shared_file", create)
    with apart(source) as loader, pytest.warns(UserWarning, match="no memory") as found:
        assert_equal(list(loader.batches(plan(18))), by_threads(source, plan(18)))
    assert len(found) == 1
    assert (decoded_by(stand_in.servers[0]) > 0) == (shared > 0)


def test_waiting_thread_keeps_no_task() -> None:
    """The last task of a thread has a buffer of a batch, which is large."""

    class Task:
        pass

    task = Task()
    reference, threads = weakref.ref(task), WorkerThreads[Task](lambda _: None, ["one"])
    threads.put(task)
    del task
    until = time.monotonic() + 5
    while reference() is not None and time.monotonic() < until:
        time.sleep(0.005)
    assert reference() is None
    threads.close()


@pytest.mark.parametrize("code", [0, 2])
def test_memory_is_pinned_for_the_gpu_of_the_run(
    code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without CUDA: each call must be made while the GPU of the run is the current one."""
    current, calls = ["cuda:0"], list[tuple[str, str]]()

    @contextmanager
    def use(device: torch.device) -> Iterator[None]:
        current.append(str(device))
        yield
        current.pop()

    def call(name: str, code: int) -> int:
        calls.append((name, current[-1]))
        return code

    runtime = SimpleNamespace(
        cudaHostRegister=lambda *_: call("pin", code), cudaHostUnregister=lambda _: call("free", 0)
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", use)
    monkeypatch.setattr(torch, "zeros", lambda *_, device: call("clear", 0))
    descriptor = shared_buffers.create_shared_file(shared_buffers.shared_bytes(3, 8))
    options: Any = {"device": torch.device("cuda:1"), "number": 3}
    if code:
        with pytest.raises(OSError, match="cannot pin 4,672 bytes: error 2"):
            SharedBuffer(3, 8, descriptor, **options)
        assert calls == [("pin", "cuda:1"), ("clear", "cuda:1")]
    else:
        buffer = SharedBuffer(3, 8, descriptor, **options)
        buffer.close()
        buffer.close()
        assert calls == [("pin", "cuda:1"), ("free", "cuda:1")]
    os.close(descriptor)


def test_processes_on_a_machine_divide_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 32)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(12))
    monkeypatch.setattr(processes, "core_quota", lambda: math.inf)
    for count, cores in ((1, 12), (4, 8), (40, 1)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(count))
        assert own_cores() == cores


def test_shared_buffer_is_seen_by_a_second_mapping() -> None:
    size = shared_buffers.shared_bytes(3, 8)
    descriptor = shared_buffers.create_shared_file(size)
    assert not os.get_inheritable(descriptor)
    one, other = (SharedBuffer(3, 8, descriptor) for _ in range(2))
    os.close(descriptor)
    one.begin_epochs(torch.tensor([5, 6]))
    other.begin(2)
    one.images[2, 1, 7, 7] = 9
    assert other.images.sum() == 9
    assert other.images[2, 1, 7, 7] == 9
    assert other.numbers[3].tolist() == [5, 6]
    assert other.numbers.shape == (5, 2)


@pytest.mark.parametrize(
    ("value", "device", "cores", "gigabytes", "system", "is_started"),
    [
        ("", "cuda", 16, 8, "linux", True),  # the default
        ("auto", "cuda", 2, 8, "linux", True),
        ("auto", "cuda", 1, 8, "linux", False),
        ("auto", "cuda", 16, 3, "linux", False),
        ("auto", "cpu", 16, 8, "linux", False),
        ("on", "cpu", 1, 3, "linux", True),
        ("on", "cuda", 16, 8, "darwin", False),
        ("off", "cuda", 16, 8, "linux", False),
        ("False", "cuda", 16, 8, "linux", False),
    ],
)
def test_process_starts_where_it_is_useful(
    value: str,
    device: str,
    cores: int,
    gigabytes: int,
    system: str,
    is_started: bool,
    stand_in: type[ServerInThread],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_images(tmp_path)
    monkeypatch.setenv("COMPRESSIVE_DECODE_PROCESS", value)
    monkeypatch.setattr(decoder_process, "own_cores", lambda: cores)
    monkeypatch.setattr(decoder_process, "free_host_memory", lambda: gigabytes * 10**9)
    source = open_source(tmp_path)
    monkeypatch.setattr(sys, "platform", system)
    found = start_decoder_process(source, torch.device(device))
    assert (found is not None) == (len(stand_in.servers) == 1) == is_started
    if found is not None:
        found.close()


def test_images_in_memory_are_read_by_threads(
    monkeypatch: pytest.MonkeyPatch, stand_in: type[ServerInThread]
) -> None:
    monkeypatch.setenv("COMPRESSIVE_DECODE_PROCESS", "on")
    assert start_decoder_process(open_source("builtin"), CPU) is None
    assert not stand_in.servers


def test_only_loaders_that_ask_for_it_start_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand_in: type[ServerInThread]
) -> None:
    monkeypatch.setenv("COMPRESSIVE_DECODE_PROCESS", "on")
    write_images(tmp_path)
    source = open_source(tmp_path)
    options: Any = {"side": SIDE, "device": "cpu", "cache_on_device": "no", "workers": 1}
    for is_apart in (False, True):
        with open_loader(source, decode_apart=is_apart, **options) as loader:
            assert isinstance(loader, Streaming)
            assert (loader.process is not None) == is_apart
    assert len(stand_in.servers) == 1


def test_process_that_cannot_start_is_replaced_by_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no more processes")

    write_images(tmp_path)
    monkeypatch.setenv("COMPRESSIVE_DECODE_PROCESS", "on")
    monkeypatch.setattr(decoder_process.subprocess, "Popen", fail)
    assert start_decoder_process(open_source(tmp_path), CPU) is None


def test_process_ends_if_no_thread_can_listen(
    tmp_path: Path, stand_in: type[ServerInThread], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("can't start new thread")

    write_images(tmp_path)
    monkeypatch.setenv("COMPRESSIVE_DECODE_PROCESS", "on")
    listeners = SimpleNamespace(
        Thread=type("Thread", (threading.Thread,), {"start": fail}),
        Lock=threading.Lock,
        RLock=threading.RLock,
        current_thread=threading.current_thread,
    )
    monkeypatch.setattr(decoder_process, "threading", listeners)
    assert start_decoder_process(open_source(tmp_path), CPU) is None
    stand_in.servers[0].thread.join(10)
    assert not stand_in.servers[0].thread.is_alive()


# --- the real process -----------------------------------------------------------------------------


@pytest.mark.slow
def test_real_process_decodes_the_same_and_ends(tmp_path: Path) -> None:
    write_images(tmp_path)
    source = open_source(tmp_path)
    portions = plan(len(source), epochs=20)
    loader = apart(source)
    assert loader.process is not None
    pid = loader.process.pid
    with loader:
        batches = loader.batches(portions)
        found = [next(batches) for _ in range(20)]
        assert is_running(pid)
        os.kill(pid, signal.SIGKILL)
        with pytest.warns(UserWarning, match="has ended"):
            assert_equal([*found, *batches], by_threads(source, portions))
    assert not is_running(pid)
    other = apart(source)
    assert other.process is not None
    pid = other.process.pid
    for number in (signal.SIGTERM, signal.SIGINT):  # as SLURM does before it ends a job
        os.kill(pid, number)
    assert_equal(list(other.batches(portions)), by_threads(source, portions))
    assert other.process.is_ready
    other.close()
    assert not is_running(pid)
    process = DecoderProcess()
    process.close()  # while it imports torch
    assert not process.is_ready
    assert not is_running(process.pid)


KILLED = """
import os, sys, time, torch
from compressive.data.decoder_process import DecoderProcess
from compressive.data.loaders import Streaming
from compressive.data.sampler import BatchIndices
from compressive.data.sources import open_source

process = DecoderProcess()
while not process.is_ready: time.sleep(0.01)
source = open_source(sys.argv[1])
index = torch.arange(len(source))
loader = Streaming(source, side=40, device="cpu", workers=2, process=process)
batches = loader.batches([BatchIndices(index, index)] * 10_000)
next(batches)
print(process.pid, flush=True)
if sys.argv[2] == "kill": os.kill(os.getpid(), 9)
raise SystemExit(5)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("ending", "code"), [("kill", -9), ("exit", 5)])
def test_process_ends_with_its_parent(ending: str, code: int, tmp_path: Path) -> None:
    write_images(tmp_path)
    words = [sys.executable, "-c", KILLED, str(tmp_path), ending]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment)
    assert (run.returncode, run.stderr) == (code, "")
    until = time.monotonic() + 10
    while is_running(int(run.stdout)) and time.monotonic() < until:
        time.sleep(0.05)
    assert not is_running(int(run.stdout))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_batches_are_correct_on_a_busy_gpu(tmp_path: Path) -> None:
    """Batches are read long after they were launched, and buffers are reused."""
    write_images(tmp_path, 8)
    source = open_source(tmp_path)
    portions = plan(len(source), epochs=12)
    busy, found = torch.rand(4096, 4096, device="cuda"), list[Tensor]()
    with apart(source, "cuda") as loader:
        batches = loader.batches(portions)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for batch in batches:
                busy = (busy @ busy).clamp(0, 1)
                found.append(torch.stack([batch.images.long().sum((1, 2, 3)), *batch[1:]]))
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for one, other in zip(found, by_threads(source, portions), strict=True):
        expected = torch.stack([other.images.long().sum((1, 2, 3)), *other[1:]])
        assert torch.equal(one.cpu(), expected)

"""Decoding on the device gives the batches of the CPU, with a CPU decoder in place of nvJPEG."""

import itertools
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from device_decoders import (
    StandIn,
    assert_same,
    damaged,
    files,
    first_plane_only,
    photo,
    wrong_colors,
)
from image_kinds import encoded, kinds, picture
from loader_endings import ENDINGS, stop_consumer
from PIL import Image
from torch import Tensor

from compressive.data import device_decode, nvjpeg
from compressive.data.decode import Unreadable, decode, resize_image, shrink
from compressive.data.device_decode import resize_on_device, upright
from compressive.data.jpeg_header import SUBSAMPLINGS, read_jpeg_header
from compressive.data.loaders import Resident, Streaming, open_loader
from compressive.data.nvjpeg import (
    NoDeviceDecoder,
    choose_decoder,
    jpeg_share,
    matching_subsamplings,
)
from compressive.data.pack import pack_images
from compressive.data.sampler import BatchIndices, batch_index_stream
from compressive.data.several import take
from compressive.data.source import ImageSource, Source, subset
from compressive.data.sources import open_source

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore::UserWarning:PIL"),
    pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning"),
]
SIDE = 64


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("decode-")]


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    yield
    assert not threads()


def mixed() -> dict[str, bytes]:
    """Return files of all formats and orientations, up to 64 pixels a side."""
    found = {name: kind.data for name, kind in kinds().items() if kind.reason is None}
    return {name: data for name, data in found.items() if max(decode(data).shape) <= SIDE}


def plan(count: int, batch: int, steps: int, seed: int = 0) -> list[BatchIndices]:
    return list(itertools.islice(batch_index_stream(count, batch, seed=seed), steps))


def loaded(source: Source, decoder: StandIn | None, order: list[BatchIndices], **options: Any):
    options = {"side": SIDE, "device": "cpu", "workers": 3} | options
    with Streaming(source, decoder=decoder and decoder.decoder, **options) as loader:
        return list(loader.batches(order)), loader


MIXED = mixed()


def test_mixed_formats_give_the_batches_of_the_cpu_bitwise() -> None:
    """A decoder with the pixels of the CPU must change nothing if no image is shrunk."""
    source, decoder = files(MIXED), StandIn()
    order = plan(len(source), 16, 30)
    ours, _ = loaded(source, decoder, order)
    theirs, _ = loaded(source, None, order)
    assert_same(ours, theirs)
    ordinary = sum(read_jpeg_header(data) is not None for data in MIXED.values())
    assert 25 < ordinary < len(MIXED) - 50
    assert sum(decoder.calls) == sum(
        read_jpeg_header(source.stored(i)) is not None
        for part in order
        for i in part.index.tolist()
    )


def test_large_images_are_shrunk_as_on_the_cpu() -> None:
    sizes = [(300, 400), (90, 33), (65, 64), (150, 700), (700, 5), (1000, 3), (64, 65)]
    turns = [1, 6, 3, 8, 1, 1, 5]
    data = []
    for seed, (size, turn) in enumerate(zip(sizes, turns, strict=True)):
        exif = Image.Exif()
        exif[0x0112] = turn
        data.append(photo(*size, seed=seed, exif=exif))
    source = files(data)
    order = plan(len(source), 7, 2)
    (ours, _), (theirs, _) = (loaded(source, each, order) for each in (StandIn(), None))
    for one, other in zip(ours, theirs, strict=True):
        for a, b in zip(one[1:], other[1:], strict=True):
            assert torch.equal(a, b)
        difference = (one.images.int() - other.images.int()).abs()
        assert difference.max() <= 2
        assert (difference > 0).float().mean() < 0.02
        assert one.images.float().std() > 30


@pytest.mark.parametrize("size", [(300, 400), (41, 700), (700, 1), (1, 700), (90, 33), (513, 512)])
@pytest.mark.parametrize("side", [256, 64, 20])
def test_resizing_equals_pil_and_the_cpu(size: tuple[int, int], side: int) -> None:
    """torch's uint8 weights have 15 bits, PIL's 22 and ours 24: ours is closer to PIL."""
    image = torch.randint(0, 256, (3, *size), dtype=torch.uint8)
    ours, cpu = shrink(image, side, resize=resize_on_device), shrink(image, side)
    wanted = Image.fromarray(image.permute(1, 2, 0).numpy())
    if max(size) > side:
        wanted = wanted.resize((cpu.shape[2], cpu.shape[1]), Image.Resampling.BICUBIC)
    pil = torch.from_numpy(np.array(wanted)).permute(2, 0, 1)
    assert ours.shape == cpu.shape
    for other, most in ((pil, 0.005), (cpu, 0.02)):
        difference = (ours.int() - other.int()).abs()
        assert difference.max() <= 2
        assert (difference > 0).float().mean() <= most


def test_blocks_of_rows_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    image = torch.randint(0, 256, (3, 97, 120), dtype=torch.uint8)
    whole = resize_on_device(image, [40, 50])
    monkeypatch.setattr(device_decode, "_FLOAT_BLOCK", 3 * 120 * 10)
    assert torch.equal(resize_on_device(image, [40, 50]), whole)
    assert (whole.int() - resize_image(image, [40, 50]).int()).abs().max() <= 1


@pytest.mark.parametrize("turn", range(1, 9))
def test_orientations_are_those_of_the_cpu(turn: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = turn
    data = photo(31, 45, exif=exif)
    stored = decode(photo(31, 45))
    assert torch.equal(upright(stored, turn), decode(data))


# Damaged files


def test_damaged_files_are_reported_and_replaced_as_on_the_cpu(
    capfd: pytest.CaptureFixture[str],
) -> None:
    source, decoder = files(damaged()), StandIn()
    order = [BatchIndices(i, torch.zeros_like(i)) for i in torch.arange(len(source)).split(32)]
    (ours, here), (theirs, there) = (loaded(source, each, order * 2) for each in (decoder, None))
    assert here.bad == there.bad
    assert len(here.bad) > 80
    assert here.unreadable == there.unreadable
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.index, other.index)
        assert torch.equal(one.label, other.label)
        small = (one.height < SIDE) & (one.width < SIDE)  # the others are shrunk
        assert torch.equal(one.images[small], other.images[small])
    assert sum(decoder.calls) > 200
    capfd.readouterr()  # libjpeg prints warnings


def test_file_that_the_device_rejects_is_decoded_on_the_cpu_once() -> None:
    """One bad file fails a whole call, so that halves are decoded again."""
    data = [photo(40, 50, seed=i) for i in range(20)]
    data[13] = photo(40, 50, seed=13, comment=b"reject me")
    source, decoder = files(data), StandIn(lambda each: b"reject me" in each)
    order = [BatchIndices(torch.arange(20), torch.zeros(20).long())] * 3
    ours, loader = loaded(source, decoder, order)
    theirs, _ = loaded(source, None, order)
    assert_same(ours, theirs)
    assert loader.bad == []
    assert decoder.calls[0] == 20
    assert decoder.calls.count(1) >= 1
    assert decoder.calls[-2:] == [19, 19]  # it is not tried again


class Rotten(ImageSource):
    """A source whose image 2 only a device could read, and whose image 3 is rejected by it."""

    def image(self, i: int) -> Tensor:
        if i == 2:
            raise Unreadable("rotten")
        return super().image(i)


def test_substitute_of_a_rejected_file_is_decoded_on_the_device() -> None:
    """Else its pixels would depend on whether the damage is already known, as after a resume."""
    data = [photo(40, 50, seed=i) for i in range(6)]
    data[2] = photo(40, 50, seed=2, comment=b"reject me")
    plain = files(data)
    source = Rotten(name="rotten", count=6, read=plain.read, place=plain.place)
    brighter = StandIn(lambda each: b"reject me" in each)

    def marked(batch: list[Tensor]) -> list[Tensor]:
        return [image.clamp(min=99) for image in brighter(batch)]  # tells who decoded it

    decoder = brighter.decoder._replace(decode=marked)
    order = [BatchIndices(torch.tensor([1, 2]), torch.zeros(2).long())] * 2
    with Streaming(source, side=SIDE, device="cpu", workers=2, decoder=decoder) as loader:
        first, second = loader.batches(order)
    assert loader.unreadable == [("file 2", "rotten")]
    assert first.index.tolist() == second.index.tolist() == [1, 3]
    assert first.images[:, :, :40, :50].min() == 99
    assert torch.equal(first.images, second.images)


def test_wrong_size_from_the_device_is_left_to_the_cpu() -> None:
    data = [photo(40, 50, seed=i) for i in range(4)]
    stand_in = StandIn()

    def cut(batch: list[Tensor]) -> list[Tensor]:
        first, *rest = stand_in(batch)
        return [first[:, 1:], *rest]

    order = [BatchIndices(torch.arange(4), torch.zeros(4).long())]
    decoder = stand_in.decoder._replace(decode=cut)
    with Streaming(files(data), side=SIDE, device="cpu", workers=1, decoder=decoder) as loader:
        ours = list(loader.batches(order))
    assert_same(ours, loaded(files(data), None, order)[0])


def test_large_files_are_left_to_the_cpu() -> None:
    """Those above data.max_pixels must be reported, and very large ones need too much memory."""
    data = [photo(40, 50), photo(60, 61), photo(20, 20)]
    source = ImageSource(name="x", count=3, read=data.__getitem__, place=str, max_pixels=60 * 60)
    decoder = StandIn()
    order = [BatchIndices(torch.arange(3), torch.zeros(3).long())]
    (batch,), loader = loaded(source, decoder, order)
    assert batch.index.tolist() == [0, 2, 2]
    ((place, reason),) = loader.unreadable
    assert place == "1"
    assert "data.max_pixels" in reason
    long = files([photo(3, 16 * SIDE), photo(3, 16 * SIDE + 1)])
    decoder = StandIn()
    loaded(long, decoder, [BatchIndices(torch.arange(2), torch.zeros(2).long())])
    assert decoder.calls == [1]


# Sources


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return 30 files in three classes: JPEG, one PNG in each class, one damaged file."""
    place = tmp_path_factory.mktemp("photos")
    for i in range(30):
        part = place / "abc"[i % 3]
        part.mkdir(exist_ok=True)
        if i >= 27:
            picture(30, 40 + i % 3).save(part / f"{i:02}.png")
        else:
            (part / f"{i:02}.jpg").write_bytes(photo(30 + i % 20, 50, seed=i))
    cut = place / "b" / "04.jpg"
    cut.write_bytes(cut.read_bytes()[:-300])
    return place


@pytest.mark.parametrize("kind", ["files", "tar", "parquet", "several", "limit", "both"])
def test_every_kind_of_source_is_decoded_on_the_device(
    kind: str, folder: Path, tmp_path: Path
) -> None:
    if kind in ("tar", "parquet"):
        pack_images(folder, tmp_path / "packed", kind=kind)
        source = open_source(tmp_path / "packed")
    elif kind in ("several", "both"):
        source = open_source([folder / "a", folder / "b", folder / "c"])
        if kind == "both":
            source = take(source, torch.arange(3, 29, 2))
    else:
        source = open_source(folder)
        if kind == "limit":
            source = subset(source, torch.arange(0, 30, 3))
    decoder, order = StandIn(), plan(len(source), 8, 8)
    (ours, here), (theirs, there) = (loaded(source, each, order) for each in (decoder, None))
    assert_same(ours, theirs)
    assert here.unreadable == there.unreadable
    assert sum(decoder.calls) > 20
    assert jpeg_share(source) > 0.7


def test_sources_without_files_are_read_as_before() -> None:
    pictures = [torch.randint(0, 256, (3, 9, 12), dtype=torch.uint8) for _ in range(4)]
    source = ImageSource(name="pixels", count=4, read=pictures.__getitem__, place=str)
    decoder, order = StandIn(), plan(4, 4, 3)
    (ours, _), (theirs, _) = (loaded(source, each, order) for each in (decoder, None))
    assert_same(ours, theirs)
    assert decoder.calls == []
    assert jpeg_share(source) == 0


def test_subset_keeps_the_limit_of_pixels() -> None:
    source = ImageSource(
        name="x", count=2, read=[photo(9, 9), photo(30, 30)].__getitem__, place=str, max_pixels=99
    )
    part = subset(source, torch.tensor([1, 0]))
    with pytest.raises(Unreadable, match=r"data\.max_pixels"):
        part.image(0)
    assert part.image(1).shape == (3, 9, 9)


def test_cached_set_can_be_decoded_on_the_device() -> None:
    source, decoder = files(MIXED), StandIn()
    options = {"side": SIDE, "device": "cpu", "workers": 2}
    ours = Resident(source, decoder=decoder.decoder, **options)
    theirs = Resident(source, **options)
    assert torch.equal(ours.images, theirs.images)
    assert torch.equal(ours.numbers, theirs.numbers)
    assert sum(decoder.calls) > 20


# Threads, order and memory


def test_plan_is_read_up_to_the_limit() -> None:
    taken = 0

    def endless() -> Iterator[BatchIndices]:
        nonlocal taken
        for i in itertools.count():
            taken += 1
            yield BatchIndices(torch.tensor([i % 10, 0]), torch.tensor([i, i]))

    source = files([photo(20, 20, seed=i) for i in range(10)])
    decoder = StandIn().decoder
    loader = Streaming(source, side=SIDE, device="cpu", workers=2, prefetch=3, decoder=decoder)
    batches = loader.batches(endless())
    assert taken == 0
    for i in range(20):
        assert next(batches).epoch.tolist() == [i, i]
        time.sleep(0.002)
        assert taken <= i + 1 + 3
    batches.close()


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two batches exist: the consumer's and the next one. Calls have the bytes of a batch."""
    monkeypatch.setattr(device_decode, "_DECODED_CHUNK", 1)
    alive: list[weakref.ref[Tensor]] = []
    most = 0
    empty = torch.empty

    def counted(*shape: Any, **options: Any) -> Tensor:
        made = empty(*shape, **options)
        if made.ndim == 4:
            alive.append(weakref.ref(made))
        return made

    monkeypatch.setattr(torch, "empty", counted)
    source = files([photo(100 + i, 150, seed=i) for i in range(24)])
    decoder = StandIn()
    with Streaming(
        source, side=SIDE, device="cpu", workers=2, prefetch=4, decoder=decoder.decoder
    ) as loader:
        for batch in loader.batches(plan(24, 12, 12)):
            time.sleep(0.05)  # the next one is decoded meanwhile, and no other
            most = max(most, sum(each() is not None for each in alive))
            assert len(batch.index) == 12
    assert most == 2
    assert len(alive) == 12
    assert 0 < decoder.largest <= 12 * 3 * SIDE**2
    assert max(decoder.calls) < 12


def test_errors_are_raised_in_the_order_of_the_plan() -> None:
    data = [photo(20, 20, seed=i) for i in range(6)]

    def read(i: int) -> bytes:
        if i == 4:
            raise ZeroDivisionError("a bug")
        return data[i]

    source = ImageSource(name="broken", count=6, read=read, place=str)
    order = [BatchIndices(torch.tensor(i), torch.zeros(2).long()) for i in ([0, 1], [2, 3], [4, 5])]
    loader = Streaming(source, side=SIDE, device="cpu", workers=3, decoder=StandIn().decoder)
    batches = loader.batches([*order, *order])
    first = next(batches)
    time.sleep(0.05)  # by now the third batch has failed
    assert (first.index.tolist(), next(batches).index.tolist()) == ([0, 1], [2, 3])
    with pytest.raises(ZeroDivisionError, match="a bug"):
        next(batches)


@pytest.mark.parametrize("kind", [torch.OutOfMemoryError, ZeroDivisionError])
def test_errors_of_the_device_are_raised(kind: type[Exception]) -> None:
    """They are no fault of a file."""

    def fail(_: list[Tensor]) -> list[Tensor]:
        raise kind("no memory")

    source = files([photo(20, 20)])
    decoder = StandIn().decoder._replace(decode=fail)
    with (
        Streaming(source, side=SIDE, device="cpu", workers=2, decoder=decoder) as loader,
        pytest.raises(kind, match="no memory"),
    ):
        list(loader.batches([BatchIndices(torch.zeros(1).long(), torch.zeros(1).long())]))


def slow_files(tried: list[int], seconds: float = 0.03, count: int = 100) -> ImageSource:
    data = photo(20, 20)

    def read(i: int) -> bytes:
        tried.append(i)
        time.sleep(seconds)
        return data

    return ImageSource(name="slow", count=count, read=read, place=str)


@pytest.mark.parametrize("ending", ENDINGS)
def test_threads_stop_with_the_consumer(ending: str) -> None:
    tried: list[int] = []
    loader = Streaming(
        slow_files(tried), side=4, device="cpu", workers=2, prefetch=3, decoder=StandIn().decoder
    )
    order = [[0], *[list(range(100))] * 3]
    held = [loader.batches([BatchIndices(torch.tensor(i), torch.tensor(i)) for i in order])]
    next(held[0])
    assert len(threads()) == 3
    stop_consumer(ending, loader, held)
    assert not threads()
    assert len(tried) < 30


def test_closing_raises_in_a_waiting_consumer() -> None:
    source = slow_files([], 0.5, count=4)
    loader = Streaming(source, side=4, device="cpu", workers=1, decoder=StandIn().decoder)
    closing = threading.Timer(0.1, loader.close)
    closing.start()
    with pytest.raises(RuntimeError, match="closed"):
        next(loader.batches([BatchIndices(torch.arange(4), torch.arange(4))]))
    closing.join()


DYING = """
import sys, torch
sys.path.insert(0, sys.argv[1])
from device_decoders import StandIn
from image_kinds import encoded, picture
from compressive.data.loaders import Streaming
from compressive.data.sampler import BatchIndices
from compressive.data.source import ImageSource

data = encoded("JPEG", picture(200, 200))
source = ImageSource(name="x", count=16, read=lambda i: data, place=str)
plan = [BatchIndices(torch.arange(16), torch.arange(16))] * 9
loader = Streaming(source, side=200, device="cpu", workers=8, decoder=StandIn().decoder)
batches = loader.batches(plan)
next(batches)
raise SystemExit(5)
"""


@pytest.mark.slow
def test_exit_during_decoding_prints_nothing() -> None:
    words = [sys.executable, "-c", DYING, str(Path(__file__).parents[1])]
    run = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (run.returncode, run.stderr) == (5, "")


def test_waiting_of_the_consumer_is_counted() -> None:
    decoder = StandIn().decoder
    source = slow_files([], count=4)
    loader = Streaming(source, side=4, device="cpu", workers=1, prefetch=2, decoder=decoder)
    order = [BatchIndices(torch.tensor(i), torch.tensor(i)) for i in ([0, 1], [2, 3])]
    batches = loader.batches(order)
    assert loader.waited == 0
    next(batches)
    first = loader.waited
    assert first >= 0.06  # two images
    time.sleep(0.5)  # the other two are decoded meanwhile
    next(batches)
    assert loader.waited - first < 0.25
    assert next(batches, None) is None


def test_two_iterations_can_share_one_loader() -> None:
    source = files(MIXED)
    order = plan(len(source), 8, 6)
    wanted, _ = loaded(source, None, order)
    decoder = StandIn().decoder
    with Streaming(source, side=SIDE, device="cpu", workers=2, decoder=decoder) as loader:
        training = loader.batches(order)
        first = next(training)
        assert_same(list(loader.batches(order[3:])), wanted[3:])
        assert_same([first, *training], wanted)


# The choice of the decoder


def test_decoder_is_compared_with_libjpeg() -> None:
    assert matching_subsamplings(StandIn()) == frozenset(SUBSAMPLINGS)
    assert matching_subsamplings(first_plane_only) == frozenset(SUBSAMPLINGS) - {"gray"}
    assert matching_subsamplings(wrong_colors) == {"gray"}
    with pytest.raises(RuntimeError, match="decode batch"):
        matching_subsamplings(StandIn(lambda _: True))
    with pytest.raises(RuntimeError, match="differ"):
        matching_subsamplings(lambda batch: [torch.zeros(3, 70, 90) for _ in batch])


def repeated_chroma(batch: list[Tensor]) -> list[Tensor]:
    """Return pictures whose chroma samples are repeated in blocks, not interpolated."""
    found = []
    for file in batch:
        pixels = decode(bytes(file.numpy())).permute(1, 2, 0).numpy()
        planes = np.array(Image.fromarray(pixels).convert("YCbCr"))
        chroma = planes[::2, ::2, 1:].repeat(2, 0).repeat(2, 1)
        planes[..., 1:] = chroma[: planes.shape[0], : planes.shape[1]]
        image = Image.fromarray(planes, "YCbCr").convert("RGB")
        found.append(torch.from_numpy(np.array(image)).permute(2, 0, 1))
    return found


@pytest.mark.filterwarnings("ignore:'mode' parameter is deprecated:DeprecationWarning")
def test_repeated_chroma_passes_the_comparison() -> None:
    """Interpolation of chroma is not part of the standard; nvJPEG need not interpolate."""
    assert matching_subsamplings(repeated_chroma) == frozenset(SUBSAMPLINGS)


def test_unsupported_subsampling_is_decoded_on_the_cpu() -> None:
    data = [photo(20, 20, seed=i, subsampling=i % 3) for i in range(9)]
    stand_in = StandIn()
    decoder = stand_in.decoder._replace(subsamplings=frozenset({"422"}))
    order = [BatchIndices(torch.arange(9), torch.arange(9))]
    with Streaming(files(data), side=SIDE, device="cpu", workers=2, decoder=decoder) as loader:
        ours = list(loader.batches(order))
    assert_same(ours, loaded(files(data), None, order)[0])
    assert stand_in.calls == [3]


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Use a stand-in for nvJPEG on any device; return the devices it was opened for."""
    opened: list[torch.device] = []

    def open_stand_in(device: torch.device) -> Any:
        opened.append(device)
        return StandIn().decoder

    monkeypatch.setattr(nvjpeg, "nvjpeg_decoder", open_stand_in)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    return opened


CUDA = torch.device("cuda", 0)


def test_automatic_choice_needs_many_jpeg_files_and_an_engine(
    found: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    jpeg, png = photo(9, 9), encoded("PNG", picture(9, 9))
    many, few = files([jpeg] * 1000), files([jpeg] * 999)
    other = files([png] * 600 + [jpeg] * 400)

    def choose(source: Source, is_cached: bool = False, device: torch.device = CUDA) -> bool:
        return choose_decoder(source, device, "auto", is_cached=is_cached) is not None

    assert choose(many)
    assert choose(files([png] * 400 + [jpeg] * 600))
    assert found == [CUDA, CUDA]
    assert not choose(few)
    assert not choose(other)
    assert not choose(many, is_cached=True)
    assert not choose(many, device=torch.device("cpu"))
    assert not choose(many, device=torch.device("xpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 6))
    assert not choose(many)
    monkeypatch.setattr(nvjpeg, "is_rocm", lambda: True)
    assert not choose(many)
    assert len(found) == 2


def test_explicit_choice_is_obeyed_or_rejected(
    found: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = files([photo(9, 9)])
    assert choose_decoder(few, CUDA, "no", is_cached=False) is None
    assert choose_decoder(few, CUDA, "yes", is_cached=True) is not None
    with pytest.raises(ValueError, match=r"data\.decode_on_device=yes .*cpu; .*=auto or no$"):
        choose_decoder(few, torch.device("cpu"), "yes", is_cached=False)

    def none(device: torch.device) -> Any:
        raise NoDeviceDecoder("no decoder of JPEG for cuda:0 (torchvision: not compiled)")

    monkeypatch.setattr(nvjpeg, "nvjpeg_decoder", none)
    with pytest.raises(ValueError, match=r"data\.decode_on_device=yes: .*not compiled.*=no$"):
        choose_decoder(few, CUDA, "yes", is_cached=False)
    assert choose_decoder(files([photo(9, 9)] * 1000), CUDA, "auto", is_cached=False) is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_missing_gpu_is_reported_with_the_reason_of_each_library() -> None:
    with pytest.raises(NoDeviceDecoder, match=r"cuda:0 \(torchcodec: .+; torchvision: .+\)$"):
        nvjpeg.nvjpeg_decoder(CUDA)


def test_other_loaders_decode_on_the_cpu() -> None:
    """Evaluation does not depend on the decoder of training."""
    loader = open_loader(files([photo(9, 9)] * 3), side=9, device="cpu", cache_on_device="no")
    assert isinstance(loader, Streaming)
    assert loader.decoder is None

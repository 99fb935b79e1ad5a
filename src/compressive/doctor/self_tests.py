"""Checks of devices, the compiler, decoders, losses and the disk, of at most five seconds each."""

import importlib.util
import io
import logging
import math
import os
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from PIL import Image, features
from torch import Tensor
from torch.nn import functional

from compressive.data.decode import decode
from compressive.doctor.facts import DeviceFacts, scrub
from compressive.objectives import csimclr_loss, simclr_loss
from compressive.rundir.files import write_bytes

LIMIT = 5.0  # seconds of one check

CheckState = Literal["ok", "failed", "skipped"]


class Skip(Exception):
    """Raised by a check that is impossible here; the message is the reason."""


class CheckResult(NamedTuple):
    """The result of a check."""

    name: str
    state: CheckState
    reason: str  # "" if ok
    seconds: float


class SelfTest(NamedTuple):
    """A check: `run` returns or raises."""

    name: str
    run: Callable[[], object]
    may_be_slow: bool = False  # skipped instead of failed if it exceeds the limit


def all_tests(devices: list[DeviceFacts]) -> list[SelfTest]:
    """Return the checks of this machine."""
    found = []
    for facts in devices:
        device = torch.device(facts.name)
        for what, check in (("products", check_products), ("losses", check_losses)):
            found.append(SelfTest(f"{facts.name}: {what}", partial(check, device)))
    found += [SelfTest(f"decode {name}", run) for name, run in _decoding()]
    found.append(SelfTest("disk: write, fsync, rename", check_disk))
    # Last, because the compiler may still run when the time is over.
    best = next((facts.name for facts in devices if facts.name != "cpu"), "cpu")
    run = partial(check_compiler, torch.device(best))
    return [*found, SelfTest(f"{best}: compiled step", run, may_be_slow=True)]


def run_test(test: SelfTest, limit: float = LIMIT) -> CheckResult:
    """Run a check in a thread; stop waiting after `limit` seconds."""
    # A thread and not a process: importing torch again would take most of the time.
    raised: list[BaseException | None] = []

    def work() -> None:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                test.run()
            raised.append(None)
        except BaseException as error:
            raised.append(error)

    began = time.perf_counter()
    thread = threading.Thread(target=work, name=test.name, daemon=True)
    thread.start()
    thread.join(limit)
    seconds = time.perf_counter() - began
    if not raised:
        state: CheckState = "skipped" if test.may_be_slow else "failed"
        return CheckResult(test.name, state, f"no result after {limit:g} s", seconds)
    error = raised[0]
    if error is None:
        return CheckResult(test.name, "ok", "", seconds)
    reason = scrub(str(error) or type(error).__name__)
    if isinstance(error, Skip):
        return CheckResult(test.name, "skipped", reason, seconds)
    return CheckResult(test.name, "failed", f"{type(error).__name__}: {reason}", seconds)


def check_products(device: torch.device) -> None:
    """Compare matrix products in float32 and bfloat16 with float64 on the CPU."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 256, 256, generator=generator)
    exact = a.double() @ b.double()
    for dtype, tolerance in ((torch.float32, 1e-2), (torch.bfloat16, 0.1)):
        found = (a.to(device, dtype) @ b.to(device, dtype)).cpu().double()
        _require_near(f"{dtype} product".removeprefix("torch."), found, exact, tolerance)


def check_losses(device: torch.device) -> None:
    """Compare losses in float32 with a plain formula and with float64 on the CPU."""
    generator = torch.Generator().manual_seed(0)
    r_x, r_y = torch.randn(2, 16, 32, generator=generator)
    found = simclr_loss(r_x.to(device), r_y.to(device), temperature=0.1).loss.cpu().double()
    plain = plain_ntxent(r_x.tolist(), r_y.tolist(), 0.1)
    _require_near("SimCLR's loss", found, torch.tensor(plain, dtype=torch.float64), 1e-4)
    losses, slopes = [], []
    for dtype, place in ((torch.float32, device), (torch.float64, torch.device("cpu"))):
        x, y = (r.to(place, dtype).requires_grad_() for r in (r_x, r_y))
        z_x, z_y = (functional.normalize(r.detach(), dim=1) for r in (x, y))
        loss = csimclr_loss(x, y, z_x=z_x, z_y=z_y).loss
        (slope,) = torch.autograd.grad(loss, x)
        losses.append(loss.detach().cpu().double())
        slopes.append(slope.cpu().double())
    _require_near("C-SimCLR's loss", losses[0], losses[1], 1e-4)
    _require_near("C-SimCLR's gradient", slopes[0], slopes[1], 1e-3)


def plain_ntxent(x: list[list[float]], y: list[list[float]], temperature: float) -> float:
    """Return SimCLR's loss, summed over both directions, in Python's floats."""
    rows = [[value / math.hypot(*row) for value in row] for row in (*x, *y)]
    count, total = len(x), 0.0
    for i, row in enumerate(rows):
        logits = [sum(map(float.__mul__, row, other)) / temperature for other in rows]
        others = sum(math.exp(logit) for k, logit in enumerate(logits) if k != i)
        total += math.log(others) - logits[(i + count) % (2 * count)]
    return total / count


def _require_near(name: str, found: Tensor, exact: Tensor, tolerance: float) -> None:
    error = float((found - exact).abs().max() / exact.abs().max())
    if not error <= tolerance:
        raise ArithmeticError(f"{name} is wrong by {error:.2g} of its size")


def check_compiler(device: torch.device) -> None:
    """Compile a small step, and compare it with the same step without compilation."""
    if device.type == "cpu":
        compiler = os.environ.get("CXX") or ("cl" if os.name == "nt" else "c++")
        if not any(map(shutil.which, (compiler, "g++", "clang++"))):
            raise Skip("no C++ compiler; only train.compile=yes needs one")
    elif device.type == "mps" or importlib.util.find_spec("triton") is None:
        raise Skip("no Triton; only compiled steps need it")

    silence_toolkit_note()

    def step(x: Tensor) -> Tensor:
        return functional.normalize(x, dim=1).square().mul(3).cos().sum(1)

    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).to(device)
    compiled = torch.compile(step, dynamic=False)
    _require_near("the compiled step", compiled(x).cpu(), step(x).cpu(), 1e-4)


def silence_toolkit_note() -> None:
    """Hide torch's note that CUDA_HOME exists but no GPU does; the list of devices shows this."""
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)


def _decoding() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the check of each decoder that is installed."""
    kinds = {"JPEG": True, "PNG": True, "TIFF": True, "WebP": features.check("webp")}
    for kind, there in {**kinds, "AVIF": features.check("avif")}.items():
        if there:
            yield kind, partial(check_decoder, _encoded(kind), decode)
    if importlib.util.find_spec("torchcodec") is not None:
        yield "JPEG with torchcodec", lambda: check_decoder(_encoded("JPEG"), _torchcodec)
    if importlib.util.find_spec("pillow_heif") is not None:
        yield "HEIC with pillow-heif", check_heic


def check_decoder(data: bytes, decoder: Callable[[bytes], Tensor]) -> None:
    """Compare a decoded picture with the one that was encoded."""
    picture, found = _picture(), decoder(data)
    if tuple(found.shape) != tuple(picture.shape):
        raise ValueError(f"the image has the shape {tuple(found.shape)}")
    error = (found.float() - picture.float()).abs().mean().item()
    if error > 4:
        raise ValueError(f"pixels are wrong by {error:.0f} of 255 on average")


def check_heic() -> None:
    """Encode and decode a picture as HEIC."""
    heif: Any = importlib.import_module("pillow_heif")
    heif.register_heif_opener()
    with Image.open(io.BytesIO(_encoded("HEIF"))) as picture:
        pixels = torch.frombuffer(bytearray(picture.convert("RGB").tobytes()), dtype=torch.uint8)
    check_decoder(b"", lambda _: pixels.view(48, 64, 3).permute(2, 0, 1))


def _torchcodec(data: bytes) -> Tensor:
    codec: Any = importlib.import_module("torchcodec.decoders")
    return codec.decode_image(torch.frombuffer(bytearray(data), dtype=torch.uint8))


def _picture() -> Tensor:
    """Return a smooth picture, which every codec keeps within a few levels."""
    rows, columns = torch.meshgrid(torch.arange(48), torch.arange(64), indexing="ij")
    return torch.stack([4 * rows, 3 * columns, 2 * (rows + columns)]).byte()


def _encoded(kind: str) -> bytes:
    buffer, pixels = io.BytesIO(), _picture().permute(1, 2, 0).contiguous().numpy()
    Image.fromarray(pixels).save(buffer, kind, quality=95)
    return buffer.getvalue()


def check_disk() -> None:
    """Write a file as checkpoints are written, replace it, and read it back."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file"
        for content in (b"first", os.urandom(2**20)):
            write_bytes(path, content)
            if path.read_bytes() != content:
                raise OSError("a file that was written has another content")

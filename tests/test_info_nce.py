"""InfoNCE: the streamed form matches the in-memory one and uses little memory."""

import subprocess
import sys

import pytest
import torch
from conftest import unit_vectors
from processes import printed

from compressive import info_nce


def both_ways(
    monkeypatch: pytest.MonkeyPatch, own: bool, dtype: torch.dtype
) -> list[tuple[torch.Tensor, ...]]:
    z, mu, other = (unit_vectors(37, 16, seed=s, dtype=dtype).requires_grad_() for s in range(3))
    results = []
    for keep, block in ((2**26, 2**24), (0, 5 * 74)):
        monkeypatch.setattr(info_nce, "_KEEP", keep)
        monkeypatch.setattr(info_nce, "_LOGITS_PER_BLOCK", block)
        nll = info_nce.info_nce(z, mu, 12.0, own=other if own else None)
        weights = torch.linspace(-1, 2, 37, dtype=dtype)
        inputs = (z, mu, other) if own else (z, mu)
        results.append((nll, *torch.autograd.grad((nll * weights).sum(), inputs)))
    return results


@pytest.mark.parametrize("own", [True, False])
def test_streamed_matches_in_memory(monkeypatch: pytest.MonkeyPatch, own: bool) -> None:
    """Compare blocks of 5 rows (10 without `own`) and a last one of 2 (7) to all rows at once."""
    kept, streamed = both_ways(monkeypatch, own, torch.float64)
    for a, b in zip(kept, streamed, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)
    kept, streamed = both_ways(monkeypatch, own, torch.float32)
    for a, b in zip(kept, streamed, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_own_image_is_not_a_negative() -> None:
    """Two images have K = 3 candidates, listed here."""
    z, mu, own = unit_vectors(3, 2, 8)
    nll = info_nce.info_nce(z, mu, 5.0, own=own)
    for i in range(2):
        logits = 5 * torch.stack([z[i] @ mu[0], z[i] @ mu[1], z[i] @ own[1 - i]])
        torch.testing.assert_close(nll[i], logits.logsumexp(0) - logits[i], rtol=1e-13, atol=1e-13)


def test_single_image_has_zero_loss() -> None:
    z, mu, own = unit_vectors(3, 1, 8)
    assert info_nce.info_nce(z, mu, 5.0).item() == 0
    assert info_nce.info_nce(z, mu, 5.0, own=own).item() == 0


BIG = """
import re, torch
from compressive.objectives import simclr_loss

def mebibytes(name):
    return int(re.search(rf"{name}:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1024

torch.manual_seed(0)
r = [torch.randn(8192, 16, requires_grad=True) for _ in range(2)]
simclr_loss(*(x[:64] for x in r)).loss.backward()
open("/proc/self/clear_refs", "w").write("5")  # forget the peak so far
before = mebibytes("VmRSS")
simclr_loss(*r).loss.backward()
print((mebibytes("VmHWM") - before) / 1024)
"""


@pytest.mark.stress
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak memory from /proc")
def test_batch_of_8192_fits_in_half_a_gigabyte() -> None:
    """Measure peak resident memory beyond the inputs, in GiB. The logits alone would take 1 GiB."""
    run = subprocess.run([sys.executable, "-c", BIG], capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stderr
    assert 0.05 < float(run.stdout) < 0.5


def test_streaming_starts_above_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    z, mu = unit_vectors(2, 6, 8)
    calls = []
    original = info_nce._StreamedNll.apply
    monkeypatch.setattr(info_nce._StreamedNll, "apply", lambda *a: calls.append(1) or original(*a))
    for limit, streams in ((36, 0), (35, 1)):
        calls.clear()
        monkeypatch.setattr(info_nce, "_KEEP", limit)
        info_nce.info_nce(z, mu, 5.0)
        assert len(calls) == streams


# Run in a subprocess: the shape checks of the test suite cannot be compiled.
AUTOCAST = """
import torch
from compressive import info_nce
from compressive.objectives import simclr_loss

r_x, r_y = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(0))
loss = lambda x, y: simclr_loss(x, y).loss
exact_x, exact_y = (r.double().requires_grad_() for r in (r_x, r_y))
loss(exact_x, exact_y).backward()
for info_nce._KEEP in (2**26, 0):
    for made in (loss, torch.compile(loss, backend="aot_eager", dynamic=False)):
        torch._dynamo.reset()
        x, y = (r.clone().requires_grad_() for r in (r_x, r_y))
        with torch.autocast("cpu", torch.bfloat16):
            made(x, y).backward()
        pairs = (x.grad, exact_x.grad), (y.grad, exact_y.grad)
        print(max(float((found - exact).norm() / exact.norm()) for found, exact in pairs))
"""


@pytest.mark.slow
def test_gradients_under_autocast_match_float32() -> None:
    """Backward runs under autocast too, as in training; in memory, then streamed.

    A product in bfloat16 has an error of 4e-3, one in float32 of 2e-6.
    """
    errors = [float(line) for line in printed(AUTOCAST).split()]
    assert len(errors) == 4
    assert max(errors) < 2e-5

"""Gradients of convolutions on ARM CPUs equal torch's; other modules stay as they are."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from compressive.methods import build
from compressive.recipes import get
from compressive.train import arm_convolutions
from compressive.train.arm_convolutions import has_slow_gradients, speed_up_convolutions
from compressive.train.step import build_learner

CPU = torch.device("cpu")
SHAPES = {  # in channels, out channels, kernel, stride, padding, side
    "3x3": (5, 4, 3, 1, 1, 6),
    "stride 2": (5, 4, 3, 2, 1, 7),
    "stride 2, even side": (3, 4, 3, 2, 1, 8),
    "stride 3, last pixels unused": (2, 3, 3, 3, 0, 10),
    "1x1": (6, 3, 1, 1, 0, 5),
    "1x1, stride 2": (6, 3, 1, 2, 0, 5),
    "7x7": (3, 4, 7, 2, 3, 16),
    "more padding than kernel": (2, 3, 1, 1, 2, 4),
    "different sides": (3, 2, (3, 1), (1, 2), (1, 0), 7),
    "one pixel": (4, 5, 3, 1, 1, 1),
}


@pytest.fixture
def _slow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arm_convolutions, "has_slow_gradients", lambda _: True)


def replaced(conv: nn.Conv2d) -> nn.Conv2d:
    """Return the convolution after it was replaced, with the same weights."""
    speed_up_convolutions(conv, CPU)
    assert type(conv) is not nn.Conv2d
    return conv


def gradients(conv: nn.Module, x: Tensor) -> list[Tensor]:
    """Return the output and all gradients of a function that is not symmetric in its outputs."""
    x = x.detach().clone().requires_grad_()
    out = conv(x)
    weights = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view(out.shape)
    return [out, *torch.autograd.grad((out * weights).sum(), [x, *conv.parameters()])]


@pytest.mark.usefixtures("_slow")
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("at_once", [1, 300, 2**18], ids=lambda count: f"{count} values")
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_gradients_equal_torch(
    shape: Any, at_once: int, memory: torch.memory_format, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arm_convolutions, "_BLOCK_VALUES", at_once)
    feat, out, kernel, stride, padding, side = shape
    torch.manual_seed(0)
    conv = nn.Conv2d(feat, out, kernel, stride, padding, bias=side == 7).double()
    x = torch.randn(5, feat, side, side, dtype=torch.float64).to(memory_format=memory)
    expected = gradients(conv, x)
    for found, exact in zip(gradients(replaced(conv), x), expected, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.usefixtures("_slow")
def test_frozen_weights_and_images_get_no_gradient() -> None:
    conv = replaced(nn.Conv2d(2, 3, 3).requires_grad_(False))
    x = torch.randn(2, 2, 5, 5, requires_grad=True)
    assert torch.autograd.grad(conv(x).sum(), x)[0].shape == x.shape
    trained = replaced(nn.Conv2d(2, 3, 3))
    trained(x.detach()).sum().backward()
    assert trained.weight.grad is not None
    assert not conv(x.detach()).requires_grad


@pytest.mark.usefixtures("_slow")
def test_second_derivatives_raise_an_error() -> None:
    conv = replaced(nn.Conv2d(2, 3, 3))
    x = torch.randn(2, 2, 5, 5, requires_grad=True)
    (first,) = torch.autograd.grad(conv(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=r"convolutions .* once"):
        first.sum().backward()


@pytest.mark.usefixtures("_slow")
def test_autocast_is_left_to_torch() -> None:
    conv = nn.Conv2d(2, 3, 3)
    x = torch.randn(2, 2, 5, 5)
    with torch.autocast("cpu", torch.bfloat16):
        expected = gradients(conv, x)
        found = gradients(replaced(conv), x)
    assert found[0].dtype == torch.bfloat16
    assert all(map(torch.equal, found, expected))


@pytest.mark.usefixtures("_slow")
def test_other_convolutions_stay() -> None:
    others = [
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Conv2d(4, 4, 3, dilation=2),
        nn.Conv2d(4, 4, 3, padding="same"),
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect"),
    ]
    speed_up_convolutions(nn.ModuleList(others), CPU)
    assert [type(each) for each in others] == [nn.Conv2d] * 4


@pytest.mark.parametrize(
    ("machine", "capability", "expected"),
    [("aarch64", "DEFAULT", True), ("aarch64", "SVE256", False), ("x86_64", "AVX2", False)],
)
def test_only_arm_without_sve_is_slow(
    machine: str, capability: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: True)
    assert has_slow_gradients(CPU) is expected
    assert not has_slow_gradients(torch.device("cuda"))
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: False)
    assert not has_slow_gradients(CPU)


@pytest.mark.usefixtures("_slow")
@pytest.mark.parametrize("compiled", [False, True])
def test_learner_uses_them_unless_it_is_compiled(compiled: bool) -> None:
    config = get("simclr/quickstart").config
    learner = build_learner(config, build, 12, CPU, compiled=compiled)
    kinds = {type(each) for each in learner.modules() if isinstance(each, nn.Conv2d)}
    assert (kinds == {nn.Conv2d}) is compiled

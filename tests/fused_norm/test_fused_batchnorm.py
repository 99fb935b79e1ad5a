"""Batch norm with Triton kernels equals torch's, in the interpreter and on a GPU."""

import copy
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from timm.models.resnet import BasicBlock, Bottleneck, ResNet
from torch import Tensor, nn

from compressive.fused_norm import fuse
from compressive.networks import SamePool, backbone

needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


def tiny(block: type[nn.Module] = Bottleneck) -> Any:
    channels = (8, 16, 16, 16)
    network: Any = ResNet(block, (1, 2, 1, 1), channels=channels, num_classes=0)  # type: ignore[arg-type]
    network.layer3 = network.layer4 = nn.Identity()
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.3, 0.3)
    return network


def kinds(network: nn.Module) -> dict[str, str]:
    return {name: type(module).__name__ for name, module in network.named_modules()}


@needs_triton
def test_each_norm_is_converted_and_weights_keep_their_names() -> None:
    with torch.device("meta"):  # no weight is read
        network = backbone("resnet50")
    before = dict(network.state_dict())
    held = dict(network.named_parameters())
    assert fuse.fuse(network) == 53
    assert network.state_dict().keys() == before.keys()
    assert all(p is held[name] for name, p in network.named_parameters())
    found = kinds(network)
    assert not any(kind == "BatchNorm2d" for kind in found.values())
    relus = [name for name, kind in found.items() if kind == "ReLU"]
    assert len(relus) == 16
    assert all(name.endswith("act3") for name in relus)
    assert found["maxpool"] == "Identity"
    assert found["conv1"] == "BlockConv2d"
    assert fuse.fuse(network) == 0


@needs_triton
def test_a_small_stem_keeps_its_convolution() -> None:
    network = backbone("resnet18", stem="cifar")
    assert fuse.fuse(network) == 20
    found = kinds(network)
    assert found["conv1"] == "Conv2d"
    assert found["act1"] == "Identity"
    relus = [name for name, kind in found.items() if kind == "ReLU"]
    assert len(relus) == 8
    assert all(name.endswith("act2") for name in relus)


@needs_triton
def test_parts_can_be_left_out() -> None:
    network = backbone("resnet18")
    assert fuse.fuse(network, pool=False, blocks=False) == 20
    found = kinds(network)
    assert found["maxpool"] == "MaxPool2d"
    assert found["conv1"] == "Conv2d"


@needs_triton
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda n: pickle.loads(pickle.dumps(n))])
def test_copies_compute_the_same(copied: Callable[[nn.Module], nn.Module]) -> None:
    torch.manual_seed(0)
    network = tiny()
    fuse.fuse(network)
    other = copied(network)
    x = torch.randn(4, 3, 32, 32)
    assert torch.equal(network(x), other(x))
    assert kinds(network) == kinds(other)


@needs_triton
def test_blocks_of_networks_that_only_look_alike_stay() -> None:
    class Other(Bottleneck):
        """Might have another order of layers."""

    network = tiny()
    network.layer1[0].__class__ = Other
    fuse.fuse(network)
    found = kinds(network)
    assert found["layer1.0.bn1"] == "BatchNorm2d"
    assert found["layer1.0.act1"] == "ReLU"


@pytest.mark.parametrize("sides", [(32, 32), (33, 20), (7, 9)])
@pytest.mark.parametrize("channels", [1, 3, 4])
def test_convolution_over_blocks_is_the_same(
    sides: tuple[int, int], channels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(channels, 5, 7, 2, 3, dtype=torch.float64)
    x = torch.randn(2, channels, *sides, dtype=torch.float64, requires_grad=True)
    expected = conv(x)
    grad = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (x, *conv.parameters()), grad)
    monkeypatch.setattr(fuse, "_is_on_gpu", lambda x: True)
    conv.__class__ = fuse.BlockConv2d
    with mock.patch.object(F, "pixel_unshuffle", wraps=F.pixel_unshuffle) as called:
        found = conv(x)
    assert called.call_count == 2
    torch.testing.assert_close(found, expected)
    for one, other in zip(
        torch.autograd.grad(found, (x, *conv.parameters()), grad), wanted, strict=True
    ):
        torch.testing.assert_close(one, other)
    conv.eval()
    assert torch.equal(conv(x), expected)


@needs_triton
@pytest.mark.parametrize("block", [Bottleneck, BasicBlock])
def test_other_devices_compute_what_they_did(block: type[nn.Module]) -> None:
    torch.manual_seed(0)
    network = tiny(block)
    changed = copy.deepcopy(network)
    assert fuse.fuse(changed)
    x = torch.randn(4, 3, 32, 32).to(memory_format=torch.channels_last)
    for is_training in (True, False):
        network.train(is_training)
        changed.train(is_training)
        assert torch.equal(network(x), changed(x))
    for name, value in network.state_dict().items():
        assert torch.equal(value, changed.state_dict()[name]), name


@needs_triton
def test_norms_with_other_layers_behind_them_stay() -> None:
    network = tiny()
    network.layer1[0].act1 = nn.GELU()
    network.layer1[0].drop_block = nn.Dropout()
    network.maxpool = nn.AvgPool2d(2)
    network.layer2[0].bn1 = nn.BatchNorm2d(16, affine=False)
    network.layer2[0].bn2 = nn.SyncBatchNorm(16)
    fuse.fuse(network)
    found = kinds(network)
    assert found["layer1.0.act1"] == "GELU"
    assert found["layer1.0.act2"] == "ReLU"
    assert found["maxpool"] == "AvgPool2d"
    assert found["layer2.0.bn1"] == "BatchNorm2d"
    assert found["layer2.0.bn2"] == "SyncBatchNorm"
    x = torch.randn(2, 3, 32, 32)
    network.layer2[0].bn2.eval()
    assert network(x).shape == (2, 64)


# --- equality with torch --------------------------------------------------------------------------


def relative(found: Tensor, expected: Tensor) -> float:
    return float(((found.double() - expected).norm() / expected.norm()).detach())


def check_norm(
    shape: tuple[int, ...], dtype: torch.dtype, relu: bool, device: str, mean: float, std: float
) -> None:
    """Compare with torch's batch norm in float64, which gets the same numbers."""
    from compressive.fused_norm import functional

    torch.manual_seed(0)
    last = torch.channels_last
    x = torch.randn(shape, dtype=torch.float64, device=device) * std + mean
    x = x.to(dtype).to(memory_format=last).requires_grad_()
    weight = (torch.rand(shape[1], device=device) + 0.5).requires_grad_()
    bias = (0.3 * torch.randn(shape[1], device=device)).requires_grad_()
    y, means, variances = functional.fused_batch_norm(x, weight, bias, 1e-5, has_relu=relu)
    wide = [each.detach().double().requires_grad_() for each in (x, weight, bias)]
    expected = F.batch_norm(wide[0], None, None, wide[1], wide[2], True, 0.0, 1e-5)
    # The mean is rounded to float32, which shifts values that are far from 0.
    far = 1 + abs(mean) / std
    # Rounding can move a value across 0, and ReLU then drops its gradient: one or two of 10 million
    # values, also with torch's own batch norm in float32. These have no gradient here.
    is_sure = expected.detach().abs() > 1e-6 * far
    grad = (torch.randn(shape, device=device) * is_sure).to(dtype).to(memory_format=last)
    y.backward(grad)
    expected = expected.relu() if relu else expected
    expected.backward(grad.double())
    assert is_sure.sum() > 0.99 * is_sure.numel()
    axes = (0, 2, 3)
    exact = wide[0].detach()
    assert float((means - exact.mean(axes)).abs().max()) < 2e-7 * (abs(mean) + std)
    true = exact.var(axes, correction=0)
    assert float(((variances - true) / true).abs().max()) < 3e-6
    coarse = 4e-3 if dtype == torch.bfloat16 else 1e-6 * far
    assert y.dtype == dtype
    assert relative(y, expected) < coarse
    for one, other in zip((x, weight, bias), wide, strict=True):
        assert relative(one.grad, other.grad) < (coarse if one is x else 2e-6 * far)  # type: ignore[arg-type]


def check_pool(shape: tuple[int, ...], before: int, device: str) -> None:
    """Compare norm, ReLU and pool with torch's layers."""
    from compressive.fused_norm import functional

    torch.manual_seed(0)
    x = (2 * torch.randn(shape, device=device)).round() / 2  # many windows have equal values
    x = x.to(memory_format=torch.channels_last).requires_grad_()
    weight = (torch.rand(shape[1], device=device) + 0.5).requires_grad_()
    bias = (0.3 * torch.randn(shape[1], device=device) - 0.5).requires_grad_()
    y, _, _ = functional.fused_pooled_batch_norm(x, weight, bias, 1e-5, before=before)
    grad = torch.randn(y.shape, device=device)
    y.backward(grad)
    wide = [each.detach().double().requires_grad_() for each in (x, weight, bias)]
    expected = F.batch_norm(wide[0], None, None, wide[1], wide[2], True, 0.0, 1e-5).relu()
    expected = (nn.MaxPool2d(3, 2, 1) if before else SamePool())(expected)
    assert y.shape == expected.shape
    expected.backward(grad.double())
    assert relative(y, expected) < 1e-6
    for one, other in zip((x, weight, bias), wide, strict=True):
        assert relative(one.grad, other.grad) < 2e-6  # type: ignore[arg-type]


def check_network(device: str) -> None:
    """Compare gradients and statistics of a whole network in training."""
    torch.manual_seed(0)
    network = tiny().to(device).to(memory_format=torch.channels_last)
    changed = copy.deepcopy(network)
    assert fuse.fuse(changed) == 12
    x = torch.randn(3, 3, 24, 24, device=device).to(memory_format=torch.channels_last)
    target = torch.randn(3, 64, device=device)
    for one in (network, changed):
        (one(x) * target).sum().backward()
    for (name, p), q in zip(network.named_parameters(), changed.parameters(), strict=True):
        assert relative(q.grad, p.grad.double()) < 1e-3, name  # type: ignore[arg-type]
    for (name, value), other in zip(network.named_buffers(), changed.buffers(), strict=True):
        torch.testing.assert_close(other, value, rtol=1e-4, atol=1e-5, msg=name)


def check_all(device: str) -> None:
    """Run every comparison with shapes that do not fit into tiles."""
    plain, half = torch.float32, torch.bfloat16
    check_norm((4, 64, 8, 8), plain, True, device, 0, 1)
    check_norm((3, 5, 7, 3), plain, True, device, 0.3, 1)
    check_norm((4, 3, 1, 1), plain, False, device, 0, 1)
    check_norm((3, 130, 9, 5), half, True, device, 0, 1)
    check_norm((4, 64, 12, 8), plain, False, device, 1000, 0.1)
    for shape, before in (((2, 64, 8, 8), 1), ((3, 5, 7, 9), 1), ((2, 3, 6, 10), 0)):
        check_pool(shape, before, device)
    check_network(device)


def interpreted() -> None:
    """Run on the CPU, with few programs, so that each has several tiles."""
    from compressive.fused_norm import pooled, reductions

    reductions.MOMENTS_TILE = reductions.MOMENTS_TILE._replace(programs=3)
    reductions.GRADIENT_TILE = reductions.GRADIENT_TILE._replace(programs=3)
    pooled.POOL_TILE = pooled.POOL_TILE._replace(programs=3)
    fuse._is_on_gpu = lambda x: True
    check_all("cpu")
    sys.stdout.write("equal\n")


class NaiveSums:
    """What the kernels of `reductions` compute, in torch."""

    @staticmethod
    def batch_moments(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.float().mean((0, 2, 3)), x.float().var((0, 2, 3), correction=0)

    @staticmethod
    def batch_gradient_sums(grad: Tensor, x: Tensor, *rest: Any) -> Tensor:
        *rows, has_relu = rest
        mean, inverse, scale, bias = (row.view(1, -1, 1, 1) for row in rows)
        deviation = x.float() - mean
        keep = deviation * scale + bias > 0 if has_relu else torch.ones_like(x, dtype=torch.bool)
        slant = grad.float() * keep
        return torch.stack([slant.sum((0, 2, 3)), (slant * deviation * inverse).sum((0, 2, 3))])


def compiled() -> None:
    """Compare a compiled network with the plain one on a GPU."""
    torch.manual_seed(0)
    network = tiny().cuda().to(memory_format=torch.channels_last)
    changed = copy.deepcopy(network)
    fuse.fuse(changed)
    graph = torch.compile(changed, fullgraph=True, dynamic=False)
    x = torch.randn(8, 3, 64, 64, device="cuda").to(memory_format=torch.channels_last)
    target = torch.randn(8, 64, device="cuda")
    for one in (network, graph):
        (one(x) * target).sum().backward()
    for (name, p), q in zip(network.named_parameters(), changed.parameters(), strict=True):
        assert relative(q.grad, p.grad.double()) < 1e-2, name  # type: ignore[arg-type]
    for (name, value), other in zip(network.named_buffers(), changed.buffers(), strict=True):
        torch.testing.assert_close(other, value, rtol=1e-3, atol=1e-3, msg=name)
    sys.stdout.write("equal\n")


def trained() -> None:
    """Compare compiled training of BYOL, whose target has norms as well, with torch's norms."""
    from tiny import last, silent
    from tiny import tiny as tiny_run

    from compressive.train.loop import pretrain

    found = []
    for setting in ("yes", "no"):
        # The third step replays a CUDA graph. Large steps would multiply rounding errors.
        changes = ("method=byol", "train.device=cuda", "train.steps=3", "optim.lr=1e-5")
        changes += ("train.precision=float32",)
        config = tiny_run(*changes, "views.size=32", f"train.fused_norm={setting}")
        with tempfile.TemporaryDirectory() as folder:
            pretrain(config, Path(folder) / "run", display=silent())
            found.append(last(Path(folder) / "run"))
    one, other = (state["learner"] for state in found)
    assert one.keys() == other.keys()
    for name, value in other.items():
        torch.testing.assert_close(one[name], value, rtol=1e-2, atol=1e-2, msg=name)
    moments = [
        torch.cat(
            [row["momentum_buffer"].flatten() for row in state["optimizer"]["state"].values()]
        )
        for state in found
    ]
    assert relative(moments[0], moments[1].double()) < 1e-2  # 1e-5 with other sums on a CPU
    sys.stdout.write("equal\n")


def output_of(function: Callable[[], None], **environment: str) -> str:
    """Return the output in a process without shape checks, which cannot be traced."""
    here = Path(__file__)
    path = os.pathsep.join([str(here.parents[1]), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, str(here), function.__name__],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
    )
    assert not run.returncode, run.stderr[-3000:]
    return run.stdout


@pytest.mark.slow
@needs_triton
def test_kernels_equal_torch_in_the_interpreter() -> None:
    assert output_of(interpreted, TRITON_INTERPRET="1") == "equal\n"


@pytest.mark.slow
@needs_triton
def test_traced_function_has_equal_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile may differentiate an autograd function otherwise than autograd."""
    from compressive.fused_norm import functional

    monkeypatch.setattr(functional, "reductions", NaiveSums)
    torch.manual_seed(0)
    weight, bias = (row.requires_grad_() for row in torch.rand(2, 5).unbind())
    target = torch.randn(4, 5, 6, 6)

    def loss(x: Tensor) -> Tensor:
        y, _, _ = functional.fused_batch_norm(x, weight, bias, 1e-5, has_relu=True)
        return (y * target).sum()

    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(4, 5, 6, 6, dtype=dtype, requires_grad=True)
        graph = torch.compile(loss, fullgraph=True, dynamic=False, backend="eager")
        found, expected = (torch.autograd.grad(one(x), x)[0] for one in (graph, loss))
        assert expected.norm() > 0.1
        torch.testing.assert_close(found, expected)
        if dtype == torch.float32:
            norm = F.batch_norm(x, None, None, weight, bias, True, 0.0, 1e-5).relu()
            (torchs,) = torch.autograd.grad((norm * target).sum(), x)
            # float32 sums over 144 values in another order
            torch.testing.assert_close(found, torchs, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_kernels_equal_torch_on_a_gpu() -> None:
    tf32 = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        check_all("cuda")
        check_norm((16, 2048, 7, 7), torch.bfloat16, True, "cuda", 0, 1)
        check_norm((64, 64, 112, 112), torch.float32, True, "cuda", 5, 1)
        check_pool((16, 64, 112, 112), 1, "cuda")
    finally:
        torch.backends.cudnn.allow_tf32 = tf32


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("function", [compiled, trained])
def test_compiled_steps_have_equal_gradients(function: Callable[[], None]) -> None:
    assert output_of(function, NVIDIA_TF32_OVERRIDE="0") == "equal\n"


if __name__ == "__main__":
    functions = (interpreted, compiled, trained)
    {each.__name__: each for each in functions}[sys.argv[1]]()

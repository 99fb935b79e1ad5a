"""train.fused_norm is used only where its kernels fit, and never changes values on the CPU."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import differences, last, silent, tiny

from compressive import encoder
from compressive.config import Train
from compressive.fused_norm.fuse import FusedBatchNorm2d, fuse
from compressive.methods import build
from compressive.train import norm_kernels
from compressive.train.loop import pretrain
from compressive.train.norm_kernels import fuse_norms

pytestmark = pytest.mark.usefixtures("one_thread")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


def fused(network: torch.nn.Module) -> int:
    return sum(isinstance(module, FusedBatchNorm2d) for module in network.modules())


@needs_triton
@pytest.mark.parametrize("setting", ["auto", "yes"])
def test_networks_of_target_and_online_encoder_are_changed(setting: str) -> None:
    config = tiny("method=byol", f"train.fused_norm={setting}")
    method: Any = build(config)
    before = method.state_dict().keys()
    assert fuse_norms(method, config, CUDA, compiled=True) == 26
    assert fused(method.encoder) == fused(method.target) == 13
    assert method.state_dict().keys() == before


@needs_triton
@pytest.mark.parametrize(
    ("stem", "changes", "count"),
    [
        ("imagenet", (), 0),  # the default is no
        ("imagenet", ("train.fused_norm=auto",), 20),
        ("cifar", ("train.fused_norm=auto",), 0),
        ("cifar", ("train.fused_norm=yes",), 20),
    ],
)
def test_auto_uses_kernels_with_the_stem_for_imagenet(
    stem: str, changes: tuple[str, ...], count: int
) -> None:
    config = tiny("network.name=resnet18", f"network.stem={stem}", *changes)
    method = build(config)
    assert fuse_norms(method, config, CUDA, compiled=True) == count
    assert fused(method) == count


OBSTACLES = {
    "cpu": "the device is cpu",
    "mps": "the device is mps",
    "rocm": "ROCm",
    "processes": "2 processes",
    "eager": r"train\.compile",
    "recomputed": r"train\.activation_checkpointing",
    "network": "test_vit",
    "torch": r"2\.6\.0\+cu124 is older than 2\.11",
    "triton": "Triton is not installed",
}


@pytest.mark.parametrize(
    ("obstacle", "setting"),
    # The config itself refuses "yes" with activation checkpointing.
    [
        (each, s)
        for each in OBSTACLES
        for s in ("auto", "yes")
        if (each, s) != ("recomputed", "yes")
    ],
)
def test_what_does_not_fit_keeps_its_norms_or_is_refused(
    obstacle: str, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = ["network.name=test_vit"] if obstacle == "network" else []
    config = tiny(*changes, f"train.fused_norm={setting}")
    if obstacle == "recomputed":
        config = tiny("train.fused_norm=auto", "train.activation_checkpointing=true")
    monkeypatch.setattr(norm_kernels, "is_rocm", lambda: obstacle == "rocm")
    monkeypatch.setattr(norm_kernels, "world_size", lambda: 1 + (obstacle == "processes"))
    monkeypatch.setattr(norm_kernels, "find_spec", lambda _: obstacle != "triton")
    if obstacle == "torch":
        monkeypatch.setattr(torch, "__version__", "2.6.0+cu124")
    if obstacle != "network":
        monkeypatch.setattr(norm_kernels, "fuse", lambda _: pytest.fail("changed"))
    device = torch.device(obstacle) if obstacle in ("cpu", "mps") else CUDA
    method, compiled = build(config), obstacle != "eager"
    if setting == "auto":
        assert fuse_norms(method, config, device, compiled=compiled) == 0
        assert not fused(method)
        return
    with pytest.raises(ValueError, match=rf"^train\.fused_norm is yes, .*{OBSTACLES[obstacle]}"):
        fuse_norms(method, config, device, compiled=compiled)


@pytest.mark.parametrize("other", ["compile=no", "activation_checkpointing=true"])
def test_settings_that_exclude_each_other_are_one_line(other: str) -> None:
    name, _, value = other.partition("=")
    changes: dict[str, Any] = {name: True if value == "true" else value}
    with pytest.raises(ValueError, match=rf"^train\.fused_norm .*train\.{other}") as raised:
        Train(fused_norm="yes", **changes)
    assert "\n" not in str(raised.value)
    assert Train(fused_norm="auto", **changes)


def test_yes_is_refused_before_a_folder_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^train\.fused_norm is yes, .*cpu"):
        pretrain(tiny("train.fused_norm=yes"), tmp_path / "run", display=silent())
    assert not (tmp_path / "run").exists()


@needs_triton
def test_checkpoints_are_interchangeable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Changed layers compute the same on the CPU; both kinds read the other's files."""
    found: list[Any] = []
    counts: list[int] = []
    monkeypatch.setattr(norm_kernels, "fuse", lambda network: counts.append(fuse(network)))
    for name in ("plain", "changed"):
        if name == "changed":
            monkeypatch.setattr(norm_kernels, "_obstacle", lambda *_, **__: "")
        config = tiny("method=byol", "train.fused_norm=auto")
        pretrain(config, tmp_path / name, display=silent())
        found.append(last(tmp_path / name))
    assert counts == [26]
    assert not differences(*found)
    one, other = (encoder.load(tmp_path / name) for name in ("plain", "changed"))
    x = torch.rand(2, 3, 16, 16)
    assert torch.equal(one(x), other(x))

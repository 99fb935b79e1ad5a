"""torch's compiler and wandb are imported when they are used."""

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import nn

from compressive.networks import backbone
from compressive.platforms.compiler_import import compiler_deferred
from compressive.platforms.shapes_only import allocate, shapes_only

# Evaluation opens encoders with and without `shapes_only`; none needs the compiler.
PROGRAM = """
import sys
import torch
import compressive.train.loop
from compressive.evaluation.suite import evaluate
from compressive.networks import build
from compressive.config import Network
from compressive.platforms.shapes_only import allocate, shapes_only

def heavy():
    is_old = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 11)  # imports sympy itself
    return {"torch._dynamo", *([] if is_old else ["sympy"])} & set(sys.modules)

for name in ("resnet18", "vit_tiny_patch16_224"):
    with shapes_only():
        network = build(Network(name=name), 32)
    allocate(network)
assert {"timm", "torchvision"} <= set(sys.modules)
assert not heavy(), heavy()
assert "wandb" not in sys.modules, "imported at the start"

import timm.utils

timm.utils.update_summary(0, {"loss": 1.0}, {"top1": 2.0}, "summary.csv", log_wandb=True)
assert sys.modules["wandb"].logged[0]["eval_top1"] == 2.0

import torch, torchvision
from timm.layers import disable_compiler
from torchvision.ops.roi_align import is_compile_supported

assert is_compile_supported("cpu") in (True, False)
assert "torch._dynamo" in sys.modules
from torch._dynamo.utils import is_compile_supported as own

assert own.__module__ == "torch._dynamo.utils"
assert torch.compiler.disable.__module__ == "torch.compiler"
outside = []

@disable_compiler
def python(x):
    outside.append(torch.compiler.is_compiling())
    return x + 1

compiled = torch.compile(lambda x: python(x * 2) * 3, backend="eager")
assert compiled(torch.ones(2)).tolist() == [9, 9]
assert outside == [False], "the compiler must not look into it"
"""


@pytest.mark.slow
def test_compiler_and_wandb_are_imported_only_when_they_are_used(tmp_path: Path) -> None:
    """torchvision and timm import the compiler at their own import: 1.8 s on an ARM core.

    timm imports wandb at its own import if it is installed: 2.8 s on an ARM core.
    """
    (tmp_path / "wandb.py").write_text("logged = []\nlog = logged.append\n")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def test_other_names_of_the_compiler_are_imported_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Future versions of the libraries may need more than the one function."""
    real = ModuleType("torch._dynamo.utils")
    real.other = object()  # type: ignore[attr-defined]
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils", raising=False)
    disable = torch.compiler.disable
    with compiler_deferred():
        assert torch.compiler.disable is not disable
        stand_in = sys.modules["torch._dynamo.utils"]
        monkeypatch.setattr(
            "compressive.platforms.compiler_import.import_module", {real.__name__: real}.get
        )
        assert stand_in.other is real.other
        assert real.__name__ not in sys.modules
        with pytest.raises(AttributeError):
            _ = stand_in.__path__
    assert torch.compiler.disable is disable


def test_network_of_shapes_is_that_of_torch() -> None:
    def shapes(network: nn.Module) -> list[tuple[str, torch.Size, tuple[int, ...], torch.dtype]]:
        return [(n, v.shape, v.stride(), v.dtype) for n, v in network.state_dict().items()]

    with shapes_only():
        planned = backbone("resnet18", stem="cifar")
        planned.to(memory_format=torch.channels_last)
    assert all(value.is_meta for value in planned.state_dict().values())
    real = backbone("resnet18", stem="cifar").to(memory_format=torch.channels_last)
    assert shapes(planned) == shapes(real)
    assert shapes(allocate(planned)) == shapes(real)
    assert all(value.device.type == "cpu" for value in planned.state_dict().values())


def test_only_copies_of_dense_tensors_are_shortened() -> None:
    with shapes_only():
        plain = torch.empty(2, 5)
        assert torch.empty_like(plain, dtype=torch.int8).dtype == torch.int8
        assert torch.empty_like(plain, memory_format=torch.contiguous_format).shape == (2, 5)
    network = nn.Module()
    network.register_buffer("expanded", torch.empty(5, device="meta").expand(2, 5))
    assert allocate(network).get_buffer("expanded").stride() == (5, 1)  # as without `allocate`


def test_function_of_the_compiler_can_be_called_while_it_is_deferred(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils", raising=False)
    real = ModuleType("torch._dynamo.utils")
    real.is_compile_supported = lambda device_type: device_type == "cpu"  # type: ignore[attr-defined]
    disable = torch.compiler.disable
    with compiler_deferred(), compiler_deferred():  # the inner one changes nothing
        stand_in = sys.modules["torch._dynamo.utils"]
        monkeypatch.setattr(
            "compressive.platforms.compiler_import.import_module", {real.__name__: real}.get
        )
        assert stand_in.is_compile_supported("cpu")
        assert not stand_in.is_compile_supported("tpu")
        assert torch.compiler.disable is not disable
    assert torch.compiler.disable is disable


def test_classes_are_disabled_by_torch_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    eager, lazy = [], []
    own = lambda fn, *_, **options: eager.append((fn, options)) or fn  # noqa: E731
    monkeypatch.setattr(torch.compiler, "disable", own)  # another library may replace it, too
    # Its result would import the compiler a second time.
    monkeypatch.setattr(torch, "_disable_dynamo", lambda fn, recursive: lazy.append(recursive))
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils", raising=False)

    def function() -> None:
        pass

    with compiler_deferred():

        @torch.compiler.disable
        class Layer(nn.Module):
            pass

        torch.compiler.disable(recursive=False)(lambda: 3)
        torch.compiler.disable(print, reason="shown where a graph breaks")
        torch.compiler.disable(function, reason="shown where a graph breaks")
    assert torch.compiler.disable is own
    with_reason = {"reason": "shown where a graph breaks"}
    assert eager == [(Layer, {}), (print, with_reason), (function, with_reason)]
    assert isinstance(Layer, type)
    assert lazy == [False]


def test_replacement_made_while_it_is_deferred_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils", raising=False)
    monkeypatch.setattr(torch.compiler, "disable", torch.compiler.disable)  # restored at the end
    with compiler_deferred():
        torch.compiler.disable = print  # type: ignore[assignment]
    assert torch.compiler.disable is print  # type: ignore[comparison-overlap]


def test_weights_outside_are_drawn_as_usual() -> None:
    torch.manual_seed(0)
    expected = torch.empty(5).normal_()
    torch.manual_seed(0)
    with shapes_only():
        torch.empty(9).uniform_()
        found = torch.empty(5, device="cpu").normal_()
    assert torch.equal(found, expected)

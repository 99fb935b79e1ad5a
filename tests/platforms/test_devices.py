"""Which device a name selects, on machines with other accelerators than this one."""

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compressive.config import check_device_name
from compressive.data.loaders import free_memory
from compressive.device import is_compiled, pick_device, precision
from compressive.platforms import accelerators
from compressive.platforms.accelerators import device_memory, device_name
from compressive.platforms.float64 import float64_device
from compressive.platforms.memory import free_host_memory


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that gives torch this many devices of each kind."""

    def equip(cuda: int = 0, xpu: int = 0, mps: int = 0, hip: str | None = None) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: cuda)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        fake = SimpleNamespace(
            is_available=lambda: xpu > 0, device_count=lambda: xpu, current_device=lambda: 0
        )
        monkeypatch.setattr(torch, "xpu", fake)
        monkeypatch.setattr(torch.backends.mps, "is_available", cache(lambda: mps > 0))
        monkeypatch.setattr(torch.version, "hip", hip)

    equip()
    return equip


def test_auto_prefers_cuda_then_xpu_then_mps_then_cpu(machine: Any) -> None:
    assert pick_device("auto").type == "cpu"
    machine(mps=1)
    assert pick_device("auto") == torch.device("mps:0")
    machine(xpu=1, mps=1)
    assert pick_device("auto") == torch.device("xpu:0")
    machine(cuda=1, xpu=1, mps=1)
    assert pick_device("auto") == torch.device("cuda:0")
    machine(cuda=1, hip="6.4")
    assert pick_device("auto") == torch.device("cuda:0")


@pytest.mark.parametrize(
    ("name", "there", "found"),
    [
        ("cuda", {"cuda": 1}, "cuda"),
        ("cuda:1", {"cuda": 2}, "cuda:1"),
        ("rocm", {"cuda": 1, "hip": "6.4"}, "cuda"),
        ("hip:1", {"cuda": 2, "hip": "6.4"}, "cuda:1"),
        ("rocm:0", {"cuda": 1, "hip": "6.4"}, "cuda:0"),
        ("xpu", {"xpu": 1}, "xpu"),
        ("xpu:0", {"xpu": 1}, "xpu:0"),
        ("mps", {"mps": 1}, "mps:0"),
        ("cpu", {"cuda": 1}, "cpu"),
    ],
)
def test_names_select_devices(name: str, there: Any, found: str, machine: Any) -> None:
    machine(**there)
    assert pick_device(name) == torch.device(found)


@pytest.mark.parametrize(
    ("name", "there", "why"),
    [
        ("cuda", {}, "cuda, but torch sees no GPU"),
        ("xpu", {"cuda": 1}, "xpu, but torch sees no Intel GPU"),
        ("mps", {"cuda": 1}, "mps, but torch sees no Apple GPU"),
        ("rocm", {"cuda": 1}, "rocm, but this torch is not built for ROCm"),
        ("rocm", {"hip": "6.4"}, "rocm, but torch sees no GPU"),
        ("xpu:1", {"xpu": 1}, "xpu:1, but torch sees 1 GPUs"),
        ("hip:2", {"cuda": 2, "hip": "6.4"}, "hip:2, but torch sees 2 GPUs"),
    ],
)
def test_missing_devices_are_named_in_one_line(
    name: str, there: Any, why: str, machine: Any
) -> None:
    machine(**there)
    with pytest.raises(ValueError, match=f"--device is {why}") as caught:
        pick_device(name, "--device")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["gpu", "cuda:", "mps:1", "cuda:a", "tpu", "", "CUDA", "cpu:0"])
def test_other_names_are_rejected_before_torch_is_needed(name: str) -> None:
    with pytest.raises(ValueError, match=r"--device must be auto, cpu, .*mps"):
        check_device_name(name, "--device")


def test_several_processes_use_cuda_or_cpu(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("compressive.device.world_size", lambda: 2)
    machine(xpu=2, mps=1)
    assert pick_device("auto").type == "cpu"
    with pytest.raises(ValueError, match=r"--device is mps.*several processes"):
        pick_device("mps", "--device")


def test_untested_accelerators_train_in_float32_without_compilation() -> None:
    for kind in ("xpu", "mps"):
        assert precision("auto", torch.device(kind)) == torch.float32
        assert precision("bf16", torch.device(kind)) == torch.bfloat16
        assert not is_compiled("auto", torch.device(kind))
        assert is_compiled("yes", torch.device(kind))


def test_float64_runs_where_it_exists(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(xpu=2)
    properties = [SimpleNamespace(has_fp64=True), SimpleNamespace(has_fp64=False)]
    read = lambda device: properties[device.index]  # noqa: E731
    monkeypatch.setattr(torch.xpu, "get_device_properties", read, raising=False)
    cpu = torch.device("cpu")
    assert float64_device(torch.device("xpu:0")) == torch.device("xpu:0")
    assert float64_device(torch.device("xpu:1")) == float64_device(torch.device("mps")) == cpu
    assert float64_device(torch.device("cuda:1")) == torch.device("cuda:1")
    assert float64_device(cpu) == cpu


def test_memory_and_names_of_accelerators(machine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(xpu=1, mps=1)
    xpu, mps, cpu = map(torch.device, ("xpu:0", "mps:0", "cpu"))
    info = SimpleNamespace(total_memory=1000, name="Arc")
    more = {"get_device_properties": lambda _: info, "memory_reserved": lambda _: 300}
    more["get_device_name"] = lambda _: "Intel Arc"
    for name, value in more.items():
        monkeypatch.setattr(torch.xpu, name, value, raising=False)
    assert device_memory(xpu) == (700, 1000)  # a version without mem_get_info
    monkeypatch.setattr(torch.xpu, "mem_get_info", lambda _: (600, 1000), raising=False)
    assert device_memory(xpu) == (600, 1000)
    assert free_memory(xpu) == 600
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 2**60)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 2**50)
    assert device_memory(mps) == (2**60 - 2**50, 2**60)
    assert free_memory(mps) <= free_host_memory() * 1.1  # the memory is that of the machine
    assert [device_name(each) for each in (xpu, mps, cpu)] == ["Intel Arc", "Apple GPU", ""]
    assert device_memory(cpu) is None
    assert accelerators.device_count("xpu") == accelerators.device_count("mps") == 1

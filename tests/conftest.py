"""Golden files and unit vectors for all tests. A missing golden file fails: nothing skips."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings
from torch import Tensor

# The same examples every time: a new one is looked for on purpose, not when something must land.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

GOLDEN = Path(__file__).parent / "golden"


def golden_json(name: str) -> Any:
    return json.loads((GOLDEN / f"{name}.json").read_text())


def golden_arrays(name: str) -> dict[str, Tensor]:
    with np.load(GOLDEN / f"{name}.npz") as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays.files}


def unit_vectors(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(*shape, dtype=torch.float64, generator=generator)
    return torch.nn.functional.normalize(noise, dim=-1).to(dtype)


if "PYTEST_XDIST_WORKER" in os.environ:  # one of several processes that share the cores
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # those that it starts


# A shell that starts the tests in the background, or nohup, leaves these ignored for all below it.
for _number, _usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The quick start first: it takes minutes, which nobody should wait for at the end."""
    items.sort(key=lambda item: "quickstart" not in item.name)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Bits agree only where as many threads share a sum, and small sums are quicker on one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

"""Fixtures and golden files for all tests. A missing golden file fails a test, never skips it."""

import gc
import json
import logging
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import settings
from marker_summary import pytest_deselected as pytest_deselected
from marker_summary import pytest_sessionfinish as pytest_sessionfinish
from marker_summary import pytest_terminal_summary as pytest_terminal_summary
from marker_summary import pytest_testnodedown as pytest_testnodedown

# Functions import torch: xdist's controller needs none of them and must not wait for it (3 s).
if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Use the same examples in every run: a new failure must come from the change under test.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")

# Tests must not depend on code that was compiled before, nor write to the user's cache.
os.environ.setdefault("COMPRESSIVE_COMPILE_CACHE", "off")

GOLDEN = Path(__file__).parent / "golden"


def golden_json(name: str) -> Any:
    return json.loads((GOLDEN / f"{name}.json").read_text())


def golden_arrays(name: str) -> "dict[str, Tensor]":
    import numpy as np
    import torch

    with np.load(GOLDEN / f"{name}.npz") as arrays:
        return {key: torch.from_numpy(arrays[key]) for key in arrays.files}


def unit_vectors(*shape: int, seed: int = 0, dtype: "torch.dtype | None" = None) -> "Tensor":
    import torch

    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(*shape, dtype=torch.float64, generator=generator)
    return torch.nn.functional.normalize(noise, dim=-1).to(dtype or torch.float64)


if "PYTEST_XDIST_WORKER" in os.environ:  # several processes share the cores
    import torch
    import torch._dynamo  # optimizers import it later, after `pytest_collection` has frozen objects

    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # for processes that tests start


# Restore the default handlers: nohup, or a shell that starts the tests in the background, makes
# child processes ignore these signals.
for _number, _usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _usual)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Exclude what the imports of all tests create from garbage collection, now and later.

    These millions of objects live to the end; each full collection would visit them (0.5 s).
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        # pytest attaches its handlers, three times a test, to the root logger and to each logger
        # that does not propagate to it. torch has 46 of those (0.5 ms a test).
        for logger in logging.root.manager.loggerDict.values():
            if isinstance(logger, logging.Logger):
                logger.propagate = True


def pytest_unconfigure() -> None:
    """Let Python free everything at its exit; otherwise triton prints what is left."""
    gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the quick start first: it takes minutes and would otherwise finish last."""
    items.sort(key=lambda item: "quickstart" not in item.name)


@pytest.fixture(autouse=True)
def _seed() -> None:
    import torch

    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # torch.manual_seed would also record the stack for three absent devices (1 ms)
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def _keep_mkldnn() -> Iterator[None]:
    """Enable oneDNN again, which torch disables on a processor without bfloat16 products.

    Otherwise later runs in the process would differ in the last bits from those in other processes.
    """
    import torch

    yield
    torch._C._set_mkldnn_enabled(True)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Use one thread: sums are bitwise equal only for equal thread counts."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

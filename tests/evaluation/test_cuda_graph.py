"""Functions that are replayed as CUDA graphs compute what they compute when called directly."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from compressive.evaluation.cuda_graph import GraphedFunction

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def recorded(function: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
    """Replace a CUDA graph: a capture runs nothing, and a replay overwrites the static result."""
    result = torch.empty(4)

    def replay() -> None:
        result.copy_(function())

    return replay, result


def test_replay_gives_the_results_of_calls() -> None:
    seen: list[int] = []

    def function(x: Tensor, y: Tensor) -> Tensor:
        seen.append(id(x))
        return x * 2 + y

    graphed = GraphedFunction(function, CUDA, capture=recorded)
    for i in range(8):
        x, y = torch.randn(2, 4, generator=torch.Generator().manual_seed(i))
        assert torch.equal(graphed(x, y), 2 * x + y)
        assert graphed(x[:3], y[:3]).shape == (3,)  # a last, smaller batch
        assert torch.equal(graphed(x.double(), y), 2 * x.double() + y)
    own = seen[::3]
    assert len(set(own[3:])) == 1  # static inputs after three calls
    assert own[0] != own[3]


def test_updates_in_place_happen_once_per_call() -> None:
    total = torch.zeros(4)

    def capture(function: Callable[[], Any]) -> tuple[Callable[[], object], Any]:
        return function, None

    graphed = GraphedFunction(lambda x: total.add_(x), CUDA, capture=capture)
    for i in range(10):
        graphed(torch.full((4,), float(i)))
    assert total.tolist() == [45.0] * 4


def test_function_that_cannot_be_captured_is_called() -> None:
    def capture(function: Callable[[], Any]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    graphed = GraphedFunction(lambda x: x + 1, CUDA, capture=capture)
    assert [graphed(torch.tensor([i])).item() for i in range(6)] == [1, 2, 3, 4, 5, 6]


def test_cpu_never_captures() -> None:
    def capture(function: Callable[[], Any]) -> Any:
        pytest.fail("captured on a CPU")

    graphed = GraphedFunction(lambda x: x + 1, CPU, capture=capture)
    assert [graphed(torch.tensor([i])).item() for i in range(6)] == [1, 2, 3, 4, 5, 6]

"""Samples and densities with a tensor kappa need few operations.

On a GPU in eager mode, launching an operation on a few thousand rows takes longer than running it.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import unit_vectors
from torch.utils._python_dispatch import TorchDispatchMode

from compressive import VonMisesFisher
from compressive.distributions import vmf_sampler

_WITHOUT_KERNEL = ("aten::detach", "aten::promote_types", "aten::_unsafe_view")


class Counter(TorchDispatchMode):
    """Count operations that compute or copy values."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not (func.is_view or func._schema.name in _WITHOUT_KERNEL)
        return func(*args, **(kwargs or {}))


def operations(function: Callable[[], object]) -> int:
    function()  # computes the tables
    with Counter() as counter:
        function()
    return counter.count


def test_counter_ignores_views() -> None:
    x = torch.ones(4, 2)
    assert operations(lambda: (x.T[0].expand(3, 4) + 1).sum()) == 2


# Three operations more than torch 2.15 needs: other versions may split some of them.
@pytest.mark.parametrize(
    ("n", "batched", "learned", "density"), [(3, 47, 52, 72), (5, 40, 47, 65), (256, 40, 47, 94)]
)
def test_number_of_operations(
    n: int, batched: int, learned: int, density: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This chooses the code for a GPU. On the CPU, sums over the table differ.
    monkeypatch.setattr(vmf_sampler, "in_func_transform", lambda: True)
    mu, kappa = unit_vectors(4, n, dtype=torch.float32), torch.full((4,), float(n))
    p = VonMisesFisher(mu, kappa, validate_args=False)
    with_gradient = VonMisesFisher(mu, kappa.clone().requires_grad_(), validate_args=False)
    assert operations(p.rsample) <= batched
    assert operations(with_gradient.rsample) <= learned
    assert operations(lambda: p.log_prob(p.rsample())) <= density

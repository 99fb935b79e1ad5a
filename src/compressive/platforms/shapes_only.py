"""Build networks that have shapes but no memory, without drawing their weights.

torch computes some functions of tensors on "meta" in Python, after it has imported sympy and its
compiler, which takes seconds. Here those are skipped that most networks use; BEiT uses others.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_UNIFORM_TO_NORMAL = (Tensor.erfinv_, Tensor.mul_, Tensor.add_, Tensor.clamp_)
_IN_PLACE = frozenset((Tensor.normal_, Tensor.uniform_, *_UNIFORM_TO_NORMAL))


class _Direct(TorchFunctionMode):
    """Change no values of tensors without memory, and allocate memory for them directly."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is nn.init.normal_ and kwargs and kwargs["tensor"].is_meta:
            return kwargs["tensor"]
        if func in _IN_PLACE and args[0].is_meta:
            return args[0]
        kwargs = kwargs or {}
        if func is torch.empty_like and kwargs.keys() == {"device"} and _is_dense(args[0]):
            like = args[0]
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, **kwargs)
        return func(*args, **kwargs)


def _is_dense(tensor: Tensor) -> bool:
    """Return whether a tensor without memory would use each of its elements once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return tensor.is_meta and tensor.numel() == 1 + sum((n - 1) * step for n, step in sizes)


@contextmanager
def shapes_only() -> Iterator[None]:
    """Create tensors on "meta": they have a shape and a type, but no values."""
    with torch.device("meta"), _Direct():
        yield


def allocate(network: nn.Module) -> nn.Module:
    """Give memory on the CPU, without values, to a network that was built with shapes only."""
    with _Direct():
        return network.to_empty(device="cpu")

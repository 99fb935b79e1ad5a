"""Import libraries without torch's compiler, which takes seconds and many commands never use.

torchvision and timm import it for one function each, which marks or checks functions for
compilation. Both behave as before: the compiler is imported when such a function is called.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any

import torch

_COMPILER, _UTILS = "torch._dynamo", "torch._dynamo.utils"


class _LazyUtils(ModuleType):
    """The module `torch._dynamo.utils`: one function is imported when called, the rest at once."""

    @staticmethod
    def is_compile_supported(device_type: str) -> Any:
        """Return whether torch can compile for a device."""
        return import_module(_UTILS).is_compile_supported(device_type)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python asks every module for some of these
            raise AttributeError(name)
        if sys.modules.get(_UTILS) is self:
            del sys.modules[_UTILS]
        return getattr(import_module(_UTILS), name)


def _disable_lazily(
    fn: Callable[..., Any] | None = None, recursive: bool = True, **_: object
) -> Any:
    """Do what `torch.compiler.disable` does, with torch's own lazy version of it."""
    return torch._disable_dynamo(fn, recursive)


@contextmanager
def compiler_deferred() -> Iterator[None]:
    """Let libraries that are imported in this block import torch's compiler when they need it."""
    if _COMPILER in sys.modules:
        yield
        return
    utils, disable = _LazyUtils(_UTILS), torch.compiler.disable
    sys.modules[_UTILS], torch.compiler.disable = utils, _disable_lazily
    try:
        yield
    finally:
        torch.compiler.disable = disable
        if sys.modules.get(_UTILS) is utils:
            del sys.modules[_UTILS]

"""Import libraries without torch's compiler, which takes seconds and many commands never use.

torchvision and timm import it for one function each, which marks or checks functions for
compilation. Both behave as before: the compiler is imported when such a function is called.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from types import FunctionType, ModuleType
from typing import Any

import torch

_COMPILER, _UTILS = "torch._dynamo", "torch._dynamo.utils"
_lock = threading.RLock()


class _LazyUtils(ModuleType):
    """The module `torch._dynamo.utils`: one function is imported when called, the rest at once."""

    def is_compile_supported(self, device_type: str) -> Any:
        """Return whether torch can compile for a device."""
        return self._real().is_compile_supported(device_type)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python asks every module for some of these
            raise AttributeError(name)
        return getattr(self._real(), name)

    def _real(self) -> Any:
        if sys.modules.get(_UTILS) is self:
            del sys.modules[_UTILS]
        return import_module(_UTILS)


def _lazy(disable: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement of `torch.compiler.disable` that uses torch's own lazy version of it."""

    def disable_lazily(
        fn: Callable[..., Any] | None = None, recursive: bool = True, **options: Any
    ) -> Any:
        if fn is None:
            return partial(disable_lazily, recursive=recursive, **options)
        if isinstance(fn, FunctionType) and not options:
            return torch._disable_dynamo(fn, recursive)
        return disable(fn, recursive, **options)

    return disable_lazily


@contextmanager
def compiler_deferred() -> Iterator[None]:
    """Let libraries that are imported in this block import torch's compiler when they need it."""
    with _lock:
        if _COMPILER in sys.modules or _UTILS in sys.modules:  # imported, or in such a block
            yield
            return
        utils, disable = _LazyUtils(_UTILS), torch.compiler.disable
        disable_lazily = _lazy(disable)
        sys.modules[_UTILS], torch.compiler.disable = utils, disable_lazily
        try:
            yield
        finally:
            if torch.compiler.disable is disable_lazily:  # else somebody replaced it meanwhile
                torch.compiler.disable = disable
            if sys.modules.get(_UTILS) is utils:
                del sys.modules[_UTILS]

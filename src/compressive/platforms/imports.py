"""Imports of packages that would import others at great cost."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def hidden_package(name: str) -> Iterator[None]:
    """Let imports of a package fail in this block, unless it has been imported before."""
    if name in sys.modules:
        yield
        return
    sys.modules[name] = None  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        del sys.modules[name]

"""Packages that are hidden during an import of another one."""

import importlib
import sys

import pytest
from compressive.platforms.imports import hidden_package


def test_hidden_package_cannot_be_imported_in_the_block_only() -> None:
    sys.modules.pop("colorsys", None)

    def import_it() -> None:
        importlib.import_module("colorsys")

    with hidden_package("colorsys"), pytest.raises(ImportError):
        import_it()
    import_it()
    with hidden_package("colorsys"):
        import_it()  # it has been imported before
    assert "colorsys" in sys.modules

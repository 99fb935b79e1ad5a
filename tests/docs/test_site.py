"""Generated pages of the documentation site: the command reference and the notebook."""

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer
from documents import ROOT

from compressive.cli.app import app

NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))
NUMBER = r"-?\d+(?:\.\d+)?"


def hook(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / "hooks" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_command_reference_lists_every_command_and_option() -> None:
    page = hook("commands").command_reference()
    program: Any = typer.main.get_command(app)
    sections = dict(re.findall(r"^## ([\w-]+)$(.*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL))
    assert list(sections) == list(program.commands)
    for name, command in program.commands.items():
        rows = re.findall(r"^\| (`.*?) \|", sections[name], re.MULTILINE)
        assert len(rows) == len([each for each in command.params if not each.hidden])
        for option in (o for each in command.params for o in each.opts if o.startswith("--")):
            assert f"`{option}`" in sections[name], f"{name} {option}"
        assert " ".join(command.help.split()[:5]) in sections[name]


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_prints_what_it_stores(path: Path, one_thread: None) -> None:
    """The text is the same; numbers may differ by 0.1, as random streams depend on the machine."""
    notebook = hook("notebook")
    stored = json.loads(path.read_text())
    for old, new in zip(stored["cells"], notebook.execute(stored)["cells"], strict=True):
        if old["cell_type"] == "code":
            before, after = notebook.output(old), notebook.output(new)
            assert re.sub(NUMBER, "#", before) == re.sub(NUMBER, "#", after)
            shown, found = (list(map(float, re.findall(NUMBER, t))) for t in (before, after))
            assert found == pytest.approx(shown, abs=0.1)


def test_notebook_stores_its_outputs() -> None:
    notebook = hook("notebook")
    for path in NOTEBOOKS:
        cells = [c for c in json.loads(path.read_text())["cells"] if c["cell_type"] == "code"]
        assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
        printing = [cell for cell in cells if "print(" in "".join(cell["source"])]
        assert printing
        assert all(notebook.output(cell) for cell in printing)


def test_notebook_becomes_a_page() -> None:
    code = {"cell_type": "code", "source": ["print(1 + 1)\n"], "outputs": []}
    text = {"cell_type": "markdown", "source": ["# Title"]}
    notebook = hook("notebook")
    done = notebook.execute({"cells": [text, code]})
    page = notebook.to_markdown(done)
    assert page == "# Title\n\n```python\nprint(1 + 1)\n\n```\n\n``` { .text .output }\n2\n```\n"

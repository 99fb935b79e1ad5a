"""Execute a notebook and convert it to Markdown, without Jupyter.

uv run python docs/hooks/notebook.py docs/tutorials/compress-your-own-loss.ipynb

Cells may print text; the value of the last expression of a cell is not shown.
"""

import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


def execute(notebook: dict[str, Any]) -> dict[str, Any]:
    """Run all code cells in one namespace; return a copy that holds their printed output."""
    namespace: dict[str, Any] = {"__name__": "__notebook__"}
    cells = []
    count = 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            printed = io.StringIO()
            source = "".join(cell["source"])
            with contextlib.redirect_stdout(printed):
                exec(compile(source, f"<cell {count}>", "exec"), namespace)
            cell = {**cell, "execution_count": count, "outputs": _stream(printed.getvalue())}
        cells.append(cell)
    return {**notebook, "cells": cells}


def to_markdown(notebook: dict[str, Any]) -> str:
    """Return the notebook as a page: text, code and printed output."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        if text := output(cell):
            parts.append(f"``` {{ .text .output }}\n{text.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def output(cell: dict[str, Any]) -> str:
    """Return the text that a cell printed."""
    return "".join("".join(each["text"]) for each in cell["outputs"])


def _stream(text: str) -> list[dict[str, Any]]:
    if not text:
        return []
    return [{"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}]


def main() -> None:
    """Execute the notebooks given on the command line and store their outputs."""
    for path in map(Path, sys.argv[1:]):
        done = execute(json.loads(path.read_text()))
        path.write_text(json.dumps(done, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()

"""mkdocs hook: add pages that are generated when the site is built."""

import ast
import json
from pathlib import Path
from typing import Any

from commands import command_reference
from mkdocs.structure.files import File, Files
from notebook import to_markdown

ROOT = Path(__file__).parents[2]
COMMANDS = "<!-- all commands -->"
PUBLIC_NAMES = "<!-- all public names -->"


def on_files(files: Files, config: Any) -> Files:
    """Add the notebooks, the changelog and the contributing guide as pages."""
    pages = {}
    for path in (ROOT / "docs" / "tutorials").glob("*.ipynb"):
        pages[f"tutorials/{path.stem}.md"] = to_markdown(json.loads(path.read_text()))
    for name in ("CHANGELOG", "CONTRIBUTING"):
        text = (ROOT / f"{name}.md").read_text().replace("](docs/", "](")
        pages[f"{name.lower()}.md"] = text.replace("](CHANGELOG.md)", "](changelog.md)")
    for place, text in pages.items():
        files.append(File.generated(config, place, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Insert the command reference; link to pages that were notebooks; widen the home page."""
    if page.is_homepage:
        page.meta["hide"] = ["navigation", "toc"]
    if COMMANDS in markdown:
        markdown = markdown.replace(COMMANDS, command_reference())
    if PUBLIC_NAMES in markdown:
        markdown = markdown.replace(PUBLIC_NAMES, public_names())
    return markdown.replace(".ipynb)", ".md)")


def public_names() -> str:
    """Return a mkdocstrings block for every function and class that `compressive` exports."""
    tree = ast.parse((ROOT / "src" / "compressive" / "__init__.py").read_text())
    found = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("compressive.")
        for alias in node.names
    }
    blocks = []
    for name in sorted(found, key=lambda name: (name[0].isupper(), name)):  # functions first
        options = f"    options:\n      heading: compressive.{name}\n      toc_label: {name}\n"
        blocks.append(f"::: {found[name]}\n{options}")
    return "\n".join(blocks)

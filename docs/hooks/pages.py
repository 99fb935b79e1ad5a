"""mkdocs hook: add pages that are generated when the site is built."""

import json
from pathlib import Path
from typing import Any

from commands import command_reference
from mkdocs.structure.files import File, Files
from notebook import to_markdown

ROOT = Path(__file__).parents[2]
COMMANDS = "<!-- all commands -->"


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
    return markdown.replace(".ipynb)", ".md)")

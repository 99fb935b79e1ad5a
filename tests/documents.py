"""The documents of the repository."""

from pathlib import Path

ROOT = Path(__file__).parents[1]

DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

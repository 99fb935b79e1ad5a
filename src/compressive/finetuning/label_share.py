"""Parse --labels. Imports no torch."""

import re


def parse_fraction(labels: str) -> float:
    """Return the share of labels; `labels` is a percentage such as "1%"."""
    found = re.fullmatch(r"(\d{1,3}(?:\.\d+)?) ?%", labels.strip())
    share = float(found[1]) / 100 if found else 0.0
    if not 0 < share <= 1:
        raise ValueError(f"--labels must be a percentage above 0% up to 100%, got {labels!r}")
    return share

"""Time limits of processes that wait for each other, from the environment."""

import os

COLLECTIVE_TIMEOUT = "COMPRESSIVE_COLLECTIVE_TIMEOUT"
SILENCE_TIMEOUT = "COMPRESSIVE_SILENCE_TIMEOUT"


def collective_timeout() -> int:
    """Return how many seconds processes wait for one that responds but does not arrive."""
    # The first process evaluates and saves while the others wait, which may take minutes.
    return _seconds(COLLECTIVE_TIMEOUT, 1800)


def silence_timeout() -> int:
    """Return how many seconds processes wait for one that gives no sign of life."""
    return _seconds(SILENCE_TIMEOUT, 120)


def _seconds(name: str, default: int) -> int:
    text = os.environ.get(name) or str(default)
    if not text.isdecimal() or not 3 <= int(text) <= 10**6:
        rule = "a whole number of seconds from 3 to 1000000"
        raise ValueError(f"{name} must be {rule}, got {text!r} in the environment")
    return int(text)

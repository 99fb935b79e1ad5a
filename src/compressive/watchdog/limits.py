"""Limits of the processes of a run, from the environment: how long they wait, how many train."""

import os

COLLECTIVE_TIMEOUT = "COMPRESSIVE_COLLECTIVE_TIMEOUT"
SILENCE_TIMEOUT = "COMPRESSIVE_SILENCE_TIMEOUT"
SPARE_PROCESSES = "COMPRESSIVE_SPARE_PROCESSES"


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


def active_processes(world: int, batch_size: int | None, grad_accum_steps: int) -> int:
    """Return how many of `world` processes train: all, or as many as divide the batch.

    `batch_size` is None if the command has none, and 0 if it is chosen later, from the images.
    """
    choice = os.environ.get(SPARE_PROCESSES) or "refuse"
    if choice not in ("refuse", "wait"):
        raise ValueError(f"{SPARE_PROCESSES} must be refuse or wait, got {choice!r}")
    if choice == "refuse" or batch_size is None:
        return world  # the schedule rejects a batch that does not divide
    if not batch_size:
        raise ValueError(
            f"{SPARE_PROCESSES}=wait needs a fixed batch size; give --batch-size or --recipe"
        )
    return max(process_counts(world, batch_size, grad_accum_steps), default=world)


def process_counts(world: int, batch_size: int, grad_accum_steps: int) -> list[int]:
    """Return the numbers of processes up to `world` that share a batch equally, 2 images each."""
    return [
        count
        for count in range(1, world + 1)
        if batch_size % (count * grad_accum_steps) == 0
        and batch_size >= 2 * count * grad_accum_steps
    ]

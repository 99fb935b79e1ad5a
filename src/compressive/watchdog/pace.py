"""Find ranks whose own work takes longer than that of the others."""

from collections.abc import Sequence
from statistics import median

WINDOW = 10.0  # seconds
MIN_STEPS = 5
REPEAT = 600.0  # seconds until the same rank is named again


class SlowRanks:
    """Compare the seconds per step that ranks spend without waiting for each other."""

    def __init__(self, world: int) -> None:
        self._world = world
        self._begin: tuple[float, list[tuple[int, float]]] | None = None
        self._named: dict[int, float] = {}

    def update(self, now: float, beats: Sequence[tuple[int, float, str]]) -> list[str]:
        """Take step, own seconds and host of each rank; return notes on slow ranks."""
        state = [(step, own) for step, own, _ in beats]
        if self._begin is None or any(
            s[0] < b[0] for s, b in zip(state, self._begin[1], strict=True)
        ):
            self._begin = (now, state)
            return []
        start, before = self._begin
        steps = [s[0] - b[0] for s, b in zip(state, before, strict=True)]
        if now - start < WINDOW or min(steps) < MIN_STEPS:
            return []
        self._begin = (now, state)
        own = [(s[1] - b[1]) / n for s, b, n in zip(state, before, steps, strict=True)]
        return self._notes(now, own, (now - start) / max(steps), [host for _, _, host in beats])

    def _notes(
        self, now: float, own: Sequence[float], step: float, hosts: Sequence[str]
    ) -> list[str]:
        """Name the slowest rank if the others wait for it for a fifth of a step or longer."""
        slowest = max(range(self._world), key=own.__getitem__)
        others = median(each for r, each in enumerate(own) if r != slowest)
        if own[slowest] < 1.5 * others or own[slowest] - others < 0.2 * step:
            return []
        if now - self._named.get(slowest, -REPEAT) < REPEAT:
            return []
        self._named[slowest] = now
        where = f" on {hosts[slowest]}" if hosts[slowest] else ""
        return [
            f"note: rank {slowest}{where} is slow: {own[slowest]:.3g} s per step without waiting, "
            f"the others {others:.3g} s; all ranks wait for it"
        ]

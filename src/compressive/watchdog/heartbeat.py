"""A thread that publishes what this process does, and watches the other processes."""

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from compressive.watchdog.activity import CURRENT, Activity
from compressive.watchdog.pace import SlowRanks

_BEAT_KEY = "heartbeat"


@runtime_checkable
class Store(Protocol):
    """The part of torch's stores that a watchdog uses."""

    def set(self, key: str, value: str, /) -> None:
        """Store a value."""
        ...

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys exist."""
        ...

    def get(self, key: str, /) -> bytes:
        """Return a value; wait for it if it does not exist."""
        ...


class Beat(NamedTuple):
    """What a process published last."""

    count: int = 0
    step: int = 0
    operation: str = ""
    calls: int = 0
    seconds: float = 0.0  # in this operation
    own: float = 0.0  # seconds of its own work since the start
    host: str = ""
    is_leaving: bool = False  # it has noticed a failure and exits


class Watchdog:
    """Publish this process's beat every `interval` seconds; end the process if another is silent.

    A process that has not published for `silence` seconds is dead, frozen or cut off. If this
    process has waited in a collective for as long, `end` is called with one line that names it.
    `announce` prints such a line after `late` seconds without ending the process.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world: int,
        *,
        silence: float,
        end: Callable[[str], None],
        late: float = float("inf"),
        announce: Callable[[str], None] | None = None,
        interval: float = 1.0,
        activity: Activity = CURRENT,
        store_host: str = "",
    ) -> None:
        self.rank: int = rank
        self.world: int = world
        self.notes: list[str] = []  # for the log of the first process
        self._store, self._activity, self._store_host = store, activity, store_host
        self._silence, self._end, self._interval = silence, end, interval
        self._late, self._announce = late, announce
        self._done = threading.Event()
        self._host = socket.gethostname()
        self._begin = self._watched = time.monotonic()
        self._is_leaving = False
        self._seen = (0, 0, "")  # step, calls and operation of this process
        self._stuck = 0.0  # seconds since they changed
        self._rounds = self._rounds_seen = 0  # exchanges with the store that succeeded
        self._unreachable = 0.0  # seconds since the last one
        self._beats = [Beat() for _ in range(world)]
        self._counts = [0] * world  # of the beats, when the silence was last measured
        self._silent = [0.0] * world
        self._slow = SlowRanks(world)
        # A request to a frozen store may block, so another thread measures the time.
        targets = (self._exchange_forever, self._watch_forever)
        self._threads = [threading.Thread(target=each, daemon=True) for each in targets]

    def start(self) -> None:
        """Start publishing and watching."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Tell the others that this process ends, and end the threads."""
        self._is_leaving = True
        self._done.set()
        for thread in self._threads:  # one that is blocked by the store ends with the process
            thread.join(2 * self._interval)

    def _exchange_forever(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._done.wait(self._interval / 4 if self._is_leaving else self._interval)
            with contextlib.suppress(RuntimeError):  # of torch's store
                self.exchange()

    def _watch_forever(self) -> None:
        while not self._done.wait(self._interval):
            self.watch()

    def exchange(self) -> None:
        """Publish the beat of this process and, if needed, read those of the others."""
        step, calls, operation = self._seen
        own = time.monotonic() - self._begin - self._activity.excluded
        state = (step, operation, calls, self._stuck, own, self._host, self._is_leaving)
        beat = Beat(self._beats[self.rank].count + 1, *state)
        self._beats[self.rank] = beat
        self._store.set(f"{_BEAT_KEY}{self.rank}", json.dumps(beat))
        if self._is_reading():
            for other in range(self.world):
                key = f"{_BEAT_KEY}{other}"
                if other != self.rank and (self._beats[other].count or self._store.check([key])):
                    self._beats[other] = Beat(*json.loads(self._store.get(key)))
        self._rounds += 1

    def _is_reading(self) -> bool:
        return self.rank == 0 or self._is_leaving or self._stuck > 2 * self._interval

    def watch(self) -> None:
        """Measure how long this process and the others have not advanced, and act on it."""
        self._measure()
        if self.rank == 0:
            paces = [(beat.step, beat.own, beat.host) for beat in self._beats]
            self.notes += self._slow.update(time.monotonic(), paces)
        is_lost = self._unreachable >= self._silence or self._silent_ranks(self._silence)
        is_waiting = self._activity.waiting > 0 and not self._is_leaving
        if self._stuck >= self._silence and is_lost and is_waiting:
            self._end(self.describe(self._silence))
        elif self._stuck >= self._late and self._announce is not None:
            self._late = float("inf")
            self._announce(self.describe(self._silence))

    def _measure(self) -> None:
        now = time.monotonic()
        # A suspended job must not count as silent when it continues, so one call counts no more.
        passed = min(now - self._watched, 3 * self._interval)
        self._watched = now
        seen = (self._activity.step, self._activity.calls, self._activity.operation)
        self._stuck = self._stuck + passed if seen == self._seen else 0.0
        self._seen = seen
        self._unreachable = self._unreachable + passed if self._rounds == self._rounds_seen else 0.0
        self._rounds_seen = self._rounds
        is_known = self._is_reading() and not self._unreachable
        for other, beat in enumerate(self._beats):
            is_new = beat.count != self._counts[other]
            self._counts[other] = beat.count
            if is_new or other == self.rank:
                self._silent[other] = 0.0
            elif is_known:
                self._silent[other] += passed

    def _silent_ranks(self, seconds: float) -> list[int]:
        return [
            other
            for other, silent in enumerate(self._silent)
            if silent >= seconds and not self._beats[other].is_leaving
        ]

    def explain(self) -> str:
        """Name the processes that failed, after an error of a collective; takes a few seconds."""
        self._is_leaving = True  # the others must not blame this process
        until = time.monotonic() + 4 * self._interval
        while time.monotonic() < until and not self._done.is_set():
            time.sleep(self._interval / 4)
            if self._silent_ranks(2 * self._interval):
                break
        return self.describe(2 * self._interval)

    def describe(self, silence: float) -> str:
        """Name the silent processes, else those that are behind; "" if all are at one place."""
        here = f"rank {self.rank} waits in {self._activity.operation} of step {self._seen[0]}"
        if silent := self._silent_ranks(silence):
            who = "; ".join(
                f"rank {r}{_at(self._beats[r])} has been silent for {self._silent[r]:.0f} s, last "
                f"in {_place(self._beats[r])}"
                for r in silent
            )
            return f"{who}; {here}"
        if self._unreachable >= min(silence, 2 * self._interval):
            where = self._store_host or "the store"
            return f"{where} has not answered for {self._unreachable:.0f} s; {here}"
        behind = behind_ranks(self._beats, self._seen[1], self.rank)
        who = "; ".join(
            f"rank {r}{_at(self._beats[r])} has not arrived: it has been in "
            f"{_place(self._beats[r])} for {self._beats[r].seconds:.0f} s"
            for r in behind
        )
        return f"{who}; {here}" if who else ""


def behind_ranks(beats: Sequence[Beat], calls: int, own: int) -> list[int]:
    """Return the other ranks that have entered fewer collectives, the last ones first."""
    late = [r for r, beat in enumerate(beats) if r != own and beat.count and beat.calls < calls]
    return sorted(late, key=lambda r: (beats[r].calls, r))


def _at(beat: Beat) -> str:
    return f" on {beat.host}" if beat.host else ""


def _place(beat: Beat) -> str:
    return f"{beat.operation} of step {beat.step}" if beat.count else "its start"


def end_process(text: str) -> None:
    """Print one line and end this process: its main thread is blocked in a collective."""
    message = f"error: another process of this run ended or does not answer ({text})"
    with contextlib.suppress(OSError):
        os.write(2, f"\n{message}; run the same command to resume\n".encode())
    os._exit(1)


def print_late(text: str) -> None:
    """Print one line about late processes before NCCL ends this one."""
    if text:
        os.write(2, f"\nerror: a collective has timed out ({text})\n".encode())

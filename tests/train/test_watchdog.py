"""The watchdog names processes that are silent, late or slow; a fake clock and a dict as store."""

import json
import time
from functools import partial
from typing import Any

import pytest

from compressive.watchdog import activity, heartbeat
from compressive.watchdog.activity import Activity, Backward, Collective, Operation, begin_step
from compressive.watchdog.heartbeat import Watchdog
from compressive.watchdog.limits import SPARE_PROCESSES, active_processes, process_counts
from compressive.watchdog.pace import SlowRanks

OWN_WORK = ("online evaluation", "saving", "its own computation")


class DictStore:
    """Values in memory; raises torch's kind of error while it is `down`."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.is_down = False

    def _answer(self) -> None:
        if self.is_down:
            raise RuntimeError("Broken pipe")

    def set(self, key: str, value: str, /) -> None:
        self._answer()
        self.values[key] = value

    def check(self, keys: list[str], /) -> bool:
        self._answer()
        return all(key in self.values for key in keys)

    def get(self, key: str, /) -> bytes:
        self._answer()
        return self.values[key].encode()


class Processes:
    """Watchdogs of several processes, driven second by second."""

    def __init__(self, world: int, monkeypatch: pytest.MonkeyPatch, **options: Any) -> None:
        self.now = 1000.0
        monkeypatch.setattr(heartbeat.time, "monotonic", lambda: self.now)
        self.store = DictStore()
        self.activities = [Activity() for _ in range(world)]
        self.ended: dict[int, str] = {}
        self.late: dict[int, str] = {}
        self.dogs = [
            Watchdog(
                self.store,
                rank,
                world,
                silence=10,
                end=partial(self.ended.__setitem__, rank),
                announce=partial(self.late.__setitem__, rank),
                activity=self.activities[rank],
                store_host="rank 0 on node0",
                **options,
            )
            for rank in range(world)
        ]

    def advance(self, seconds: int, *ranks: int) -> None:
        for _ in range(seconds):
            self.now += 1
            for rank in ranks:
                try:
                    self.dogs[rank].exchange()
                except RuntimeError:
                    assert self.store.is_down
                self.dogs[rank].watch()

    def at(self, rank: int, step: int, operation: str, calls: int) -> None:
        found = self.activities[rank]
        found.step, found.operation, found.calls = step, operation, calls
        found.waiting = int(operation not in OWN_WORK)


def test_frozen_process_is_named_by_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Processes(3, monkeypatch)
    for rank in range(3):
        run.at(rank, 7, "batch norm statistics", 40)
    run.advance(3, 0, 1, 2)
    run.at(0, 7, "the gather of candidates", 41)
    run.at(2, 7, "the gather of candidates", 41)
    run.advance(9, 0, 2)
    assert run.ended == {}
    run.advance(6, 0, 2)
    assert run.ended.keys() == {0, 2}
    for rank, text in run.ended.items():
        assert text.startswith("rank 1 on ")
        assert "batch norm statistics of step 7" in text
        assert f"rank {rank} waits in the gather of candidates of step 7" in text
        assert "rank 0 on" not in text
        assert "rank 2 on" not in text


def test_process_that_advances_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process is silent, but this one still makes progress."""
    run = Processes(2, monkeypatch)
    for second in range(40):
        run.at(0, second, "its own computation", second)
        run.advance(1, *([0, 1] if second < 3 else [0]))
    assert run.ended == {}


def test_busy_process_is_late_but_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """It responds for longer than the limit of silence; only NCCL's limit is announced."""
    run = Processes(2, monkeypatch, late=30)
    run.at(0, 5, "online evaluation", 12)
    run.at(1, 6, "batch norm statistics", 13)
    run.advance(29, 0, 1)
    assert run.late == {}
    run.advance(3, 0, 1)
    assert run.ended == {}
    assert "rank 0 on " in run.late[1]
    assert "has been in online evaluation of step 5 for" in run.late[1]
    assert run.late[1].endswith("rank 1 waits in batch norm statistics of step 6")
    assert run.late[0] == ""  # nobody is behind it
    run.advance(30, 0, 1)
    assert run.ended == {}


def test_process_that_does_not_wait_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """It saves for minutes while another one is dead; the next collective will fail."""
    run = Processes(2, monkeypatch)
    run.at(0, 5, "saving", 12)
    run.advance(3, 0, 1)
    run.advance(100, 0)
    assert run.ended == {}
    run.at(0, 6, "batch norm statistics", 13)
    run.advance(9, 0)
    assert run.ended == {}
    run.advance(3, 0)
    assert run.ended[0].startswith("rank 1 on ")


def test_process_that_has_finished_is_not_missed() -> None:
    """The other one uploads its files for longer than the limit, and waits at the end."""
    store, ended = DictStore(), []
    options = {"silence": 0.2, "end": ended.append, "interval": 0.02}
    first, last = (Watchdog(store, r, 2, activity=Activity(), **options) for r in (0, 1))
    first._activity.waiting = 1
    first.start()
    last.start()
    time.sleep(0.2)
    last.stop()
    time.sleep(0.6)
    first.stop()
    assert json.loads(store.values["heartbeat1"])[-1] is True
    assert ended == []


def test_store_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Processes(2, monkeypatch)
    run.at(1, 3, "batch norm statistics", 5)
    run.advance(2, 0, 1)
    run.store.is_down = True
    run.advance(9, 1)
    assert run.ended == {}
    run.advance(2, 1)
    assert run.ended[1].startswith("rank 0 on node0 has not answered for 1")


def test_suspended_job_is_not_silent_when_it_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Processes(2, monkeypatch)
    for rank in (0, 1):
        run.at(rank, 7, "batch norm statistics", 40)
    run.advance(3, 0, 1)
    run.now += 3600
    run.advance(3, 0, 1)
    assert run.ended == {}


def test_process_that_reports_its_error_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 is killed; rank 0 notices, says so and exits; rank 2 must name rank 1 only."""
    run = Processes(3, monkeypatch)
    run.advance(3, 0, 1, 2)
    alive = [0, 2]
    monkeypatch.setattr(heartbeat.time, "sleep", lambda _: run.advance(1, *alive))
    assert run.dogs[0].explain().startswith("rank 1 on ")
    alive = [2]
    text = run.dogs[2].explain()
    assert text.startswith("rank 1 on ")
    assert "rank 0 on" not in text
    assert json.loads(run.store.values["heartbeat0"])[-1] is True


def test_operations_are_named_and_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(activity, "CURRENT", current := Activity())
    monkeypatch.setattr(activity.time, "monotonic", lambda: now[0])
    begin_step(4)
    with Backward("backward"):
        now[0] += 2
        with Collective("inside"):
            assert current.operation == "inside"
            now[0] += 1
        assert current.operation == "backward"
    assert (current.step, current.calls, current.excluded) == (4, 2, 1.0)
    with Operation("saving"):
        now[0] += 5
    assert (current.calls, current.excluded) == (2, 6.0)

    def fail() -> None:
        with Collective("failing"):
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert current.operation == "failing"  # for the report


@pytest.mark.parametrize("slow", [0, 2])
def test_slow_rank_is_named_once(slow: int) -> None:
    ranks, notes = SlowRanks(3), []
    for second in range(60):
        paces = [
            (2 * second, second * (0.9 if rank == slow else 0.2), f"node{rank}")
            for rank in range(3)
        ]
        notes += ranks.update(float(second), paces)
    assert len(notes) == 1
    assert f"rank {slow} on node{slow} is slow: 0.45 s per step" in notes[0]
    assert "the others 0.1 s" in notes[0]


@pytest.mark.parametrize("own", [(0.9, 0.9, 0.9), (0.20, 0.31, 0.2), (0.7, 0.9, 0.8)])
def test_small_differences_are_not_named(own: tuple[float, ...]) -> None:
    ranks = SlowRanks(3)
    for second in range(60):
        assert ranks.update(float(second), [(2 * second, second * each, "") for each in own]) == []


def test_overhead_of_naming_a_collective_is_microseconds() -> None:
    begin = time.perf_counter()
    for _ in range(10_000):
        with Collective("batch norm statistics"):
            pass
    assert (time.perf_counter() - begin) / 10_000 < 50e-6  # 1 us here; other tests may run


@pytest.mark.parametrize(
    ("world", "batch", "portions", "active"),
    [(4, 8, 1, 4), (3, 8, 1, 2), (8, 8, 1, 4), (24, 4096, 1, 16), (4, 12, 2, 3), (3, 2, 1, 1)],
)
def test_as_many_processes_train_as_divide_the_batch(
    world: int, batch: int, portions: int, active: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SPARE_PROCESSES, "wait")
    assert active_processes(world, batch, portions) == active
    assert active == process_counts(world, batch, portions)[-1]
    monkeypatch.delenv(SPARE_PROCESSES)
    assert active_processes(world, batch, portions) == world


def test_spare_processes_need_a_known_choice_and_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SPARE_PROCESSES, "wait")
    with pytest.raises(ValueError, match="--batch-size"):
        active_processes(4, 0, 1)
    assert active_processes(3, None, 1) == 3  # such as evaluation
    monkeypatch.setenv(SPARE_PROCESSES, "yes")
    with pytest.raises(ValueError, match=f"{SPARE_PROCESSES} must be .* 'yes'"):
        active_processes(4, 8, 1)

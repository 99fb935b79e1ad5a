"""Work of an evaluation that is done in a thread."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_context import context_of, place

from compressive.data.source import Source
from compressive.evaluation import context as evaluation_context
from compressive.evaluation.ahead import Ahead, Closed


def test_each_part_is_done_once_and_in_order() -> None:
    ahead, done = Ahead(), []
    for name in ("a", "b", "a"):
        ahead.start(name, lambda name=name: done.append(name) or name.upper())
    assert [ahead.result(name) for name in ("b", "a", "other")] == ["B", "A", None]
    ahead.close()
    assert done == ["a", "b"]


def test_error_is_raised_where_the_result_is_needed() -> None:
    ahead = Ahead()
    ahead.start("part", lambda: [][0])
    with pytest.raises(IndexError):
        ahead.result("part")
    ahead.close()


def test_close_ends_running_work_and_drops_the_rest() -> None:
    ahead, running, done = Ahead(), threading.Event(), []

    def endless() -> None:
        while True:
            running.set()
            ahead.go_on()

    ahead.start("endless", endless)
    ahead.start("next", lambda: done.append(1))
    assert running.wait(60)
    ahead.close()
    with pytest.raises(Closed):
        ahead.result("endless")
    assert not done


def test_images_decoded_ahead_are_the_same(tmp_path: Path) -> None:
    data = place(tmp_path / "data", {"a": 5, "b": 5}, {"a": 3, "b": 4})
    (data / "test" / "b" / "bad.png").write_bytes(b"no image")
    plain, early = context_of(data), context_of(data)
    early.open_ahead("test")
    early.open_ahead("test")
    one, other = plain.features("test"), early.features("test")
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert early.unreadable == plain.unreadable != []
    assert early.loader("test") is early.loader("test")
    plain.close()
    early.close()


def test_closing_ends_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C must not wait until a large set is decoded."""
    decoding, done = threading.Event(), 0

    def endless(source: Source, *, progress: Callable[[int, int], None], **_: object) -> None:
        nonlocal done
        while True:
            decoding.set()
            progress(done, len(source))
            done += 1

    context = context_of(place(tmp_path, {"a": 3, "b": 3}, {"a": 2, "b": 2}))
    monkeypatch.setattr(evaluation_context, "open_loader", endless)
    context.open_ahead("test")
    assert decoding.wait(60)
    context.close()
    with pytest.raises(Closed):
        context.loader("test")


def test_network_runs_once_before_features_and_hides_its_errors(tmp_path: Path) -> None:
    context = context_of(place(tmp_path, {"a": 3, "b": 3}, {"a": 2, "b": 2}))
    seen = []
    context.model.network.register_forward_hook(lambda _, x, __: seen.append(x[0].shape))
    context.warm_up()
    assert seen == [(512, 3, 16, 16)]

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    context.model.network.register_forward_pre_hook(fail)
    context.warm_up()  # the extraction of features reports it
    with pytest.raises(RuntimeError, match="out of memory"):
        context.features("train")
    context.close()

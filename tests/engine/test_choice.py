"""Engines are chosen by checked options; the local one runs units in order."""

import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_line import error_line
from tiny import photos

from compressive.engine import choice as choice_module
from compressive.engine.choice import EngineChoice, host_and_port, parse_engine
from compressive.engine.local import LocalEngine
from compressive.engine.opening import open_engine
from compressive.engine.ray_cluster import Reserved, units_on_node
from compressive.evaluation.many import output_folders


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Ray count as installed, and no cluster be named."""
    monkeypatch.setattr(choice_module, "find_spec", lambda _: object())
    for name in ("RAY_ADDRESS", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--engine dask", "dask"),
        ("--engine ray://", "ray://"),
        ("--engine ray://host:99999", "99999"),
        ("--cpus-per-task 2", "--engine ray"),
        ("--engine ray --cpus-per-task -1", "-1"),
    ],
)
def test_wrong_engines_are_one_line(tmp_path: Path, words: str, expected: str) -> None:
    data = photos(tmp_path / "data", 2)
    assert expected in error_line(f"pack {data} --out {tmp_path}/out {words}")


def test_fractions_of_gpus_are_checked() -> None:
    for allowed in (0, 0.25, 1, 4):
        assert parse_engine("ray", allowed).gpus == allowed
    for wrong in (-0.5, 1.5, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="--gpus-per-task"):
            parse_engine("ray", wrong)
    with pytest.raises(ValueError, match="--gpus-per-task needs --engine ray"):
        parse_engine("local", 0)


def test_the_address_comes_from_the_option_or_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert parse_engine() == EngineChoice("local", None, 0)
    assert parse_engine("ray").address == "ray"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert parse_engine("ray").address == "10.0.0.1:6379"
    assert parse_engine("ray://head:10001").address == "ray://head:10001"
    assert parse_engine("local").is_local
    assert host_and_port("ray://[::1]:10001", "--engine") == ("::1", 10001)


def test_ray_that_is_missing_or_started_by_torchrun_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="torchrun"):
        parse_engine("ray")
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr(choice_module, "find_spec", lambda _: importlib.util.find_spec("no_ray"))
    with pytest.raises(ValueError, match=r"compressive\[ray\]"):
        parse_engine("ray")


def test_the_local_engine_takes_units_one_after_the_other() -> None:
    taken = []

    def units() -> Iterator[int]:
        for k in range(3):
            taken.append(k)
            yield k

    with open_engine(EngineChoice()) as engine:
        assert isinstance(engine, LocalEngine)
        for number, result in engine.map(lambda k: k * k, units(), name="squares"):
            assert result == number**2
            assert taken[-1] == number


@pytest.mark.parametrize(
    ("cpus", "gpus", "expected"),
    [(1, 0, 16), (3, 0, 5), (1, 1, 4), (1, 0.25, 16), (1, 0.3, 12), (2, 0.25, 8), (1, 2, 2)],
)
def test_units_that_fit_on_a_machine_of_four_gpus(cpus: int, gpus: float, expected: int) -> None:
    assert units_on_node(Reserved(cpus, gpus), {"CPU": 16.0, "GPU": 4.0}) == expected


def test_each_of_several_encoders_has_a_folder_of_its_own() -> None:
    assert output_folders(["runs/a"], "out") == ["out"]
    assert output_folders(["runs/a", "resnet50"], None) == [None, None]
    assert output_folders(["runs/a", "resnet50"], "out/") == ["out/a", "out/resnet50"]
    one, other, third = output_folders(["x/a", "y/a", "b"], "out")
    assert one != other
    assert third == "out/b"
    with pytest.raises(ValueError, match="twice"):
        output_folders(["runs/a", "runs/a/"], "out")

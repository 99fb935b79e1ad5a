"""Random command lines and settings give a documented exit code and never a traceback."""

import json
import math
import random
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import typer
from tiny import CHANGES, noise, sorted_photos
from typer.testing import CliRunner

from compressive import recipes
from compressive.cli.app import app
from compressive.config import METHODS, Config, flat, from_dict, override, unused_settings
from compressive.evaluation.tasks import TASKS
from compressive.train.schedule import Schedule

PROGRAM: Any = typer.main.get_command(app)  # a Group of click, or of typer's copy of it
EXIT_CODES = (0, 1, 2, 130)
TEXTS = ("", " ", "-", "x", "Ü\udce9", "a\0b", "\x1b[31m", "../..", "a" * 300, "None", "true", "🦊")
NUMBERS = ("-1", "0", "1", "2", "7", "0.5", "1e3", "1e400", "-0.0", "nan", "inf", "9" * 400, "0x10")
NAMES = {
    "recipe": (*recipes.names(), "c-simclr", "simclr/nothing"),
    "suite": ("quick", "standard", "none", "QUICK"),
    "tasks": (*TASKS, "knn,knn", "knn,", ",", "knn,nothing"),
    "device": ("cpu", "auto", "cuda", "cuda:99", "tpu"),
    "split": ("train", "test", "validation", "nothing"),
    "network": ("test_resnet", "resnet18", "no_such_network"),
    "preset": ("beta", "kappa-e", "nothing"),
    "seeds": ("0", "0,1", "1,1", "0,,1", "-1"),
}

# Arguments that a command accepts, by their position in `random_places`.
VALID = {"pretrain": [0], "evaluate": [2], "embed": [2, 0], "compare": [2, 3], "report": [2]}
VALID |= {"watch": [2]}
QUICK = ["--tasks", "knn,geometry", "--max-images", "24", "--device", "cpu"]
COUNTS = {"epochs", "steps", "seed", "size", "max_images", "jobs", "dim", "batch", "kappa_e"}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return a finished run, images, and files and folders that are neither."""
    folder = tmp_path_factory.mktemp("fuzz")
    sets = [word for change in CHANGES for word in ("--set", change)]
    run = ["pretrain", str(sorted_photos()), *sets, "--out", str(folder / "run")]
    assert CliRunner().invoke(app, run).exit_code == 0
    shutil.copytree(folder / "run", folder / "other")
    for name in ("run", "other"):
        seed = ["--seed", str(len(name))]
        assert (
            CliRunner().invoke(app, ["evaluate", str(folder / name), *QUICK, *seed]).exit_code == 0
        )
    (folder / "empty").mkdir()
    (folder / "text.json").write_text("{")
    (folder / "odd").mkdir()
    noise(16, 16).save(folder / "odd/\x1b[31m.png")
    (folder / "odd/b.png").write_bytes(b"no image")
    (folder / "loop").symlink_to("loop")
    return {
        "images": sorted_photos(),
        "text": folder / "text.json",
        "run": folder / "run",
        "other": folder / "other",
        **{path.name: path for path in folder.iterdir()},
    }


def random_places(places: dict[str, Path]) -> list[str]:
    run = places["run"]
    inside = ("encoder.safetensors", "config.json", "metrics.jsonl", "evaluation", "checkpoints")
    return [
        *map(str, places.values()),
        *(str(run / name) for name in inside),
        *(
            "/dev/null",
            "~nouser/x",
            "s3://bucket/x",
            "file:///tmp",
            "torchvision:Nothing",
            "nowhere",
        ),
        *TEXTS,
    ]


def random_value(rng: random.Random, option: Any, places: list[str]) -> str:
    known = NAMES.get(option.name or "", ())
    if known and rng.random() < 0.7:
        return rng.choice(known)
    if option.name in COUNTS and rng.random() < 0.9:
        return rng.choice(NUMBERS)
    return rng.choice(places if rng.random() < 0.7 else [*TEXTS, *NUMBERS])


def random_change(rng: random.Random) -> str:
    """Return a random setting with a value that keeps runs small."""
    name = rng.choice([*flat(Config()), "nothing", "train", "train.nothing", "", "="])
    values = [v for v in NUMBERS if v != "1e3"] + [*TEXTS, *METHODS]
    return name + rng.choice(["=", "=", "=", "", "=="]) + rng.choice(values)


def random_line(rng: random.Random, places: list[str]) -> list[str]:
    name, command = rng.choice(sorted(PROGRAM.commands.items()))
    words = [name]
    arguments = [p for p in command.params if p.param_type_name == "argument"]
    options = [p for p in command.params if p.param_type_name == "option"]
    for _ in range(len(arguments) + rng.choice([-1, 0, 0, 0, 0, 0, 0, 1])):
        words.append(rng.choice(places))
    if name in VALID and rng.random() < 0.5:  # valid arguments; options may still be invalid
        words = [name, *(places[i] for i in VALID[name])]
    if name in ("pretrain", "sweep"):
        base = {change.partition("=")[0]: change for change in CHANGES}
        for _ in range(rng.choice([0, 1, 1, 2])):
            change = random_change(rng)
            base[change.partition("=")[0]] = change
        words += [word for change in base.values() for word in ("--set", change)]
    if name in ("quickstart", "sweep"):  # avoid minutes of training
        words += ["--out", places[1]]
    words += QUICK if name == "evaluate" else []
    for option in rng.sample(options, k=min(len(options), rng.choice([0, 1, 1, 2, 3]))):
        if option.name in ("changes", "out" if name in ("quickstart", "sweep") else ""):
            continue
        words.append(rng.choice(option.opts))
        if not option.is_flag and rng.random() < 0.95:
            words.append(random_value(rng, option, places))
    if rng.random() < 0.05:
        words.insert(rng.randrange(len(words)), rng.choice(["--nothing", "--", "-x", "--help"]))
    return words


@pytest.mark.parametrize(
    "chunk",
    [
        pytest.param(0, marks=pytest.mark.slow),
        *(pytest.param(chunk, marks=pytest.mark.stress) for chunk in range(1, 5)),
    ],
)
def test_100_random_command_lines_end_with_a_documented_exit_code(
    chunk: int,
    places: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    rng, known = random.Random(chunk), random_places(places)
    for _ in range(100):
        words = random_line(rng, known)
        result = CliRunner().invoke(app, words)
        assert result.exit_code in EXIT_CODES, (words, result.output, result.exception)
        assert isinstance(result.exception, SystemExit | None), (words, result.exception)
        assert "Traceback" not in result.output, words
        if result.stderr.startswith("error:") and result.exit_code == 2:
            lines = result.stderr.splitlines()  # `evaluate` has one per encoder
            assert len(lines) == 1 or words[0] == "evaluate", (words, result.stderr)
            assert all(line.startswith("error:") for line in lines), (words, result.stderr)
            assert len(result.stderr) < 1500, words


def check(config: Config, schedule: Schedule) -> bool:
    """Check that a config round-trips through JSON and that its schedules are finite."""
    assert from_dict(json.loads(json.dumps(asdict(config)))) == config
    unused_settings(config)
    for step in (0, schedule.total // 2, schedule.total):
        found = (schedule.lr(step), schedule.beta(step), schedule.ema_decay(step))
        assert all(map(math.isfinite, found)), (config, step, found)
    return True


@pytest.mark.stress
def test_5000_random_settings_are_accepted_or_rejected_in_one_line() -> None:
    rng, accepted = random.Random(0), 0
    bases = [Config(), *(recipes.get(name).config for name in recipes.names())]
    names = [*flat(Config()), "nothing", "train", "train.nothing", "lr"]
    values = (*NUMBERS, *TEXTS, *METHODS, "yes", "no", "auto", "cifar", "imagenet", "adaptive")
    for _ in range(5000):
        count = rng.choice([1, 1, 2])
        changes = [f"{rng.choice(names)}={rng.choice(values)}" for _ in range(count)]
        lines = [""]
        try:
            config = override(rng.choice(bases), *changes)
            accepted += check(config, Schedule(config, count=1000))
        except ValueError as error:
            lines = str(error).splitlines()
        assert len(lines) == 1, changes
    assert 300 < accepted < 4500  # both outcomes occur

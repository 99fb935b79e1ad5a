"""Sweeps: the plan is the product, a failed run ends nothing, no finished run is repeated."""

import io
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from run_files import metrics_text, record, results_text
from tiny import CHANGES, Written, journal, last, silent, sorted_photos
from typer.testing import CliRunner

from compressive import recipes
from compressive.cli.app import app
from compressive.config import Config, override
from compressive.report import write_report
from compressive.report.summary import Spread
from compressive.rundir.lock import acquire_lock
from compressive.sweep.plan import Job, ablation, plan
from compressive.sweep.runner import Summary, _State, summary_table, sweep
from compressive.sweep.table import SweepRow, figures, rows


def test_the_plan_is_the_product_of_values_and_seeds() -> None:
    vary = ["bottleneck.beta=0,0.1", "bottleneck.kappa_b=1,3,10"]
    jobs = plan("builtin", recipe="c-simclr/quickstart", vary=vary, seeds="0,7")
    expected = [
        f"beta{beta}-kappa_b{kappa}-seed{seed}"
        for beta in ("0", "0.1")
        for kappa in ("1", "3", "10")
        for seed in (0, 7)
    ]
    assert [job.name for job in jobs] == expected
    assert jobs[-1] == Job(
        name="beta0.1-kappa_b10-seed7",
        setting="beta 0.1, kappa_b 10",
        varied={"bottleneck.beta": "0.1", "bottleneck.kappa_b": "10"},
        seed=7,
        device="auto",
    )
    assert jobs[-1].changes == ["bottleneck.beta=0.1", "bottleneck.kappa_b=10", "seed=7"]


def test_names_are_told_apart_and_fit_for_folders() -> None:
    jobs = plan("builtin", vary=["network.name=a/b", "optim.name=sgd,adamw"])
    assert [job.name for job in jobs] == [
        "network.namea_b-optim.namesgd-seed0",
        "network.namea_b-optim.nameadamw-seed0",
    ]
    assert [job.name for job in plan("builtin", seeds="3")] == ["seed3"]


def test_a_run_is_evaluated_where_it_was_trained() -> None:
    assert plan("builtin", changes=["train.device=cpu"])[0].device == "cpu"
    assert [j.device for j in plan("builtin", vary=["train.device=cpu,cuda:1"])] == [
        "cpu",
        "cuda:1",
    ]


WRITTEN_OUT = [  # Tables 5, 14, 11, 12, 13, 15, 7 and 8; the paper's loss has the weight kappa_d/2
    ("beta", "c-simclr", "bottleneck.beta", [0, 0.01, 0.1, 1, 1.5]),
    ("beta", "c-byol", "bottleneck.beta", [0, 0.01, 0.1, 1, 1.5]),
    ("kappa-e", "c-simclr", "bottleneck.kappa_e", [2**i for i in range(8, 14)]),
    ("kappa-e", "c-byol", "bottleneck.kappa_e", [2**i for i in range(12, 16)]),
    ("kappa-b", "c-simclr", "bottleneck.kappa_b", [1, 3, 10, 15, 20]),
    ("kappa-b", "c-byol", "bottleneck.kappa_b", [1, 3, 10, 15, 20]),
    ("crop-area", "simclr", "views.crop_scale_min", [0.08, 0.16, 0.25, 0.5]),
    ("crop-area", "c-simclr", "views.crop_scale_min", [0.08, 0.16, 0.25, 0.5]),
    ("loss-weight", "byol", "decoder.kappa_d", [2 * w for w in (1, 2, 5)]),
]


@pytest.mark.parametrize(("name", "method", "setting", "values"), WRITTEN_OUT)
def test_presets_are_the_papers_ablations(
    name: str, method: str, setting: str, values: list[float]
) -> None:
    recipe = recipes.get(f"{method}/imagenet-r50-300")
    found, words = ablation(name, recipe.config)
    assert found == setting
    assert [float(word) for word in words] == values
    jobs = plan("builtin", recipe=recipe.name, preset=name)
    assert [float(job.varied[setting]) for job in jobs] == values
    rows = [v.changes for v in recipe.variants if v.what.startswith("Table")]
    ablated = {c[0].partition("=")[2] for c in rows if c[0].startswith(setting) and len(c) == 1}
    assert ablated
    assert ablated <= set(words)


def test_without_a_recipe_runs_are_told_apart_as_the_folders_settings_have_them(
    tmp_path: Path,
) -> None:
    """Which are SGD's, whatever the defaults of all settings are."""
    vary = ["optim.trust_coefficient=0.001,0.01"]
    assert len(plan("builtin", vary=vary)) == 2
    with pytest.raises(
        ValueError, match=r"two runs are the same: .*optim\.trust_coefficient: optim\.name is"
    ):
        sweep("builtin", tmp_path / "sweep", vary=vary, display=silent())
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"vary": ["bottleneck.beta"]}, "NAME=VALUE"),
        ({"vary": ["bottleneck.beta=1,"]}, "NAME=VALUE"),
        ({"vary": ["bottleneck.beta=1,x"]}, "bottleneck.beta must be a number, got 'x'"),
        ({"vary": ["bottleneck.betta=1"]}, "betta"),
        ({"vary": ["bottleneck.beta=1,1.0"]}, "beta1-seed0 and beta1.0-seed0"),
        ({"vary": ["bottleneck.beta=1", "bottleneck.beta=2"]}, "varied twice"),
        ({"vary": ["bottleneck.beta=1"], "preset": "beta"}, "by --preset beta and by --vary"),
        ({"vary": ["bottleneck.beta=1"], "changes": ["bottleneck.beta=2"]}, "given once"),
        ({"vary": ["seed=1,2"]}, "--seeds"),
        ({"changes": ["seed=1"]}, "seed must be given once"),
        ({"seeds": "0,0"}, "two runs are the same"),
        ({"seeds": "a"}, "whole numbers"),
        ({"seeds": "-1"}, "seed must be"),
        ({"preset": "gamma"}, "one of beta, kappa-e, kappa-b, crop-area, loss-weight"),
        (
            {"preset": "beta", "recipe": "simclr/quickstart"},
            "bottleneck.beta, which changes nothing: only c-simclr is compressed",
        ),
        ({"preset": "loss-weight"}, "decoder.kappa_d"),
        (
            {"vary": ["method=simclr,c-simclr", "bottleneck.beta=0,1"]},
            r"methodsimclr-beta0-seed0 and methodsimclr-beta1-seed0; bottleneck\.beta: only c-",
        ),
        ({"recipe": "none"}, "no recipe 'none'"),
        ({"vary": ["data.source=builtin,photos"]}, "give images as DATA"),
        ({"changes": ["recipe=byol/quickstart"]}, "give images as DATA"),
        (
            {"vary": ["network.hidden_dim=8,9"], "changes": ["network.head_layers=1"]},
            "network.hidden_dim",
        ),
    ],
)
def test_bad_input_is_refused_before_anything_runs(given: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as error:
        plan("builtin", **given)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "given",
    [{"suite": "all"}, {"tasks": "knn,knm"}, {"tasks": "knn,"}, {"max_images": -1}, {"at_once": 0}],
)
def test_bad_tasks_are_refused_before_anything_runs(given: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must be|takes some of"):
        sweep("builtin", tmp_path / "a", **given)
    assert not (tmp_path / "a").exists()


def test_images_that_are_not_there_are_missed_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        sweep(str(tmp_path / "nowhere"), tmp_path / "a", suite="none", display=silent())
    assert not (tmp_path / "a").exists()


def when(condition: Callable[[], bool], act: Callable[[], None]) -> threading.Thread:
    """Do something as soon as something is so."""

    def look() -> None:
        until = time.monotonic() + 60
        while not condition() and time.monotonic() < until:
            time.sleep(0.01)
        act()

    thread = threading.Thread(target=look)
    thread.start()
    return thread


def content(out: Path) -> dict[str, Any]:
    return json.loads((out / "sweep.json").read_text())


def times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


def test_a_failed_run_does_not_end_a_sweep_and_a_finished_one_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real one of two runs; the network of the second does not exist."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = tmp_path / "sweep"

    def again(networks: str, tasks: str = "knn") -> tuple[Summary, list[str]]:
        display = Written()
        summary = sweep(
            str(sorted_photos()),
            out,
            recipe="c-simclr/quickstart",
            vary=[f"network.name={networks}"],
            changes=[change for change in CHANGES if not change.startswith("network.name")],
            tasks=tasks,
            at_once=2,
            display=display,
        )
        return summary, display.said

    good, bad = "nametest_resnet-seed0", "nameno_such_network-seed0"
    summary, said = again("no_such_network,test_resnet")
    assert not summary.interrupted
    assert content(out)["runs"] == {good: "done", bad: "failed"}
    assert last(out / good)["step"] == 2
    assert summary.failed == [out / "logs" / f"{bad}.log"]
    (text,) = [text for text in said if "failed," in text]
    assert "pretrain ended with 2: error: timm has no network 'no_such_network'" in text
    assert [(row.setting, row.done, row.of) for row in summary.rows] == [
        ("name no_such_network", 0, 1),
        ("name test_resnet", 1, 1),
    ]
    judged = json.loads((out / good / "evaluation" / "results.json").read_text())["records"]
    (neighbors,) = [r["value"] for r in judged if r["task"] == "kNN 20"]
    nats = [line for line in journal(out / good) if "reducible_residual" in line][-1]
    (*_, held) = [line for line in journal(out / good) if "probe_accuracy" in line]
    found = {"held-out probe": held["probe_accuracy"], "held-out kNN": held["knn_accuracy"]}
    found["kNN"] = neighbors
    found |= {"reducible_residual": nats["reducible_residual"], "predictive": nats["predictive"]}
    found = {name: Spread(value, None, 1) for name, value in found.items()}
    assert summary.rows[1].figures == found
    assert [row.failed for row in summary.rows] == [{"failed": 1}, {}]
    assert content(out)["table"][1]["figures"]["kNN"] == {"mean": neighbors, "std": None, "n": 1}

    before = times(out / good)
    summary, said = again("test_resnet")
    assert said == [f"1 of 1: {good} was done before"]
    assert times(out / good) == before
    assert summary.rows[0].figures == found
    assert not summary.failed

    with pytest.raises(ValueError, match="holds a sweep with tasks 'knn', not 'logistic'"):
        again("test_resnet", tasks="logistic")


# Takes our commands as `python -m compressive` does, within a blink. Its training waits to be
# asked to stop the first time, and goes on to the end the second time.
STAND_IN = """
import json, os, pathlib, signal, sys, time
out = pathlib.Path(sys.argv[-1])
asked = []
signal.signal(signal.SIGINT, lambda *_: asked.append(1))
print(sys.argv[3], "in group", os.getpgrp())
if sys.argv[3] == "evaluate":
    (out / "evaluation").mkdir()
    (out / "evaluation" / "results.json").write_text(RESULTS)
elif "beta0-" not in out.name and not (out / "asked").exists():
    out.mkdir()
    (out / "ready").touch()
    until = time.monotonic() + 60
    while time.monotonic() < until and (DEAF or not asked):
        time.sleep(0.01)
    time.sleep(0.2)
    (out / "asked").write_text(str(len(asked)))
    sys.exit(130)
else:
    out.mkdir(exist_ok=True)
"""


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, *, deaf: bool = False) -> None:
    path = folder / "stand_in"
    results = results_text([record("logistic", "d", "top-1", 0.5)], about={"data": "d"})
    text = STAND_IN.replace("DEAF", str(deaf)).replace("RESULTS", repr(results))
    path.write_text(f"#!{sys.executable} -SE\n{text}")
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interrupted_sweep_goes_on_without_repeating(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    stand_in(tmp_path, monkeypatch)
    out, heard = tmp_path / "sweep", signal.getsignal(number)
    first, second, third = (f"beta{beta}-seed0" for beta in (0, 1, 2))
    vary = ["bottleneck.beta=0,1,2"]
    thread = when((out / second / "ready").exists, lambda: os.kill(os.getpid(), number))
    display = Written()
    summary = sweep("builtin", out, vary=vary, display=display)
    thread.join()
    assert summary.interrupted
    assert not summary.failed
    assert "the same command goes on" in display.said[-1]
    assert content(out)["runs"] == {first: "done", second: "stopped"}
    assert [row.done for row in summary.rows] == [1, 0, 0]
    assert (out / second / "asked").read_text() == "1"  # once, or it would not save
    assert f"in group {os.getpgrp()}\n" not in (out / "logs" / f"{second}.log").read_text()
    assert signal.getsignal(number) == heard

    log = out / "logs" / f"{first}.log"
    before = times(out / first) | {log: log.stat().st_mtime_ns}
    (out / third).mkdir()
    (out / third / "asked").touch()
    summary = sweep("builtin", out, vary=vary, display=silent())
    assert not summary.interrupted
    assert content(out)["runs"] == dict.fromkeys((first, second, third), "done")
    assert [row.figures["logistic"].mean for row in summary.rows] == [0.5, 0.5, 0.5]
    assert before.items() <= times(out).items()


def test_a_run_that_does_not_listen_is_ended_by_the_third_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, deaf=True)
    out = tmp_path / "sweep"

    def ask() -> None:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)  # signals that come together are heard as one

    thread = when((out / "beta1-seed0" / "ready").exists, ask)
    summary = sweep("builtin", out, vary=["bottleneck.beta=1,2"], display=silent())
    thread.join()
    assert summary.interrupted
    assert content(out)["runs"] == {"beta1-seed0": "stopped"}
    assert not (out / "beta1-seed0" / "asked").exists()


def test_a_sweep_without_a_suite_trains_and_opens_no_test_image(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runs are told apart by labels held out of train; the collapsed one by its end."""
    program = tmp_path / "stand_in"
    program.write_text(
        f"#!{sys.executable} -SE\n"
        "import json, pathlib, sys\n"
        "assert sys.argv[3] == 'pretrain', sys.argv\n"
        "out = pathlib.Path(sys.argv[-1])\n"
        "out.mkdir()\n"
        "held = float(out.name.removeprefix('beta').removesuffix('-seed0'))\n"
        "lines = [{'step': 1, 'probe_accuracy': 0.2}, {'step': 2, 'probe_accuracy': held}]\n"
        "version = json.dumps({'format_version': 2})\n"
        "(out / 'config.json').write_text(version)\n"
        "text = '\\n'.join([version, *map(json.dumps, lines)])\n"
        "(out / 'metrics.jsonl').write_text(text)\n"
        "(out / 'encoder.safetensors').touch()\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    given: dict[str, Any] = {"vary": ["bottleneck.beta=0.5,0.75"], "suite": "none"}
    summary = sweep("builtin", tmp_path / "a", **given, display=silent())
    assert not summary.failed
    assert [row.figures for row in summary.rows] == [
        {"held-out probe": Spread(0.5, None, 1)},
        {"held-out probe": Spread(0.75, None, 1)},
    ]
    display = Written()
    sweep("builtin", tmp_path / "a", **given, display=display)
    assert all("was done before" in text for text in display.said)
    with pytest.raises(ValueError, match="--suite none measures nothing: leave out --tasks"):
        sweep("builtin", tmp_path / "b", tasks="knn", **given)


def test_a_sweep_by_held_out_images_says_so_to_every_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "stand_in"
    program.write_text(
        f"#!{sys.executable} -SE\n"
        "import pathlib, sys\n"
        "out = pathlib.Path(sys.argv[sys.argv.index('--out') + 1])\n"
        "out.mkdir()\n"
        "name = 'config.json' if sys.argv[3] == 'pretrain' else 'results.json'\n"
        f"(out / name).write_text({results_text([])!r})\n"
        "(out / 'words').write_text(' '.join(sys.argv[3:]))\n"
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    for held_out in (True, False):
        out = tmp_path / str(held_out)
        sweep("builtin", out, held_out=held_out, display=silent())
        kind = "held-out" if held_out else "evaluation"
        words = (out / "seed0" / kind / "words").read_text().split()
        assert words[0] == "evaluate"
        assert ("--held-out" in words) == held_out
        with pytest.raises(ValueError, match=f"holds a sweep with held_out {held_out}, not"):
            sweep("builtin", out, held_out=not held_out, display=silent())
    with pytest.raises(ValueError, match="--suite none measures nothing: leave out --tasks"):
        sweep("builtin", tmp_path / "b", suite="none", held_out=True, display=silent())


def test_two_sweeps_in_one_folder_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "false")  # nothing is trained if it is not refused
    held = acquire_lock(tmp_path / "a")
    try:
        with pytest.raises(ValueError, match="another process is writing to"):
            sweep("builtin", tmp_path / "a", display=silent())
    finally:
        os.close(held)
    assert not list((tmp_path / "a").iterdir())


def test_the_state_reaches_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power cut may leave an empty sweep.json in the place of the old one."""
    calls: list[str] = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)

        def noted(*given: Any, name: str = name, real: Any = real) -> Any:
            calls.append(name)
            return real(*given)

        monkeypatch.setattr(os, name, noted)
    about = {"suite": "none", "held_out": False}
    _State(tmp_path / "sweep", about, plan("builtin")).write()
    assert calls[:2] == ["fsync", "replace"]
    assert content(tmp_path / "sweep")["about"] == about
    assert [path.name for path in (tmp_path / "sweep").iterdir()] == ["sweep.json"]


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(ValueError, match="is not empty and holds no sweep"):
        sweep("builtin", tmp_path, display=silent())
    (tmp_path / "sweep.json").write_text("{")
    with pytest.raises(ValueError, match=r"sweep\.json is damaged"):
        sweep("builtin", tmp_path, display=silent())
    assert (tmp_path / "letter.txt").read_text() == "dear"


def evaluated(
    run: Path, scores: dict[tuple[str, str], float], reducible_residual: list[Any]
) -> Path:
    """What a finished run leaves behind, as far as a sweep reads it."""
    (run / "evaluation").mkdir(parents=True)
    records = [record(task, "set", metric, value) for (task, metric), value in scores.items()]
    other = record("logistic", "another", "top-1", 0.0)
    whole = results_text([other, *records], about={"data": "set"})
    (run / "evaluation" / "results.json").write_text(whole)
    lines = [{"step": i, "reducible_residual": value} for i, value in enumerate(reducible_residual)]
    (run / "metrics.jsonl").write_text(metrics_text(lines) + '{"step": 9, "movab')
    return run


COLUMNS = {  # of the table: what it is in an evaluation
    "linear": ("linear", "top-1"),
    "logistic": ("logistic", "top-1"),
    "1 % labels": ("few labels 1%", "top-1"),
    "kNN": ("kNN 20", "top-1"),
    "corruptions": ("corruptions", "top-1"),
    "Brier": ("linear", "brier"),
    "predictive": ("information", "predictive"),
}


def finished(out: Path, vary: str, runs: dict[str, str], seeds: str) -> Summary:
    """A sweep whose runs are all there already starts no process."""
    about = {"data": "builtin", "recipe": "", "set": [], "varied": ["bottleneck.beta"]}
    about |= {"suite": "quick", "tasks": "", "max_images": 0}
    (out / "sweep.json").write_text(json.dumps({"about": about, "runs": runs}))
    return sweep("builtin", out, seeds=seeds, vary=[vary], display=silent())


def test_figures_over_seeds_are_numpys(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    values, nats = random.random((3, len(COLUMNS))), random.random(3) * 5
    jobs = plan("builtin", seeds="0,1,2", vary=["bottleneck.beta=0.5"])
    for job, row, nat in zip(jobs, values, nats, strict=True):
        each = dict(zip(COLUMNS, row.tolist(), strict=True))
        scores = {COLUMNS[name]: value for name, value in each.items()}
        run = evaluated(tmp_path / job.name, scores, [500.0, float(nat), None])
        assert figures(run) == {**each, "reducible_residual": float(nat)}  # the evaluation has none
    runs = {job.name: "done" for job in jobs}
    summary = finished(tmp_path, "bottleneck.beta=0.5", runs, "0,1,2")
    (row,) = summary.rows
    assert (row.done, row.of, row.varied) == (3, 3, {"bottleneck.beta": "0.5"})
    columns = {**dict(zip(COLUMNS, values.T, strict=True)), "reducible_residual": nats}
    assert set(row.figures) == set(columns)
    for name, each in columns.items():
        spread = row.figures[name]
        assert math.isclose(spread.mean, np.mean(each), rel_tol=1e-12)
        assert spread.std is not None
        assert math.isclose(spread.std, np.std(each, ddof=1), rel_tol=1e-12)
        assert spread.n == 3
    text = shown(summary)
    assert f"{100 * np.mean(values[:, 0]):.1f} ± {100 * np.std(values[:, 0], ddof=1):.1f}" in text
    assert f"{np.mean(nats):.2f} ± {np.std(nats, ddof=1):.2f}" in text
    assert "Brier" not in text  # there is no room: it is in the report


def test_figures_of_held_out_images_stay_when_test_images_are_looked_at(tmp_path: Path) -> None:
    """`evaluate` of the best run of a sweep must not change what it was chosen by."""
    run = evaluated(tmp_path / "a", {("kNN 20", "top-1"): 0.5}, [])
    (run / "evaluation").rename(run / "held-out")
    assert figures(run) == figures(run, held_out=True) == {"kNN": 0.5}
    (run / "evaluation").mkdir()
    text = (run / "held-out" / "results.json").read_text().replace("0.5", "0.75")
    (run / "evaluation" / "results.json").write_text(text)
    assert (figures(run), figures(run, held_out=True)) == ({"kNN": 0.75}, {"kNN": 0.5})
    page = write_report([run], tmp_path / "report.html", held_out=True).read_text()
    assert "50.0" in page
    assert "75.0" not in page


def test_measured_nats_come_before_those_of_training(tmp_path: Path) -> None:
    run = evaluated(tmp_path / "a", {("information", "reducible_residual"): 1.25}, [2.0, 3.0])
    assert figures(run) == {"reducible_residual": 1.25}


def shown(summary: Summary) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(summary_table(summary))
    return console.export_text()


def test_the_table_says_what_is_missing_and_has_no_empty_column(tmp_path: Path) -> None:
    lines = [
        SweepRow("beta 0", {"bottleneck.beta": "0"}, 1, 3, {"kNN": Spread(0.5, None, 1)}, {}),
        SweepRow("beta 1", {"bottleneck.beta": "1"}, 0, 3, {}, {}),
    ]
    text = shown(Summary(tmp_path, lines, [], False))
    assert "setting seeds kNN" in " ".join(text.split())
    assert "1 of 3" in text
    assert "0 of 3" in text
    assert "50.0" in text
    assert "±" not in text
    assert "kNN" in text
    assert "linear" not in text


def test_the_table_says_how_a_run_failed(tmp_path: Path) -> None:
    """One whose directions fell together, one that was never begun, and one among others."""
    for name in ("beta2-seed0", "beta2-seed1"):
        evaluated(tmp_path / name, {("kNN 20", "top-1"): 0.5}, [1.0])
    for name, health in (("beta1-seed0", "collapse: spread 0.08"), ("beta2-seed2", "nan: loss")):
        (tmp_path / name).mkdir()
        line = {"step": 63, "reducible_residual": 0.02, "health": health}
        (tmp_path / name / "metrics.jsonl").write_text(metrics_text([line]))
    summary = Summary(
        tmp_path,
        rows(
            tmp_path,
            [
                *plan("builtin", vary=["bottleneck.beta=1,3"]),
                *plan("builtin", vary=["bottleneck.beta=2"], seeds="0,1,2"),
            ],
            done={"beta2-seed0", "beta2-seed1"},
            failed={"beta1-seed0", "beta3-seed0", "beta2-seed2"},
        ),
        [],
        False,
    )
    assert [row.failed for row in summary.rows] == [
        {"collapsed": 1},
        {"failed": 1},
        {"diverged": 1},
    ]
    lines = shown(summary).splitlines()
    for setting, words in (("1", "collapsed"), ("3", "failed"), ("2", "2 of 3, 1 diverged")):
        (line,) = [line for line in lines if f"beta {setting} " in line]
        assert words in line
        assert (" of " in line) == (setting == "2")  # of one run it is enough to say how it ended
    assert "0.02" not in "".join(lines)  # what a collapsed run kept is no result


def test_it_is_imported_without_torch() -> None:
    code = (
        "import compressive.sweep, sys; sys.exit('torch' in sys.modules or 'timm' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_more_seeds_may_be_given_later() -> None:
    """Names do not depend on how many others there are, nor does what they stand for."""
    few, many = plan("builtin", seeds="0"), plan("builtin", seeds="0,1")
    assert few[0] == many[0]
    assert override(Config(), *many[1].changes).seed == 1


@pytest.mark.parametrize("held_out", [False, True])
def test_the_report_of_a_sweep_judges_by_the_images_that_it_was_asked_for(
    held_out: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of a sweep by held-out images may have been evaluated on test images since."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").touch()
    asked: list[Any] = []
    monkeypatch.setattr(
        "compressive.sweep.runner.sweep", lambda *_, **more: Summary(tmp_path, [], [], False)
    )
    for name in ("evaluation.tables.verdicts", "report.page.write_report"):
        monkeypatch.setattr(
            f"compressive.{name}", lambda *_, held_out=False, **__: asked.append(held_out)
        )
    words = ["sweep", "builtin", "--vary", "bottleneck.beta=0,1", "--out", str(tmp_path)]
    found = CliRunner().invoke(app, [*words, *(["--held-out"] if held_out else [])])
    assert found.exit_code == 0, found.output
    assert asked == [held_out, held_out]


def test_what_a_kill_left_of_the_first_write_is_no_foreign_folder(tmp_path: Path) -> None:
    (tmp_path / ".sweep.json.7.partial").write_text("{")
    assert _State(tmp_path, {}, []).runs == {}

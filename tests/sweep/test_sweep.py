"""Sweeps: plans are products, a failed run stops no other, finished runs are skipped."""

import io
import json
import math
import os
import re
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
import torch
from rich.console import Console
from run_files import metrics_text, record, results_text
from tiny import CHANGES, Written, journal, last, silent, sorted_photos
from typer.testing import CliRunner

from compressive import recipes
from compressive.cli.app import app
from compressive.config import Config, override
from compressive.metric_info import ONE_SEED
from compressive.progress import Display
from compressive.reporting import write_report
from compressive.reporting.summary import Spread
from compressive.rundir.folder import write_config
from compressive.rundir.lock import acquire_lock
from compressive.sweep.packing import Packing
from compressive.sweep.plan import PlannedRun, plan_runs, preset_axis
from compressive.sweep.processes import Processes
from compressive.sweep.runner import SweepFile, SweepResult, SweepRuns, sweep
from compressive.sweep.table import SweepRow, legend, run_figures, sweep_rows, sweep_table


def test_plan_is_the_product_of_values_and_seeds() -> None:
    vary = ["bottleneck.beta=0,0.1", "bottleneck.kappa_b=1,3,10"]
    jobs = plan_runs("builtin", recipe="c-simclr/quickstart", vary=vary, seeds="0,7")
    expected = [
        f"beta{beta}-kappa_b{kappa}-seed{seed}"
        for beta in ("0", "0.1")
        for kappa in ("1", "3", "10")
        for seed in (0, 7)
    ]
    assert [job.name for job in jobs] == expected
    assert jobs[-1] == PlannedRun(
        name="beta0.1-kappa_b10-seed7",
        label="beta 0.1, kappa_b 10",
        varied={"bottleneck.beta": "0.1", "bottleneck.kappa_b": "10"},
        seed=7,
        device="auto",
    )
    assert jobs[-1].changes == ["bottleneck.beta=0.1", "bottleneck.kappa_b=10", "seed=7"]


def test_run_names_are_distinct_and_valid_folder_names() -> None:
    jobs = plan_runs("builtin", vary=["network.name=a/b", "optim.name=sgd,adamw"])
    assert [job.name for job in jobs] == [
        "network.namea_b-optim.namesgd-seed0",
        "network.namea_b-optim.nameadamw-seed0",
    ]
    assert [job.name for job in plan_runs("builtin", seeds="3")] == ["seed3"]


def test_run_is_evaluated_on_its_training_device() -> None:
    assert plan_runs("builtin", changes=["train.device=cpu"])[0].device == "cpu"
    assert [j.device for j in plan_runs("builtin", vary=["train.device=cpu,cuda:1"])] == [
        "cpu",
        "cuda:1",
    ]


PAPER_ABLATIONS = [  # Tables 5, 14, 11, 12, 13, 15, 7 and 8; the paper's loss weight is kappa_d/2
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


@pytest.mark.slow
@pytest.mark.parametrize(("name", "method", "setting", "values"), PAPER_ABLATIONS)
def test_presets_match_the_ablations_of_the_paper(
    name: str, method: str, setting: str, values: list[float]
) -> None:
    recipe = recipes.get(f"{method}/imagenet-r50-300")
    found, texts = preset_axis(name, recipe.config)
    assert found == setting
    assert [float(text) for text in texts] == values
    jobs = plan_runs("builtin", recipe=recipe.name, preset=name)
    assert [float(job.varied[setting]) for job in jobs] == values
    rows = [v.changes for v in recipe.variants if v.what.startswith("Table")]
    ablated = {c[0].partition("=")[2] for c in rows if c[0].startswith(setting) and len(c) == 1}
    assert ablated
    assert ablated <= set(texts)


@pytest.mark.slow
def test_duplicate_runs_are_detected_after_automatic_settings(
    tmp_path: Path,
) -> None:
    """Automatic settings use SGD, while the default optimizer is LARS."""
    vary = ["optim.trust_coefficient=0.001,0.01"]
    assert len(plan_runs("builtin", vary=vary)) == 2
    with pytest.raises(
        ValueError, match=r"0\.001-seed0 and .*optim\.trust_coefficient: optim\.name is sgd"
    ):
        sweep("builtin", tmp_path / "sweep", vary=vary, display=silent())
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"vary": ["bottleneck.beta"]}, "--vary.*'bottleneck.beta'"),
        ({"vary": ["bottleneck.beta=1,"]}, "--vary.*'bottleneck.beta=1,'"),
        ({"vary": ["bottleneck.beta=1,x"]}, r"^bottleneck\.beta.*'x'"),
        ({"vary": ["bottleneck.betta=1"]}, r"'bottleneck\.betta'.*bottleneck\.beta\?"),
        ({"vary": ["bottleneck.beta=1,1.0"]}, "beta1-seed0 and beta1.0-seed0"),
        ({"vary": ["bottleneck.beta=1", "bottleneck.beta=2"]}, "twice.*--vary"),
        ({"vary": ["bottleneck.beta=1"], "preset": "beta"}, r"bottleneck\.beta.*--preset beta"),
        (
            {"vary": ["bottleneck.beta=1"], "changes": ["bottleneck.beta=2"]},
            r"^bottleneck\.beta.*--set",
        ),
        ({"vary": ["seed=1,2"]}, "'seed=1,2'.*--seeds"),
        ({"changes": ["seed=1"]}, "^seed.*--set"),
        ({"seeds": "0,0"}, "seed0 and seed0"),
        ({"seeds": "a"}, "--seeds.*'a'"),
        ({"seeds": "-1"}, "^seed.*-1"),
        ({"preset": "gamma"}, "beta, kappa-e, kappa-b, crop-area, loss-weight.*'gamma'"),
        ({"preset": "beta", "recipe": "simclr/quickstart"}, r"bottleneck\.beta.*c-simclr"),
        ({"preset": "loss-weight"}, r"decoder\.kappa_d.*c-simclr"),
        (
            {"vary": ["method=simclr,c-simclr", "bottleneck.beta=0,1"]},
            r"methodsimclr-beta0-seed0 and methodsimclr-beta1-seed0; bottleneck\.beta: .*c-simclr",
        ),
        ({"recipe": "none"}, "'none'"),
        ({"vary": ["data.source=builtin,photos"]}, r"data\.source.*'photos'.*DATA"),
        ({"changes": ["recipe=byol/quickstart"]}, "recipe.*'byol/quickstart'.*--recipe"),
        (
            {"vary": ["network.hidden_dim=8,9"], "changes": ["network.head_layers=1"]},
            r"network\.hidden_dim.*network\.head_layers is 1",
        ),
    ],
)
def test_invalid_plan_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        plan_runs("builtin", **given)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"suite": "all"}, "suite.*'all'"),
        ({"tasks": "knn,knm"}, "--tasks.*'knm'"),
        ({"tasks": "knn,"}, "--tasks.*''"),
        ({"max_images": -1}, "--max-images.*-1"),
        ({"at_once": 0}, "--at-once.*0"),
        ({"at_once": "many"}, "--at-once.*auto.*many"),
    ],
)
def test_invalid_options_are_refused_before_any_run(
    given: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        sweep("builtin", tmp_path / "a", **given)
    assert not (tmp_path / "a").exists()


def test_missing_images_are_reported_before_any_run(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        sweep(str(tmp_path / "nowhere"), tmp_path / "a", suite="none", display=silent())
    assert not (tmp_path / "a").exists()


def run_when(condition: Callable[[], bool], act: Callable[[], None]) -> threading.Thread:
    """Call `act` in a thread as soon as the condition holds."""

    def wait() -> None:
        until = time.monotonic() + 60
        while not condition() and time.monotonic() < until:
            time.sleep(0.01)
        act()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def content(out: Path) -> dict[str, Any]:
    return json.loads((out / "sweep.json").read_text())


def times(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_failed_run_stops_no_other_and_finished_runs_are_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Start two real runs; the network of one does not exist."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    out = tmp_path / "sweep"

    def run_sweep(networks: str, tasks: str = "knn") -> tuple[SweepResult, list[str]]:
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
    summary, messages = run_sweep("no_such_network,test_resnet")
    assert not summary.interrupted
    assert content(out)["runs"] == {good: "done", bad: "failed"}
    assert last(out / good)["step"] == 2
    assert summary.failed == [out / "logs" / f"{bad}.log"]
    (text,) = [text for text in messages if "failed," in text]
    assert re.search("pretrain .* 2: .*'no_such_network'", text)
    assert [(row.setting, row.done, row.of) for row in summary.rows] == [
        ("name no_such_network", 0, 1),
        ("name test_resnet", 1, 1),
    ]
    records = json.loads((out / good / "evaluation" / "results.json").read_text())["records"]
    (neighbors,) = [r["value"] for r in records if r["task"] == "kNN 20"]
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
    summary, messages = run_sweep("test_resnet")
    assert len(messages) == 1
    assert re.search(f"1 of 1: {good} .*done", messages[0])
    assert times(out / good) == before
    assert summary.rows[0].figures == found
    assert not summary.failed

    with pytest.raises(ValueError, match="tasks 'knn', not 'logistic'"):
        run_sweep("test_resnet", tasks="logistic")


# Replaces `python -m compressive`. Training waits for a signal in the first run and finishes in the
# second.
FAKE_PROGRAM = """
import json, os, pathlib, signal, sys, time
out = pathlib.Path(sys.argv[-1])
received = []
signal.signal(signal.SIGINT, lambda *_: received.append(1))
print(sys.argv[1], "in group", os.getpgrp())
if sys.argv[1] == "evaluate":
    (out / "evaluation").mkdir()
    (out / "evaluation" / "results.json").write_text(RESULTS)
elif "beta0-" not in out.name and not (out / "interrupts").exists():
    out.mkdir()
    (out / "ready").touch()
    until = time.monotonic() + 60
    while time.monotonic() < until and (IGNORE_SIGNALS or not received):
        time.sleep(0.01)
    time.sleep(0.2)
    (out / "interrupts").write_text(str(len(received)))
    sys.exit(130)
else:
    out.mkdir(exist_ok=True)
"""


def program(folder: Path, source: str) -> list[str]:
    """Return a command that runs this source in place of `python -m compressive`."""
    results = results_text([record("logistic", "d", "top-1", 0.5)], about={"data": "d"})
    path = folder / "program.py"
    path.write_text(source.replace("RESULTS", repr(results)))
    return [sys.executable, "-SE", str(path)]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted_sweep_resumes_and_skips_finished_runs(
    tmp_path: Path, number: signal.Signals
) -> None:
    fake = program(tmp_path, FAKE_PROGRAM.replace("IGNORE_SIGNALS", "False"))
    out, handler = tmp_path / "sweep", signal.getsignal(number)
    first, second, third = (f"beta{beta}-seed0" for beta in (0, 1, 2))
    vary = ["bottleneck.beta=0,1,2"]
    thread = run_when((out / second / "ready").exists, lambda: os.kill(os.getpid(), number))
    display = Written()
    summary = sweep("builtin", out, vary=vary, display=display, program=fake)
    thread.join()
    assert summary.interrupted
    assert not summary.failed
    assert "resume" in display.said[-1]
    assert content(out)["runs"] == {first: "done", second: "stopped"}
    assert [row.done for row in summary.rows] == [1, 0, 0]
    assert (out / second / "interrupts").read_text() == "1"  # a second signal would prevent saving
    assert f"in group {os.getpgrp()}\n" not in (out / "logs" / f"{second}.log").read_text()
    assert signal.getsignal(number) == handler

    log = out / "logs" / f"{first}.log"
    before = times(out / first) | {log: log.stat().st_mtime_ns}
    (out / third).mkdir()
    (out / third / "interrupts").touch()
    summary = sweep("builtin", out, vary=vary, display=silent(), program=fake)
    assert not summary.interrupted
    assert content(out)["runs"] == dict.fromkeys((first, second, third), "done")
    assert [row.figures["logistic"].mean for row in summary.rows] == [0.5, 0.5, 0.5]
    assert before.items() <= times(out).items()


@pytest.mark.slow
def test_third_interrupt_kills_a_run_that_ignores_signals(tmp_path: Path) -> None:
    fake = program(tmp_path, FAKE_PROGRAM.replace("IGNORE_SIGNALS", "True"))
    out = tmp_path / "sweep"

    def interrupt() -> None:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)  # simultaneous signals are delivered as one

    thread = run_when((out / "beta1-seed0" / "ready").exists, interrupt)
    vary = ["bottleneck.beta=1,2"]
    summary = sweep("builtin", out, vary=vary, display=silent(), program=fake)
    thread.join()
    assert summary.interrupted
    assert content(out)["runs"] == {"beta1-seed0": "stopped"}
    assert not (out / "beta1-seed0" / "interrupts").exists()


@pytest.mark.slow
def test_suite_none_only_trains(tmp_path: Path) -> None:
    """Runs are compared by held-out accuracy on the training split."""
    fake = program(
        tmp_path,
        "import json, pathlib, sys\n"
        "assert sys.argv[1] == 'pretrain', sys.argv\n"
        "out = pathlib.Path(sys.argv[-1])\n"
        "out.mkdir()\n"
        "held = float(out.name.removeprefix('beta').removesuffix('-seed0'))\n"
        "lines = [{'format_version': 2}, {'step': 1, 'probe_accuracy': 0.2}]\n"
        "lines += [{'step': 2, 'probe_accuracy': held}]\n"
        "(out / 'config.json').write_text(json.dumps({'format_version': 2}))\n"
        "(out / 'metrics.jsonl').write_text('\\n'.join(map(json.dumps, lines)))\n"
        "(out / 'encoder.safetensors').touch()\n",
    )
    given: dict[str, Any] = {"vary": ["bottleneck.beta=0.5,0.75"], "suite": "none"}
    given["program"] = fake
    summary = sweep("builtin", tmp_path / "a", **given, display=silent())
    assert not summary.failed
    assert [row.figures for row in summary.rows] == [
        {"held-out probe": Spread(0.5, None, 1)},
        {"held-out probe": Spread(0.75, None, 1)},
    ]
    display = Written()
    sweep("builtin", tmp_path / "a", **given, display=display)
    assert all("already done" in text for text in display.said)
    with pytest.raises(ValueError, match=r"--suite none.*--held-out"):
        sweep("builtin", tmp_path / "b", tasks="knn", **given)


@pytest.mark.slow
def test_held_out_option_is_passed_to_every_evaluation(tmp_path: Path) -> None:
    fake = program(
        tmp_path,
        "import pathlib, sys\n"
        "out = pathlib.Path(sys.argv[sys.argv.index('--out') + 1])\n"
        "out.mkdir()\n"
        "name = 'config.json' if sys.argv[1] == 'pretrain' else 'results.json'\n"
        "(out / name).write_text('{\"format_version\": 2}')\n"
        "(out / 'args').write_text(' '.join(sys.argv[1:]))\n",
    )
    for held_out in (True, False):
        out = tmp_path / str(held_out)
        sweep("builtin", out, held_out=held_out, display=silent(), program=fake)
        kind = "held-out" if held_out else "evaluation"
        args = (out / "seed0" / kind / "args").read_text().split()
        assert args[0] == "evaluate"
        assert ("--held-out" in args) == held_out
        with pytest.raises(ValueError, match=f"held_out {held_out}, not"):
            sweep("builtin", out, held_out=not held_out, display=silent())
    with pytest.raises(ValueError, match=r"--suite none.*--held-out"):
        sweep("builtin", tmp_path / "b", suite="none", held_out=True, display=silent())


@pytest.mark.slow
def test_locked_sweep_folder_is_refused(tmp_path: Path) -> None:
    held = acquire_lock(tmp_path / "a")
    try:
        with pytest.raises(ValueError, match=f"{tmp_path / 'a'}"):
            sweep("builtin", tmp_path / "a", display=silent(), program=["false"])
    finally:
        os.close(held)
    assert not list((tmp_path / "a").iterdir())


def test_sweep_json_is_synced_before_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a power cut may leave an empty sweep.json."""
    calls: list[str] = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)

        def record_call(*given: Any, name: str = name, real: Any = real) -> Any:
            calls.append(name)
            return real(*given)

        monkeypatch.setattr(os, name, record_call)
    about = {"suite": "none", "held_out": False}
    SweepFile(tmp_path / "sweep", about, plan_runs("builtin")).write()
    assert calls[:2] == ["fsync", "replace"]
    assert content(tmp_path / "sweep")["about"] == about
    assert [path.name for path in (tmp_path / "sweep").iterdir()] == ["sweep.json"]


@pytest.mark.slow
def test_folder_with_other_files_is_not_changed(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(ValueError, match=f"{tmp_path}.*--out"):
        sweep("builtin", tmp_path, display=silent())
    (tmp_path / "sweep.json").write_text("{")
    with pytest.raises(ValueError, match=r"sweep\.json is damaged"):
        sweep("builtin", tmp_path, display=silent())
    assert (tmp_path / "letter.txt").read_text() == "dear"


def write_evaluated_run(
    run: Path, scores: dict[tuple[str, str], float], reducible_residual: list[Any]
) -> Path:
    """Write the files of a finished run that a sweep reads."""
    (run / "evaluation").mkdir(parents=True)
    records = [record(task, "set", metric, value) for (task, metric), value in scores.items()]
    other = record("logistic", "another", "top-1", 0.0)
    whole = results_text([other, *records], about={"data": "set"})
    (run / "evaluation" / "results.json").write_text(whole)
    lines = [{"step": i, "reducible_residual": value} for i, value in enumerate(reducible_residual)]
    (run / "metrics.jsonl").write_text(metrics_text(lines) + '{"step": 9, "movab')
    return run


COLUMNS = {  # table column: task and metric of the evaluation
    "linear": ("linear", "top-1"),
    "logistic": ("logistic", "top-1"),
    "1 % labels": ("few labels 1%", "top-1"),
    "kNN": ("kNN 20", "top-1"),
    "corruptions": ("corruptions", "top-1"),
    "Brier": ("linear", "brier"),
    "predictive": ("information", "predictive"),
}


def sweep_of_finished_runs(out: Path, vary: str, runs: dict[str, str], seeds: str) -> SweepResult:
    """Return a sweep of finished runs, which starts no process."""
    about = {"data": "builtin", "recipe": "", "set": [], "varied": ["bottleneck.beta"]}
    about |= {"suite": "quick", "tasks": "", "max_images": 0}
    (out / "sweep.json").write_text(json.dumps({"about": about, "runs": runs}))
    return sweep("builtin", out, seeds=seeds, vary=[vary], display=silent())


def test_mean_and_deviation_over_seeds_match_numpy(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    values, nats = random.random((3, len(COLUMNS))), random.random(3) * 5
    jobs = plan_runs("builtin", seeds="0,1,2", vary=["bottleneck.beta=0.5"])
    for job, row, nat in zip(jobs, values, nats, strict=True):
        each = dict(zip(COLUMNS, row.tolist(), strict=True))
        scores = {COLUMNS[name]: value for name, value in each.items()}
        run = write_evaluated_run(tmp_path / job.name, scores, [500.0, float(nat), None])
        # The evaluation has no residual, so the training value is used.
        assert run_figures(run) == {**each, "reducible_residual": float(nat)}
    runs = {job.name: "done" for job in jobs}
    summary = sweep_of_finished_runs(tmp_path, "bottleneck.beta=0.5", runs, "0,1,2")
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
    text = printed_table(summary)
    assert f"{100 * np.mean(values[:, 0]):.1f} ± {100 * np.std(values[:, 0], ddof=1):.1f}" in text
    assert f"{np.mean(nats):.2f} ± {np.std(nats, ddof=1):.2f}" in text
    assert "Brier" not in text  # no space in the table; the report has it


def test_evaluating_test_images_keeps_held_out_metrics(tmp_path: Path) -> None:
    """Evaluating the best run on test images must not change the metrics used for tuning."""
    run = write_evaluated_run(tmp_path / "a", {("kNN 20", "top-1"): 0.5}, [])
    (run / "evaluation").rename(run / "held-out")
    assert run_figures(run) == run_figures(run, held_out=True) == {"kNN": 0.5}
    (run / "evaluation").mkdir()
    text = (run / "held-out" / "results.json").read_text().replace("0.5", "0.75")
    (run / "evaluation" / "results.json").write_text(text)
    assert (run_figures(run), run_figures(run, held_out=True)) == ({"kNN": 0.75}, {"kNN": 0.5})
    page = write_report([run], tmp_path / "report.html", held_out=True).read_text()
    assert "50.0" in page
    assert "75.0" not in page


def test_evaluated_residual_replaces_the_training_value(tmp_path: Path) -> None:
    run = write_evaluated_run(
        tmp_path / "a", {("information", "reducible_residual"): 1.25}, [2.0, 3.0]
    )
    assert run_figures(run) == {"reducible_residual": 1.25}


def printed_table(summary: SweepResult) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(sweep_table("a sweep", summary.rows))
    return console.export_text()


def test_table_counts_missing_seeds_and_omits_empty_columns(tmp_path: Path) -> None:
    lines = [
        SweepRow("beta 0", {"bottleneck.beta": "0"}, 1, 3, {"kNN": Spread(0.5, None, 1)}, {}),
        SweepRow("beta 1", {"bottleneck.beta": "1"}, 0, 3, {}, {}),
    ]
    text = printed_table(SweepResult(lines, [], False))
    assert "setting seeds kNN" in " ".join(text.split())
    assert "1 of 3" in text
    assert "0 of 3" in text
    assert "50.0" in text
    assert "±" not in text
    assert "kNN" in text
    assert "linear" not in text


def test_table_shows_how_a_run_failed(tmp_path: Path) -> None:
    """One run collapsed, one never started, and one diverged."""
    for name in ("beta2-seed0", "beta2-seed1"):
        write_evaluated_run(tmp_path / name, {("kNN 20", "top-1"): 0.5}, [1.0])
    for name, health in (("beta1-seed0", "collapse: spread 0.08"), ("beta2-seed2", "nan: loss")):
        (tmp_path / name).mkdir()
        line = json.dumps({"step": 63, "reducible_residual": 0.02, "health": health})
        (tmp_path / name / "metrics.jsonl").write_text(f'{{"format_version": 2}}\n{line}\n')
    summary = SweepResult(
        sweep_rows(
            tmp_path,
            [
                *plan_runs("builtin", vary=["bottleneck.beta=1,3"]),
                *plan_runs("builtin", vary=["bottleneck.beta=2"], seeds="0,1,2"),
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
    lines = printed_table(summary).splitlines()
    for setting, status in (("1", "collapsed"), ("3", "failed"), ("2", "2 of 3, 1 diverged")):
        (line,) = [line for line in lines if f"beta {setting} " in line]
        assert status in line
        assert (" of " in line) == (setting == "2")  # a single run needs no count
    assert "0.02" not in "".join(lines)  # the residual of a collapsed run is not a result


def test_sweep_does_not_import_torch() -> None:
    code = (
        "import compressive.sweep.runner, sys; "
        "sys.exit('torch' in sys.modules or 'timm' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_seeds_can_be_added_later() -> None:
    """Names and settings of a run do not depend on the other runs."""
    few, many = plan_runs("builtin", seeds="0"), plan_runs("builtin", seeds="0,1")
    assert few[0] == many[0]
    assert override(Config(), *many[1].changes).seed == 1


@pytest.mark.parametrize("held_out", [False, True])
def test_sweep_report_uses_the_evaluated_split(
    held_out: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of a held-out sweep may also have been evaluated on test images."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").touch()
    received: list[Any] = []
    row = SweepRow("beta 0", {}, 1, 1, {}, {})
    monkeypatch.setattr(
        "compressive.sweep.runner.sweep", lambda *_, **more: SweepResult([row], [], False)
    )

    def receive(*_: object, held_out: bool = False, **more: object) -> Path | None:
        received.append(held_out)
        return tmp_path / "report.html" if "verdicts" in more else None

    for name in ("evaluation.comparison_table.verdicts", "reporting.page.write_report"):
        monkeypatch.setattr(f"compressive.{name}", receive)
    args = ["sweep", "builtin", "--vary", "bottleneck.beta=0,1", "--out", str(tmp_path)]
    found = CliRunner().invoke(app, [*args, *(["--held-out"] if held_out else [])])
    assert found.exit_code == 0, found.output
    assert received == [held_out, held_out]


def test_stopped_sweep_without_a_finished_run_prints_no_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = SweepRow("beta 0", {}, 0, 1, {}, {})
    monkeypatch.setattr(
        "compressive.sweep.runner.sweep", lambda *_, **more: SweepResult([row], [], True)
    )
    args = ["sweep", "builtin", "--vary", "bottleneck.beta=0,1", "--out", str(tmp_path)]
    found = CliRunner().invoke(app, args)
    assert found.exit_code == 130
    assert "setting" not in found.stdout
    assert str(tmp_path) in found.stdout


def test_sweep_shows_the_progress_of_the_current_run(tmp_path: Path) -> None:
    """The title counts runs; the last line of the log and the share of training are shown."""
    runs = plan_runs("builtin", vary=["bottleneck.beta=0,1"], changes=["train.steps=8"])
    state, shown = SweepFile(tmp_path, {"held_out": False, "suite": "quick"}, runs), Shown()
    packed = Processes(Packing(1, 2))
    processes = SweepRuns(state, [], ["evaluate"], shown, ["true"], packed)
    folder = tmp_path / runs[0].name
    write_config(folder, override(Config(), "train.steps=8"), torch.device("cpu"))
    (folder / "metrics.jsonl").write_text(metrics_text([{"step": 4, "loss": 1.0}]))
    log = state.log(runs[0])
    log.parent.mkdir()
    log.write_text("$ compressive pretrain\nc-simclr epoch 1.0  50%\n\n")
    processes._started = 1
    processes._show(runs[0], "pretrain", log)
    processes._show(runs[0], "evaluate", log)
    assert [(title, done, total) for title, done, total, _ in shown.seen] == [
        ("sweep, run 1 of 2", 0.45, 2),
        ("sweep, run 1 of 2", 0.9, 2),
    ]
    assert shown.seen[0][3] == {runs[0].name: "c-simclr epoch 1.0  50%"}


class Shown(Display):
    """A display that records the progress."""

    def __init__(self) -> None:
        super().__init__(quiet=True)
        self.seen: list[tuple[Any, ...]] = []

    def progress(
        self, title: str, done: float, total: float, readings: Any = None, **_: Any
    ) -> None:
        self.seen.append((title, done, total, readings))


def test_legend_warns_about_single_seeds() -> None:
    rows = [SweepRow("beta 0", {}, done, 3, {}, {}) for done in (3, 2, 0)]
    assert ONE_SEED not in legend(rows)
    assert legend([*rows, SweepRow("beta 1", {}, 1, 1, {}, {})]).endswith(ONE_SEED)


def test_partial_first_write_does_not_block_the_folder(tmp_path: Path) -> None:
    (tmp_path / ".sweep.json.7.partial").write_text("{")
    assert SweepFile(tmp_path, {}, []).status == {}

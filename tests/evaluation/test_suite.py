"""Full evaluation of a tiny run: all tasks, no tuning on test labels, no lost records."""

import json
import math
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.distributed as dist
import torchvision
from colored_images import paint
from PIL import Image
from processes import together
from tiny import silent, tiny
from typer.testing import CliRunner

from compressive import encoder
from compressive.augment.params import paper_views
from compressive.cli.app import app
from compressive.data.sources import open_source
from compressive.evaluation.context import EvalContext
from compressive.evaluation.results import Results, read
from compressive.evaluation.suite import evaluate
from compressive.evaluation.tasks import few_label, information, select_tasks
from compressive.metric_info import METRIC_INFO
from compressive.rundir.folder import read_config
from compressive.rundir.lock import acquire_lock
from compressive.train.loop import pretrain


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Path]:
    folder = tmp_path_factory.mktemp("data")
    for poisoned in (False, True):
        paint(folder / str(poisoned) / "train", seed=0, each=40)
        paint(folder / str(poisoned) / "test", seed=1, each=12, swap=poisoned)
    return lambda poisoned: folder / str(poisoned)


@pytest.fixture(scope="module")
def run(data: Callable[[bool], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "a"
    config = tiny(f"data.source={data(False)}", "method=c-simclr", "train.steps=8")
    pretrain(config, out, display=silent())
    return out


@pytest.fixture(scope="module")
def evaluated(run: Path) -> tuple[Results, Path]:
    return evaluate(str(run), device="cpu", epochs=2, display=silent())


def figures(results: Results) -> dict[str, float]:
    return {record.key: record.value for record in results.records}


def test_every_task_in_the_suite_writes_a_record(evaluated: tuple[Results, Path]) -> None:
    results, out = evaluated
    tasks = {record.task.partition(" ")[0] for record in results.records}
    assert tasks == {
        *("linear", "logistic", "kNN", "few", "geometry", "corruptions", "corruption"),
        *("extra", "smoothness", "invariance", "information"),
    }
    assert {record.metric for record in results.records} <= set(METRIC_INFO)
    assert any("frost" in text for text in results.skipped)
    written = json.loads((out / "results.json").read_text())
    assert len(written["records"]) == len(results.records)
    for record in written["records"]:
        assert {"run", "task", "dataset", "metric", "value", "n", "protocol", "seed"} <= set(record)
        assert record["n"] > 0
    with_pixels = [r for r in results.records if r.task.partition(" ")[0] in ("linear", "kNN")]
    assert all({"crop", "resize", "size"} <= r.protocol.keys() for r in with_pixels)


def test_logistic_regression_separates_colors(evaluated: tuple[Results, Path]) -> None:
    """Even randomly initialized networks separate three colors."""
    found = {(r.task, r.metric): r for r in evaluated[0].records}
    record = found["logistic", "top-1"]
    assert record.n == 36
    assert record.value > 0.6
    assert record.low is not None
    assert record.low <= record.value
    assert set(record.protocol["chosen"]) == {"l2"}


def test_no_hyperparameter_is_tuned_on_test_labels(
    run: Path, data: Callable[[bool], Path], evaluated: tuple[Results, Path], tmp_path: Path
) -> None:
    """Evaluate twice, once with every test label wrong. The selected hyperparameters must match."""
    poisoned, _ = evaluate(
        str(run),
        data=str(data(True)),
        tasks=("linear", "logistic", "few-label"),
        device="cpu",
        epochs=2,
        out=tmp_path,
        display=silent(),
    )

    def chosen(results: Results) -> dict[str, Any]:
        return {
            r.key.replace("True", "False"): r.protocol["chosen"]
            for r in results.records
            if r.task.startswith(("linear", "logistic", "few")) and "chosen" in r.protocol
        }

    clean = chosen(evaluated[0])
    assert chosen(poisoned) == clean
    assert len(clean) > 10
    before, after = (
        {r.task: r.value for r in results.records if r.metric == "top-1"}
        for results in (evaluated[0], poisoned)
    )
    assert after["logistic"] < before["logistic"] - 0.3, "the corrupted test labels have no effect"


@pytest.mark.slow
def test_held_out_evaluation_ignores_test_images(
    run: Path, data: Callable[[bool], Path], tmp_path: Path
) -> None:
    """Corrupting every test label must not change any value."""
    common: dict[str, Any] = {"tasks": ("logistic", "knn"), "device": "cpu", "display": silent()}
    results, place = evaluate(str(run), held_out=True, **common)
    assert place == run / "held-out"
    poisoned = {"data": str(data(True)), "out": tmp_path}
    other, _ = evaluate(str(run), held_out=True, **poisoned, **common)
    assert {k.replace("True", "False"): v for k, v in figures(other).items()} == figures(results)
    assert {(r.dataset, r.n) for r in results.records} == {("False held out", 24)}


@pytest.mark.slow
@pytest.mark.parametrize("first", [False, True])
def test_held_out_and_test_results_are_not_mixed(first: bool, run: Path, tmp_path: Path) -> None:
    common: dict[str, Any] = {"tasks": ["knn"], "device": "cpu", "out": tmp_path}
    evaluate(str(run), held_out=first, display=silent(), **common)
    before = (tmp_path / "results.json").read_bytes()
    kind = "held-out" if first else "test"
    with pytest.raises(ValueError, match=f"{kind} images.*--out"):
        evaluate(str(run), held_out=not first, display=silent(), **common)
    assert (tmp_path / "results.json").read_bytes() == before


@pytest.mark.slow
def test_results_are_not_written_into_an_image_folder(run: Path, tmp_path: Path) -> None:
    """Nothing is created there. A folder with files of an interrupted evaluation is accepted."""
    (tmp_path / "cat").mkdir()
    given: dict[str, Any] = {"tasks": ["knn"], "out": tmp_path, "display": silent()}
    with pytest.raises(ValueError, match=r"results\.json.*--out"):
        evaluate(str(run), device="cpu", **given)
    assert [path.name for path in tmp_path.iterdir()] == ["cat"]
    (tmp_path / "cat").rename(tmp_path / "features")
    (tmp_path / ".values.safetensors.9.partial").touch()  # left by a killed process
    evaluate(str(run), device="cpu", **given)


@pytest.mark.slow
def test_held_out_evaluation_skips_benchmarks(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CIFAR-10-C holds CIFAR-10 test images; ImageNet's few-label list draws on all of train."""
    requested: list[Path | None] = []
    subsets = few_label._subsets

    def record_request(*given: Any) -> Any:
        requested.append(given[-1])
        return subsets(*given)

    monkeypatch.setattr(few_label, "_subsets", record_request)
    given: dict[str, Any] = {
        "benchmark_root": tmp_path / "sets",
        "device": "cpu",
        "display": silent(),
    }
    benchmarks = ["transfer", "robustness"]
    tasks = ["few-label", *benchmarks]
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=r"--benchmark-root .*/sets"):
        evaluate(str(run), tasks=tasks, out=out, **given)
    assert not out.exists()
    (tmp_path / "sets").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    given["benchmark_root"] = Path("~/sets")
    results, _ = evaluate(str(run), held_out=True, tasks=tasks, out=out, **given)
    assert [text.partition(",")[0] for text in results.skipped[1:]] == benchmarks
    evaluate(str(run), tasks=["few-label"], out=tmp_path / "test", **given)
    assert requested == [None, tmp_path / "sets" / "10percent.txt"]


@pytest.mark.slow
def test_corruptions_use_the_linear_head(
    run: Path, evaluated: tuple[Results, Path], tmp_path: Path
) -> None:
    alone, _ = evaluate(
        str(run), tasks=("corruptions",), device="cpu", epochs=2, out=tmp_path, display=silent()
    )
    first = {r.key: r for r in evaluated[0].records}
    kinds = [r for r in alone.records if r.task == "corruptions"]
    assert kinds
    for record in kinds:
        assert record.value == first[record.key].value
        # The head must not name the selected learning rate: runs with other rates are comparable.
        assert record.protocol["head"] == "linear, 2 epochs, rate by log-loss"
        assert record.protocol["chosen"] == first[record.key].protocol["chosen"]


@pytest.mark.slow
def test_custom_task_runs_and_writes_its_record(run: Path, tmp_path: Path) -> None:
    def brightness(context: EvalContext) -> None:
        light = [batch.images.float().mean((1, 2, 3)) for batch in context.batches("test")]
        context.results.add("light", context.splits.name, "level", torch.cat(light), protocol={})

    common: dict[str, Any] = {"device": "cpu", "out": tmp_path, "display": silent()}
    more = {"light": brightness}
    evaluate(str(run), tasks=("knn", "light"), more=more, **common)
    found = {record.task: record for record in read(tmp_path).records}
    assert set(found) == {"kNN 20", "light"}
    paths = sorted((Path(read_config(run).data.source) / "test").rglob("*.png"))
    levels = [np.asarray(Image.open(path).convert("RGB")).mean() for path in paths]
    assert found["light"].n == len(levels)
    assert found["light"].value == pytest.approx(np.mean(levels), rel=1e-5)
    with pytest.raises(ValueError, match=r"--tasks .*light.* got 'dark'"):
        evaluate(str(run), tasks=("dark",), more=more, **common)


@pytest.mark.slow
def test_evaluating_another_dataset_keeps_earlier_records(
    run: Path, data: Callable[[bool], Path], tmp_path: Path
) -> None:
    common: dict[str, Any] = {"device": "cpu", "out": tmp_path, "display": silent()}
    evaluate(str(run), tasks=("knn",), **common)
    results, _ = evaluate(str(run), tasks=("geometry",), data=str(data(True)), **common)
    assert {(r.task, r.dataset) for r in results.records} == {
        ("kNN 20", "False"),
        ("geometry", "True"),
    }
    assert results.about["data"] == "False"  # a report identifies the images of the run by this
    other = {**common, "out": tmp_path / "other"}
    results, _ = evaluate(str(run), tasks=("geometry",), data=str(data(True)), **other)
    assert results.about["data"] == "True"  # the only dataset so far
    results, _ = evaluate(str(run), tasks=("knn",), **other)
    assert results.about["data"] == "False"
    before = (tmp_path / "results.json").read_text()
    with pytest.raises(ValueError, match=r"1 records .*--max-images"):
        evaluate(str(run), tasks=("geometry",), max_images=20, **common)
    with pytest.raises(ValueError, match=r"--out.*results\.json"):
        evaluate(str(run), tasks=("geometry",), seed=1, **common)
    assert (tmp_path / "results.json").read_text() == before


@pytest.mark.slow
def test_records_at_another_input_size_are_not_mixed(
    data: Callable[[bool], Path], tmp_path: Path
) -> None:
    """Another size is refused, even for another dataset. Records at the same size are kept."""
    torch.manual_seed(0)
    network = timm.create_model("test_resnet", num_classes=0)
    torch.save(network.state_dict(), tmp_path / "w.pth")

    def evaluate_at(task: str, size: int, poisoned: bool = False) -> set[tuple[str, str, int]]:
        results, _ = evaluate(
            str(tmp_path / "w.pth"),
            network="test_resnet",
            size=size,
            tasks=[task],
            data=str(data(poisoned)),
            device="cpu",
            out=tmp_path / "out",
            display=silent(),
        )
        return {(r.task, r.dataset, r.protocol["size"]) for r in results.records}

    assert evaluate_at("knn", 16) == {("kNN 20", "False", 16)}
    with pytest.raises(ValueError, match=r"1 records .*--size.*--out"):
        evaluate_at("knn", 32, poisoned=True)
    assert evaluate_at("geometry", 16) == {("geometry", "False", 16), ("kNN 20", "False", 16)}


@pytest.mark.slow
def test_locked_output_folder_is_not_changed(run: Path, tmp_path: Path) -> None:
    """Two writers would each overwrite the other's records."""
    common: dict[str, Any] = {"device": "cpu", "out": tmp_path / "out", "display": silent()}
    evaluate(str(run), tasks=["knn"], **common)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    held = acquire_lock(tmp_path / "out")  # as if another process held it
    try:
        with pytest.raises(ValueError, match=f"another process .*{tmp_path}/out"):
            evaluate(str(run), tasks=["geometry"], **common)
    finally:
        os.close(held)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    evaluate(str(run), tasks=["geometry"], **common)
    assert {record.task for record in read(tmp_path / "out").records} == {"kNN 20", "geometry"}


@pytest.mark.slow
def test_output_notes_missing_test_split_and_unfinished_run(run: Path, tmp_path: Path) -> None:
    place = tmp_path / "a"

    def warns_unfinished(output: str) -> bool:
        return any(str(place) in line and "step 8 of 9" in line for line in output.splitlines())

    shutil.copytree(run, place, ignore=shutil.ignore_patterns("evaluation", "held-out"))
    paint(tmp_path / "one", seed=3, each=30)
    given = ["evaluate", str(place), "--tasks", "knn", "--data", str(tmp_path / "one")]
    done = CliRunner().invoke(app, [*given, "--device", "cpu"])
    assert done.exit_code == 0, done.output
    assert "no test split" in done.output
    assert "step 8 of" not in done.output
    settings = json.loads((place / "config.json").read_text())
    settings["train"]["steps"] = 9
    (place / "config.json").write_text(json.dumps(settings))
    done = CliRunner().invoke(app, [*given, "--device", "cpu"])
    assert warns_unfinished(done.output), done.output
    last = max((place / "checkpoints").iterdir())
    shutil.copy(last, last.with_name("step_99999999_best.safetensors"))  # not the naming of a run
    done = CliRunner().invoke(app, [*given, "--device", "cpu"])
    assert warns_unfinished(done.output), done.output


def test_folder_is_locked_during_tasks_and_released_on_failure(run: Path, tmp_path: Path) -> None:
    def fails(_: EvalContext) -> None:
        with pytest.raises(ValueError, match=f"another process .*{tmp_path}"):
            acquire_lock(tmp_path)
        raise ZeroDivisionError

    common: dict[str, Any] = {"device": "cpu", "out": tmp_path, "display": silent()}
    with pytest.raises(ZeroDivisionError):
        evaluate(str(run), tasks=["fails"], more={"fails": fails}, **common)
    os.close(acquire_lock(tmp_path))


def test_unreadable_image_does_not_drop_an_information_batch(
    run: Path, data: Callable[[bool], Path], tmp_path: Path
) -> None:
    """35 of 36 images make four batches of 8, with 15 candidates each."""
    place = shutil.copytree(data(False), tmp_path / "set")
    min((place / "test").rglob("*.png")).write_bytes(b"no image")
    results, _ = evaluate(
        str(run),
        tasks=["information"],
        more={"information": partial(information.run, batch_size=8)},
        data=str(place),
        device="cpu",
        out=tmp_path / "out",
        display=silent(),
    )
    (record,) = (r for r in results.records if r.metric == "predictive")
    assert (record.n, record.protocol["batch"]) == (32, 8)
    assert record.protocol["bound"] == pytest.approx(math.log(15))
    assert record.protocol["images_left_out"] == 3
    (skipped,) = results.skipped
    assert skipped.startswith("1 ")
    assert "of test" in skipped


@pytest.mark.slow
def test_skip_notes_persist_until_the_task_is_rerun(
    run: Path, data: Callable[[bool], Path], tmp_path: Path
) -> None:
    common: dict[str, Any] = {"device": "cpu", "out": tmp_path, "display": silent()}
    for task in ("knn", "geometry", "knn"):
        results, _ = evaluate(str(run), tasks=(task,), **common)
        assert read(tmp_path).skipped == results.skipped
        assert len(results.skipped) == 1
        assert "kNN with k = 200" in results.skipped[0]
    # Skip notes of another dataset are kept separately.
    results, _ = evaluate(str(run), tasks=("few-label",), data=str(data(True)), **common)
    sets = {place.rpartition(" on ")[2] for place in results.skipped_in.values()}
    assert sets == {"False", "True"}
    results, _ = evaluate(str(run), tasks=("geometry",), **common)
    assert {place.rpartition(" on ")[2] for place in results.skipped_in.values()} == sets


@pytest.mark.slow
@pytest.mark.parametrize(("split", "count"), [("test", 1), ("train", 0)])
def test_record_notes_training_on_test_images(
    data: Callable[[bool], Path], tmp_path: Path, split: str, count: int
) -> None:
    config = tiny("train.steps=1", f"data.source={data(False)}", f"data.split={split}")
    pretrain(config, tmp_path / "run", display=silent())
    options: dict[str, Any] = {"tasks": ("knn",), "device": "cpu", "display": silent()}
    results, _ = evaluate(str(tmp_path / "run"), **options)
    (record,) = results.records
    notes = [note for note in record.protocol.get("notes", ()) if "trained on" in note]
    assert len(notes) == count


@pytest.mark.slow
def test_dataset_named_held_out_is_evaluated_as_test(
    run: Path, data: Callable[[bool], Path], tmp_path: Path
) -> None:
    place = shutil.copytree(data(False), tmp_path / "cats held out")
    for task in ("knn", "geometry"):  # the second call reads the results of the first
        results, _ = evaluate(
            str(run),
            tasks=[task],
            data=str(place),
            device="cpu",
            out=tmp_path / "out",
            display=silent(),
        )
    assert {record.task for record in results.records} == {"kNN 20", "geometry"}


@pytest.mark.slow
def test_records_store_the_augmentations_they_depend_on(run: Path, tmp_path: Path) -> None:
    """Evaluate one encoder with its own augmentations and with weaker ones."""
    other = tmp_path / "b"
    shutil.copytree(run, other, ignore=shutil.ignore_patterns("evaluation", "held-out"))
    settings = json.loads((other / "config.json").read_text())
    settings["views"]["crop_scale_min"] = 0.9
    (other / "config.json").write_text(json.dumps(settings))
    for place, crop_scale_min in ((run, 0.08), (other, 0.9)):
        out = tmp_path / str(crop_scale_min)
        tasks = ["geometry", "information"]
        evaluate(str(place), tasks=tasks, device="cpu", out=out, display=silent())
        of_views = [r for r in read(out).records if "views" in r.protocol]
        assert {r.metric for r in of_views} == {
            *("alignment", "positive_cosine", "residual", "reducible_residual", "predictive")
        }
        expected = [asdict(view) for view in paper_views(crop_scale_min)]
        assert all(r.protocol["views"] == expected for r in of_views)


@pytest.mark.slow
def test_head_tasks_are_skipped_if_encoder_weights_differ(run: Path, tmp_path: Path) -> None:
    other = tmp_path / "b"
    shutil.copytree(run, other, ignore=shutil.ignore_patterns("evaluation", "held-out"))
    found = encoder.load(other)
    next(found.network.parameters()).data.mul_(1.01)
    encoder.save(other, found.network, found.settings, found.size, found.side)
    tasks = ("knn", "smoothness", "information")
    results, _ = evaluate(str(other), tasks=tasks, device="cpu", display=silent())
    assert {record.task for record in results.records} == {"kNN 20"}
    reason = "encoder.safetensors"
    left_out = [line for line in results.skipped if reason in line]
    assert [line.partition(",")[0] for line in left_out] == ["smoothness", "information"]


def worker(rank: int, run: str, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=2)
    evaluate(run, suite="quick", device="cpu", out=Path(folder) / "out", display=silent())


@pytest.mark.slow
@pytest.mark.distributed
def test_two_processes_match_one(
    run: Path, evaluated: tuple[Results, Path], tmp_path: Path
) -> None:
    """Both extract features; then rank 0 alone runs the tasks and writes the results."""
    together(worker, (str(run), str(tmp_path)), 2)
    found, alone = figures(read(tmp_path / "out")), figures(evaluated[0])
    assert len(found) > 10
    for key, value in found.items():
        # Other batch compositions change the summation order.
        assert value == pytest.approx(alone[key], rel=1e-3, abs=1e-3), key


def test_second_call_uses_cached_features(run: Path, evaluated: tuple[Results, Path]) -> None:
    cache = evaluated[1] / "features"
    times = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
    again, _ = evaluate(str(run), tasks=("knn",), device="cpu", out=evaluated[1], display=silent())
    assert {path: path.stat().st_mtime_ns for path in cache.iterdir()} == times
    first = figures(evaluated[0])
    for key, value in figures(again).items():
        assert value == first[key]


def test_unlabeled_images_without_a_test_split_get_geometry_only(
    run: Path, tmp_path: Path, data: Callable[[bool], Path]
) -> None:
    flat = tmp_path / "flat"
    flat.mkdir()
    source = open_source(data(False))
    for i in range(0, 120, 4):
        origin = Path(source.origin(i))
        (flat / origin.name).write_bytes(origin.read_bytes())
    results, _ = evaluate(
        str(run),
        suite="quick",
        data=str(flat),
        device="cpu",
        out=tmp_path / "out",
        display=silent(),
    )
    assert {record.task for record in results.records} == {"geometry"}
    assert sum("needs labels" in text for text in results.skipped) == len(select_tasks("quick")) - 1
    assert "no test split" in results.records[0].protocol["notes"][0]


@pytest.mark.slow
def test_cli_evaluates_torchvision_weights(tmp_path: Path, data: Callable[[bool], Path]) -> None:
    torch.manual_seed(0)
    torch.save(torchvision.models.resnet18(weights=None).state_dict(), tmp_path / "r18.pth")
    args = ["evaluate", str(tmp_path / "r18.pth"), "--data", str(data(False)), "--suite", "quick"]
    args += ["--size", "32", "--device", "cpu", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.output
    assert "kNN 20" in done.output
    assert "results.json" in done.output
    assert "kNN with k = 200" in done.output


@pytest.mark.slow
def test_cli_compares_two_evaluations(
    run: Path, evaluated: tuple[Results, Path], tmp_path: Path, data: Callable[[bool], Path]
) -> None:
    other = tmp_path / "b"
    config = tiny(f"data.source={data(False)}", "method=simclr", "train.steps=2")
    pretrain(config, other, display=silent())
    evaluate(str(other), suite="quick", device="cpu", display=silent())
    done = CliRunner().invoke(app, ["compare", str(run), str(other)])
    assert done.exit_code == 0, done.output
    assert "images" in done.output
    assert "encoder.safetensors" not in done.output
    shutil.copy(run / "encoder.safetensors", other)  # as if training had continued
    done = CliRunner().invoke(app, ["compare", str(run), str(other)])
    assert f"{other}: results.json" in done.output
    assert "encoder.safetensors" in done.output
    alone = CliRunner().invoke(app, ["compare", str(run)])
    assert alone.exit_code == 2
    assert "two runs" in alone.output
    both = tmp_path / "sweep"
    for place in (run, other):
        shutil.copytree(place, both / place.name)
    (both / "sweep.json").touch()
    whole = CliRunner().invoke(app, ["compare", str(both)])
    assert whole.exit_code == 0, whole.output
    page = tmp_path / "sweep.html"
    done = CliRunner().invoke(app, ["report", str(both), "--out", str(page)])
    assert done.exit_code == 0, done.output
    assert all(place.name in page.read_text() for place in (run, other))


@pytest.mark.slow
def test_unavailable_training_data_requires_the_data_option(run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "a"
    shutil.copytree(run, copy)
    settings = json.loads((copy / "config.json").read_text())
    for source in ("python:stripes", str(tmp_path / "gone")):
        settings["data"]["source"] = source
        (copy / "config.json").write_text(json.dumps(settings))
        with pytest.raises(ValueError, match=f"{source}.*--data"):
            evaluate(str(copy), tasks=["knn"], device="cpu", display=silent())


@pytest.mark.slow
def test_held_out_only_evaluations_can_be_compared(run: Path, tmp_path: Path) -> None:
    both = [tmp_path / "a", tmp_path / "b"]
    for beta, copy in enumerate(both):
        shutil.copytree(run, copy, ignore=shutil.ignore_patterns("evaluation", "held-out"))
        settings = json.loads((copy / "config.json").read_text())
        settings["bottleneck"]["beta"] = float(beta)
        (copy / "config.json").write_text(json.dumps(settings))
        evaluate(str(copy), held_out=True, tasks=["knn"], device="cpu", display=silent())
    done = CliRunner().invoke(app, ["compare", *map(str, both)])
    assert done.exit_code == 0, done.output
    assert "held out" in done.output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--suite", "all"], "quick, standard, paper"),
        (["--tasks", "liner"], "linear, logistic"),
        (["--data", "nowhere"], "nowhere"),
        (["--frost", "nowhere"], "frost"),
    ],
)
def test_invalid_option_exits_without_traceback(run: Path, args: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["evaluate", str(run), "--device", "cpu", *args])
    assert done.exit_code == 2
    assert message in done.output
    assert "Traceback" not in done.output


@pytest.mark.shared
def test_random_resnet_beats_chance_on_cifar10(tmp_path: Path) -> None:
    """Random filters separate some classes by color. Chance is 10 % (standard error 1.2 %)."""
    data = Path(__file__).parents[3] / "shared" / "data" / "cifar10"
    torch.manual_seed(0)
    torch.save(torchvision.models.resnet18(weights=None).state_dict(), tmp_path / "r18.pth")
    results, out = evaluate(
        str(tmp_path / "r18.pth"),
        suite="quick",
        data=str(data),
        max_images=600,
        size=32,
        device="cpu",
        out=tmp_path / "out",
        display=silent(),
    )
    found = {(record.task, record.metric): record for record in results.records}
    assert found["logistic", "top-1"].value > 0.15
    assert found["logistic", "top-1"].n == 600
    assert "600 images" in found["kNN 20", "top-1"].protocol["notes"][0]
    assert (out / "results.json").is_file()


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_out_of_range_seed_is_refused(seed: int) -> None:
    with pytest.raises(ValueError, match=rf"--seed .*{seed}"):
        evaluate("nowhere", seed=seed)

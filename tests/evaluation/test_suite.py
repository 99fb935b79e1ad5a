"""A whole evaluation of a tiny run: every task, nothing chosen on test labels, nothing lost."""

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
def judged(run: Path) -> tuple[Results, Path]:
    return evaluate(str(run), device="cpu", epochs=2, display=silent())


def figures(results: Results) -> dict[str, float]:
    return {record.key: record.value for record in results.records}


def test_every_task_of_the_suite_leaves_a_record(judged: tuple[Results, Path]) -> None:
    results, out = judged
    tasks = {record.task.partition(" ")[0] for record in results.records}
    assert tasks == {
        *("linear", "logistic", "kNN", "few", "geometry", "corruptions", "corruption"),
        *("extra", "smoothness", "information"),
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


def test_colors_are_learned_and_test_images_are_counted(judged: tuple[Results, Path]) -> None:
    """Even a network of random weights tells three colors."""
    found = {(r.task, r.metric): r for r in judged[0].records}
    record = found["logistic", "top-1"]
    assert record.n == 36
    assert record.value > 0.6
    assert record.low is not None
    assert record.low <= record.value
    assert set(record.protocol["chosen"]) == {"l2"}


def test_nothing_is_chosen_by_test_labels(
    run: Path, data: Callable[[bool], Path], judged: tuple[Results, Path], tmp_path: Path
) -> None:
    """Every test label is wrong in one of two evaluations; all that was chosen is the same."""
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

    clean = chosen(judged[0])
    assert chosen(poisoned) == clean
    assert len(clean) > 10
    before, after = (
        {r.task: r.value for r in results.records if r.metric == "top-1"}
        for results in (judged[0], poisoned)
    )
    assert after["logistic"] < before["logistic"] - 0.3, "the poison works"


@pytest.mark.slow
def test_by_held_out_images_nothing_is_known_of_test_images(
    run: Path, data: Callable[[bool], Path], tmp_path: Path
) -> None:
    """Number for number what is found where all their labels are wrong."""
    common: dict[str, Any] = {"tasks": ("logistic", "knn"), "device": "cpu", "display": silent()}
    results, place = evaluate(str(run), held_out=True, **common)
    assert place == run / "held-out"
    poisoned = {"data": str(data(True)), "out": tmp_path}
    other, _ = evaluate(str(run), held_out=True, **poisoned, **common)
    assert {k.replace("True", "False"): v for k, v in figures(other).items()} == figures(results)
    assert {(r.dataset, r.n) for r in results.records} == {("False held out", 24)}


@pytest.mark.slow
@pytest.mark.parametrize("first", [False, True])
def test_figures_of_test_and_of_held_out_images_are_not_mixed(
    first: bool, run: Path, tmp_path: Path
) -> None:
    common: dict[str, Any] = {"tasks": ["knn"], "device": "cpu", "out": tmp_path}
    evaluate(str(run), held_out=first, display=silent(), **common)
    before = (tmp_path / "results.json").read_bytes()
    kind = "held-out" if first else "test"
    with pytest.raises(ValueError, match=f"{kind} images.*--out"):
        evaluate(str(run), held_out=not first, display=silent(), **common)
    assert (tmp_path / "results.json").read_bytes() == before


@pytest.mark.slow
def test_results_are_not_put_among_images(run: Path, tmp_path: Path) -> None:
    """Nor is anything made there; a folder that an evaluation began in is its own."""
    (tmp_path / "cat").mkdir()
    given: dict[str, Any] = {"tasks": ["knn"], "out": tmp_path, "display": silent()}
    with pytest.raises(ValueError, match=r"results\.json.*--out"):
        evaluate(str(run), device="cpu", **given)
    assert [path.name for path in tmp_path.iterdir()] == ["cat"]
    (tmp_path / "cat").rename(tmp_path / "features")
    (tmp_path / ".values.safetensors.9.partial").touch()  # what a kill leaves
    evaluate(str(run), device="cpu", **given)


@pytest.mark.slow
def test_sets_of_test_images_are_not_opened_where_none_may_be(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CIFAR-10-C is CIFAR-10's test images, and a list of ImageNet's names is of all of train."""
    asked: list[Path | None] = []
    subsets = few_label._subsets

    def asked_for(*given: Any) -> Any:
        asked.append(given[-1])
        return subsets(*given)

    monkeypatch.setattr(few_label, "_subsets", asked_for)
    given: dict[str, Any] = {
        "benchmark_root": tmp_path / "sets",
        "device": "cpu",
        "display": silent(),
    }
    elsewhere = ["transfer", "robustness"]
    tasks = ["few-label", *elsewhere]
    out = tmp_path / "out"
    with pytest.raises(ValueError, match=r"--benchmark-root .*/sets"):
        evaluate(str(run), tasks=tasks, out=out, **given)
    assert not out.exists()
    (tmp_path / "sets").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    given["benchmark_root"] = Path("~/sets")
    results, _ = evaluate(str(run), held_out=True, tasks=tasks, out=out, **given)
    assert results.skipped[1:] == [f"{name}, which reads test images" for name in elsewhere]
    evaluate(str(run), tasks=["few-label"], out=tmp_path / "test", **given)
    assert asked == [None, tmp_path / "sets" / "10percent.txt"]


@pytest.mark.slow
def test_corruptions_are_judged_by_the_linear_head_whichever_way_they_are_asked_for(
    run: Path, judged: tuple[Results, Path], tmp_path: Path
) -> None:
    alone, _ = evaluate(
        str(run), tasks=("corruptions",), device="cpu", epochs=2, out=tmp_path, display=silent()
    )
    first = {r.key: r for r in judged[0].records}
    kinds = [r for r in alone.records if r.task == "corruptions"]
    assert kinds
    for record in kinds:
        assert record.value == first[record.key].value
        # Runs that chose other rates agree in this.
        assert record.protocol["head"] == "linear, 2 epochs, rate by log-loss"
        assert record.protocol["chosen"] == first[record.key].protocol["chosen"]


@pytest.mark.slow
def test_a_task_of_ones_own_is_done_and_its_record_is_written(run: Path, tmp_path: Path) -> None:
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
    with pytest.raises(ValueError, match=r"--tasks .*robustness, light, got 'dark'"):
        evaluate(str(run), tasks=("dark",), more=more, **common)


@pytest.mark.slow
def test_evaluating_on_other_images_keeps_what_was_measured_before(
    run: Path, data: Callable[[bool], Path], tmp_path: Path
) -> None:
    common: dict[str, Any] = {"device": "cpu", "out": tmp_path, "display": silent()}
    evaluate(str(run), tasks=("knn",), **common)
    results, _ = evaluate(str(run), tasks=("geometry",), data=str(data(True)), **common)
    assert {(r.task, r.dataset) for r in results.records} == {
        ("kNN 20", "False"),
        ("geometry", "True"),
    }
    assert results.about["data"] == "False"  # by which a report knows the run's own images
    other = {**common, "out": tmp_path / "other"}
    results, _ = evaluate(str(run), tasks=("geometry",), data=str(data(True)), **other)
    assert results.about["data"] == "True"  # there is no other yet
    results, _ = evaluate(str(run), tasks=("knn",), **other)
    assert results.about["data"] == "False"
    before = (tmp_path / "results.json").read_text()
    with pytest.raises(ValueError, match=r"1 records .*--max-images, --data or --seed"):
        evaluate(str(run), tasks=("geometry",), max_images=20, **common)
    with pytest.raises(ValueError, match=r"--out.*results\.json"):
        evaluate(str(run), tasks=("geometry",), seed=1, **common)
    assert (tmp_path / "results.json").read_text() == before


@pytest.mark.slow
def test_what_an_encoder_saw_at_another_size_is_not_kept(
    data: Callable[[bool], Path], tmp_path: Path
) -> None:
    """Neither of this set nor of another, nor is it lost; what was seen at this size is kept."""
    torch.manual_seed(0)
    network = timm.create_model("test_resnet", num_classes=0)
    torch.save(network.state_dict(), tmp_path / "w.pth")

    def measured(task: str, size: int, poisoned: bool = False) -> set[tuple[str, str, int]]:
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

    assert measured("knn", 16) == {("kNN 20", "False", 16)}
    with pytest.raises(ValueError, match=r"1 records .*--size.*--out"):
        measured("knn", 32, poisoned=True)
    assert measured("geometry", 16) == {("geometry", "False", 16), ("kNN 20", "False", 16)}


@pytest.mark.slow
def test_a_folder_that_another_evaluation_writes_to_is_left_alone(
    run: Path, tmp_path: Path
) -> None:
    """Each would write what it read before, and what it measured; not what the other did."""
    common: dict[str, Any] = {"device": "cpu", "out": tmp_path / "out", "display": silent()}
    evaluate(str(run), tasks=["knn"], **common)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    held = acquire_lock(tmp_path / "out")  # as another process has it
    try:
        with pytest.raises(ValueError, match=f"another process is writing to {tmp_path}/out; wait"):
            evaluate(str(run), tasks=["geometry"], **common)
    finally:
        os.close(held)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    evaluate(str(run), tasks=["geometry"], **common)
    assert {record.task for record in read(tmp_path / "out").records} == {"kNN 20", "geometry"}


@pytest.mark.slow
def test_a_table_says_what_its_test_images_are_and_that_a_run_is_not_finished(
    run: Path, tmp_path: Path
) -> None:
    place = tmp_path / "a"
    shutil.copytree(run, place, ignore=shutil.ignore_patterns("evaluation", "held-out"))
    paint(tmp_path / "one", seed=3, each=30)
    given = ["evaluate", str(place), "--tasks", "knn", "--data", str(tmp_path / "one")]
    done = CliRunner().invoke(app, [*given, "--device", "cpu"])
    assert done.exit_code == 0, done.output
    assert "note: no test split in" in done.output
    assert "come to its end" not in done.output
    settings = json.loads((place / "config.json").read_text())
    settings["train"]["steps"] = 9
    (place / "config.json").write_text(json.dumps(settings))
    done = CliRunner().invoke(app, [*given, "--device", "cpu"])
    assert f"{place}: training has not come to its end: step 8 of 9" in done.output
    last = max((place / "checkpoints").iterdir())
    shutil.copy(last, last.with_name("step_99999999_best.safetensors"))  # not one of ours
    done = CliRunner().invoke(app, [*given, "--device", "cpu"])
    assert f"{place}: training has not come to its end: step 8 of 9" in done.output


def test_a_folder_is_held_while_tasks_are_done_and_free_after_a_failure(
    run: Path, tmp_path: Path
) -> None:
    def fails(_: EvalContext) -> None:
        with pytest.raises(ValueError, match="another process is writing"):
            acquire_lock(tmp_path)
        raise ZeroDivisionError

    common: dict[str, Any] = {"device": "cpu", "out": tmp_path, "display": silent()}
    with pytest.raises(ZeroDivisionError):
        evaluate(str(run), tasks=["fails"], more={"fails": fails}, **common)
    os.close(acquire_lock(tmp_path))


def test_one_image_that_cannot_be_read_costs_the_meter_no_batch(
    run: Path, data: Callable[[bool], Path], tmp_path: Path
) -> None:
    """35 of 36 images are four batches of 8, among 15 candidates each."""
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
    assert results.skipped == ["1 images of test that cannot be read"]


@pytest.mark.slow
def test_what_was_left_out_is_said_until_its_task_is_done_again(
    run: Path, data: Callable[[bool], Path], tmp_path: Path
) -> None:
    common: dict[str, Any] = {"device": "cpu", "out": tmp_path, "display": silent()}
    for task in ("knn", "geometry", "knn"):
        results, _ = evaluate(str(run), tasks=(task,), **common)
        assert read(tmp_path).skipped == results.skipped
        assert len(results.skipped) == 1
        assert "kNN with k = 200" in results.skipped[0]
    # Of another set it is not the same, and both are known by their own.
    results, _ = evaluate(str(run), tasks=("few-label",), data=str(data(True)), **common)
    sets = {place.rpartition(" on ")[2] for place in results.skipped_in.values()}
    assert sets == {"False", "True"}
    results, _ = evaluate(str(run), tasks=("geometry",), **common)
    assert {place.rpartition(" on ")[2] for place in results.skipped_in.values()} == sets


@pytest.mark.slow
@pytest.mark.parametrize(("split", "count"), [("test", 1), ("train", 0)])
def test_a_run_that_has_seen_its_test_images_says_so(
    data: Callable[[bool], Path], tmp_path: Path, split: str, count: int
) -> None:
    config = tiny("train.steps=1", f"data.source={data(False)}", f"data.split={split}")
    pretrain(config, tmp_path / "run", display=silent())
    words: dict[str, Any] = {"tasks": ("knn",), "device": "cpu", "display": silent()}
    results, _ = evaluate(str(tmp_path / "run"), **words)
    (record,) = results.records
    notes = [note for note in record.protocol.get("notes", ()) if "was trained on these" in note]
    assert len(notes) == count


@pytest.mark.slow
def test_a_set_called_held_out_is_no_held_out_set(
    run: Path, data: Callable[[bool], Path], tmp_path: Path
) -> None:
    place = shutil.copytree(data(False), tmp_path / "cats held out")
    for task in ("knn", "geometry"):  # the second time it reads what the first has written
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
def test_numbers_of_a_runs_own_augmentations_say_which_these_are(run: Path, tmp_path: Path) -> None:
    """One encoder, judged by its own and by weaker ones."""
    other = tmp_path / "b"
    shutil.copytree(run, other, ignore=shutil.ignore_patterns("evaluation", "held-out"))
    settings = json.loads((other / "config.json").read_text())
    settings["views"]["crop_scale_min"] = 0.9
    (other / "config.json").write_text(json.dumps(settings))
    for place, least in ((run, 0.08), (other, 0.9)):
        out = tmp_path / str(least)
        tasks = ["geometry", "information"]
        evaluate(str(place), tasks=tasks, device="cpu", out=out, display=silent())
        of_views = [r for r in read(out).records if "views" in r.protocol]
        assert {r.metric for r in of_views} == {
            *("alignment", "positive_cosine", "residual", "reducible_residual", "predictive")
        }
        expected = [asdict(view) for view in paper_views(least)]
        assert all(r.protocol["views"] == expected for r in of_views)


@pytest.mark.slow
def test_tasks_with_heads_are_left_out_where_these_are_not_the_encoders(
    run: Path, tmp_path: Path
) -> None:
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
def test_two_processes_come_to_what_one_does(
    run: Path, judged: tuple[Results, Path], tmp_path: Path
) -> None:
    """They extract features together; then the first goes on alone and writes."""
    together(worker, (str(run), str(tmp_path)), 2)
    found, alone = figures(read(tmp_path / "out")), figures(judged[0])
    assert len(found) > 10
    for key, value in found.items():
        # Features of other batches are summed in another order.
        assert value == pytest.approx(alone[key], rel=1e-3, abs=1e-3), key


def test_a_second_call_takes_features_from_the_cache(
    run: Path, judged: tuple[Results, Path]
) -> None:
    cache = judged[1] / "features"
    times = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
    again, _ = evaluate(str(run), tasks=("knn",), device="cpu", out=judged[1], display=silent())
    assert {path: path.stat().st_mtime_ns for path in cache.iterdir()} == times
    first = figures(judged[0])
    for key, value in figures(again).items():
        assert value == first[key]


def test_images_without_a_test_split_or_labels_get_what_they_can(
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
def test_a_file_of_torchvisions_weights_is_evaluated_from_the_command_line(
    tmp_path: Path, data: Callable[[bool], Path]
) -> None:
    torch.manual_seed(0)
    torch.save(torchvision.models.resnet18(weights=None).state_dict(), tmp_path / "r18.pth")
    words = ["evaluate", str(tmp_path / "r18.pth"), "--data", str(data(False)), "--suite", "quick"]
    words += ["--size", "32", "--device", "cpu", "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "kNN 20" in done.output
    assert "results.json" in done.output
    assert "kNN with k = 200" in done.output


@pytest.mark.slow
def test_two_evaluations_are_compared_from_the_command_line(
    run: Path, judged: tuple[Results, Path], tmp_path: Path, data: Callable[[bool], Path]
) -> None:
    other = tmp_path / "b"
    config = tiny(f"data.source={data(False)}", "method=simclr", "train.steps=2")
    pretrain(config, other, display=silent())
    evaluate(str(other), suite="quick", device="cpu", display=silent())
    done = CliRunner().invoke(app, ["compare", str(run), str(other)])
    assert done.exit_code == 0, done.output
    assert "images" in done.output
    assert "other weights" not in done.output
    shutil.copy(run / "encoder.safetensors", other)  # as if it had gone on
    done = CliRunner().invoke(app, ["compare", str(run), str(other)])
    assert f"{other}: results.json: of other weights than encoder.safetensors" in done.output
    alone = CliRunner().invoke(app, ["compare", str(run)])
    assert alone.exit_code == 2
    assert "needs two runs" in alone.output
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
def test_a_run_is_not_judged_by_images_that_it_was_not_trained_on(
    run: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "a"
    shutil.copytree(run, copy)
    settings = json.loads((copy / "config.json").read_text())
    for source in ("python:stripes", str(tmp_path / "gone")):
        settings["data"]["source"] = source
        (copy / "config.json").write_text(json.dumps(settings))
        with pytest.raises(ValueError, match=f"{source}.*--data"):
            evaluate(str(copy), tasks=["knn"], device="cpu", display=silent())


@pytest.mark.slow
def test_what_was_judged_by_held_out_images_alone_is_compared(run: Path, tmp_path: Path) -> None:
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
    ("words", "complaint"),
    [
        (["--suite", "all"], "quick, standard, paper"),
        (["--tasks", "liner"], "linear, logistic"),
        (["--data", "nowhere"], "nowhere"),
        (["--frost", "nowhere"], "frost"),
    ],
)
def test_bad_words_are_one_line(run: Path, words: list[str], complaint: str) -> None:
    done = CliRunner().invoke(app, ["evaluate", str(run), "--device", "cpu", *words])
    assert done.exit_code == 2
    assert complaint in done.output
    assert "Traceback" not in done.output


@pytest.mark.shared
def test_real_images_are_told_apart_better_than_by_chance(tmp_path: Path) -> None:
    """Random filters tell some by color; chance is 10 %, its standard error here 1.2 %."""
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
    assert "at most 600 images" in found["kNN 20", "top-1"].protocol["notes"][0]
    assert (out / "results.json").is_file()


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_that_no_generator_takes_is_refused_at_once(seed: int) -> None:
    with pytest.raises(ValueError, match=r"--seed must be 0 or more and below 2\*\*32, got"):
        evaluate("nowhere", seed=seed)

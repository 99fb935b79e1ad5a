"""Tables of docs/results/2026-11-18-performance.md match the result files."""

import json
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from result_tables import table_rows
from scipy import stats

PAGE = Path(__file__).parents[2] / "docs" / "results" / "2026-11-18-performance.md"


def result(name: str) -> dict[str, Any]:
    return json.loads((PAGE.with_suffix("") / f"{name}.json").read_text())


def words_of(page: Path) -> str:
    """Return a page without line breaks."""
    return " ".join(page.read_text().split())


def test_decoding() -> None:
    rows = {row[""]: row for row in table_rows(PAGE, "## JPEG files", "16 cores, first")}
    names = {
        "network": ("network", "network"),
        "images in GPU memory": ("memory", "memory"),
        "files, decoded on the CPU": ("files_cpu", "files_cpu"),
        "files, decoded with nvJPEG": ("files_gpu", "files_gpu, 2 threads"),
    }
    speed = {"first": result("decode-first")["speed"], "second": result("decode-second")["speed"]}
    for label, (first, second) in names.items():
        for cores in (16, 4):
            for version, name in (("first", first), ("second", second)):
                found = speed[version][f"{cores} cores"]
                shown = rows[label][f"{cores} cores, {version}"]
                ratio = found["ratios"][f"{name} / network"]
                expected = f"{found['ms'][name]:.1f}"
                assert shown == expected + ("" if label == "network" else f" ({ratio:.2f})")
    for cores in (16, 4):
        found = speed["first"][f"{cores} cores"]
        best = max(found["lightly_ratios"].values())
        assert rows["our faster decoder / lightly"][f"{cores} cores, first"] == f"{best:.2f}"


def test_decoding_process() -> None:
    lines = (PAGE.with_suffix("") / "decode-process.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    blocks = {(one["cores"], one["name"]): one for one in found if "ms" in one}
    few = {16: 14, 4: 3}
    names = ("network", "memory", "threads", "process, nice 0", "process", "process, {}")
    names += ("threads, nice 5", "threads, {}")
    rows = table_rows(PAGE, "## Decoding in a process", "16 cores", "4 cores")
    for row, name in zip(rows, names, strict=True):
        _, *cells = row.values()
        for cores, time, wait in ((16, *cells[:2]), (4, *cells[2:])):
            block, network = blocks[cores, name.format(few[cores])], blocks[cores, "network"]
            ratio = "" if name == "network" else f" ({block['ms'] / network['ms']:.2f})"
            assert time == f"{block['ms']:.1f}{ratio}"
            assert wait == ("" if block["wait"] == 0 else f"{100 * block['wait']:.0f} %")
    assert [one["equal_batches"] for one in found if "equal_batches" in one] == [8]
    own = next(one["process_mib"] for one in found if "process_mib" in one)
    text = words_of(PAGE)
    assert f"{own['RssAnon']:.0f} MiB of its own and {own['RssFile']:.0f} MiB of files" in text
    # The table at the top and other pages.
    files, memory = (blocks[16, name]["ms"] for name in ("process, nice 0", "memory"))
    ratios = [value / blocks[16, "network"]["ms"] for value in (files, memory)]
    shown = "{:.2f} with a process that decodes (images in GPU memory: {:.2f})".format(*ratios)
    assert shown in text
    assert files / memory == pytest.approx(1, abs=0.005)
    scale = words_of(PAGE.parents[1] / "scale.md")
    threads = blocks[16, "threads"]["ms"]
    assert f"takes {files:.1f} ms, as long as from GPU memory, and {threads:.1f} ms with" in scale
    both = [blocks[4, name]["ms"] for name in ("process, nice 0", "threads")]
    assert "With 4 cores it takes {:.0f} instead of {:.0f} ms".format(*both) in scale


def test_threads() -> None:
    rows = table_rows(PAGE, "## Threads that read", "threads")
    for row, found in zip(rows, result("threads").values(), strict=True):
        for threads, pairs in found.items():
            assert row[threads] == ", ".join(f"{rate:,}" for rate, _ in pairs)


def test_start() -> None:
    rows = table_rows(PAGE, "## Time to the first step", "first step")
    starts = [
        result(name)["starts"][f"now, {kind}"][0]["seconds"]
        for name in ("startup-resnet18", "startup-resnet18-ahead")
        for kind in ("cold", "second")
    ]
    keys = {"imports": "import compressive", "run built": "build", "first step": "first step"}
    for row, found in zip(rows, starts, strict=True):
        for column, key in keys.items():
            assert float(row[column]) == pytest.approx(found[key], abs=0.06)


def test_evaluation() -> None:
    rows = {row[""]: row for row in table_rows(PAGE, "## Evaluation", "now")}
    found = result("evaluation")["evaluation"]
    assert float(rows["all, seconds"]["now"]) == pytest.approx(found["seconds"]["now"], abs=0.06)
    assert max(found["differences"].values()) == 0
    later = result("evaluation-later")["evaluation"]
    latest = result("evaluation-encoder")["evaluation"]
    run, file = "later version, a run, two threads", "latest version (6f5fc2b), an encoder's file"
    assert rows["all, seconds"][run] == f"{later['seconds']['now']:.1f}"
    assert rows["all, seconds"][file] == f"{latest['seconds']['now']:.1f}"
    names = {"linear": "linear", "decoding": "decode", "logistic": "logistic"}
    names |= {"corruptions": "corruptions", "few labels": "few-label"}
    for column, one in (("now", found), (file, latest), (run, later)):
        tasks = one["evaluations"]["now"][0]["tasks"]
        for label, task in names.items():
            assert float(rows[label][column]) == pytest.approx(tasks[task], abs=0.06)
    parts, whole = sum(tasks.values()), later["seconds"]["now"]
    assert f"take {parts:.1f} s of the {whole:.1f}." in words_of(PAGE)
    seconds = f"**{latest['seconds']['now']:.0f} s** for an encoder's file, {whole:.0f} s for a run"
    assert f"| evaluation of a CIFAR-10 encoder: 40 s | {seconds}, with" in words_of(PAGE)


def test_network() -> None:
    rows = table_rows(PAGE, "## The compiled network", "milliseconds")
    for row, name in zip(rows[1:], ("cudnn", "stem"), strict=True):
        found = result("network")[name]
        assert float(row["milliseconds"]) == pytest.approx(found["ms"], abs=0.06)
        shown = row["relative to today's network"].split(",")[0]
        assert float(shown) == pytest.approx(found["speed relative to the network"], abs=6e-4)


NORMS, NVJPEG = "## Batch norms as Triton kernels", "## nvJPEG without torchvision"


def test_kernels_of_batch_norm() -> None:
    rows = table_rows(PAGE, NORMS, "statistics")
    found = result("norm-kernels")["terabytes_per_second"]
    assert len(rows) == len(found) == 12
    columns = ("layers", "moments", "moments_native", "gradient_sums", "gradient_sums_native")
    for row, layer in zip(rows, found, strict=True):
        shape, *cells = row.values()
        assert shape == f"{layer['channels']} x {layer['side']}"
        values = [layer[name] for name in columns]
        assert [float(cell) for cell in cells] == pytest.approx(values, abs=0.006)


def test_networks_with_kernels_of_batch_norm() -> None:
    networks = result("norm-networks")["networks"]
    found = [*networks["resnet50"].values(), *networks["resnet18-cifar"].values()]
    rows = table_rows(PAGE, NORMS, "plain network")
    columns = {"milliseconds": "ms", "plain network": "network_ms", "peak GB": "peak_gb"}
    for row, one in zip(rows, found, strict=True):
        for column, key in columns.items():
            assert row[column] == f"{one[key]:.1f}"
        assert row["ratio"] == f"{one['network_ms'] / one['ms']:.3f}"
        assert row["gradients"] == f"{one['difference_from_float32']:.4f} ({one['noise']:.4f})"
        assert 0.998 < one["median_parameter_ratio"] < 1.003
        assert one["largest_parameter_ratio"] < 2.05
    *_, last = networks["resnet50"].values()
    assert sum(last["ms_by_kind"].values()) == pytest.approx(60.7, abs=0.06)


def test_accuracy_with_kernels_of_batch_norm() -> None:
    rows = {row[""]: row for row in table_rows(PAGE, NORMS, "seed 0")}
    runs = result("norm-accuracy")["runs"]
    for label, key in (("probe", "probe"), ("kNN", "knn")):
        fused, plain = ([100 * run[which][key] for run in runs] for which in ("fused", "plain"))
        for name, values in (("kernels", fused), ("torch", plain)):
            shown = [float(rows[f"{label}, {name}"][f"seed {seed}"]) for seed in range(3)]
            assert shown == pytest.approx(values, abs=0.005 + 1e-9)
        found = stats.ttest_rel(fused, plain)
        low, high = found.confidence_interval(0.95)
        cell = rows[f"{label}, kernels"]["difference of means, 95 % over pairs"]
        assert cell == f"{mean(fused) - mean(plain):.2f} [{low:.2f}, {high:.2f}]"


def test_calls_of_nvjpeg() -> None:
    calls = result("jpeg-calls")["calls"]
    names = ("torchvision", "engine", "engine, normal priority")
    rows = table_rows(PAGE, NVJPEG, "next to kernels")
    for row, name in zip(rows, names, strict=True):
        for load in ("alone", "next to Python", "next to kernels"):
            shown = row[load]
            assert shown == (f"{calls[load][name]['ms']:.1f}" if name in calls[load] else "")


def test_steps_with_nvjpeg() -> None:
    steps = result("jpeg-steps")["steps"]
    names = ("memory", "cpu", "torchvision", "engine", "engine, own stream")
    names += ("engine, normal priority", "engine, quick switch", "engine, no pools")
    rows = table_rows(PAGE, NVJPEG, "milliseconds per step", "waiting, 4 cores")
    for row, name in zip(rows, names, strict=True):
        _, *cells, rate = row.values()
        shown = iter(cells)
        for cores in ("16 cores", "4 cores"):
            found = steps[cores].get(name, {"ms": [], "wait": []})
            assert next(shown) == ", ".join(f"{ms:.1f}" for ms in found["ms"])
            assert next(shown) == ", ".join(f"{100 * share:.0f} %" for share in found["wait"])
        expected = steps["16 cores"][name].get("loader_images_per_second", [])
        assert rate == "".join(f"{each:,.0f}" for each in expected)


def test_first_start_with_all_threads() -> None:
    seconds = result("startup-resnet50-threads")["starts"]["now, cold"][0]["seconds"]
    text = words_of(PAGE)
    assert f"no such limits: {seconds['first step']:.1f} s for the first start" in text
    ready = seconds["network ahead"]
    assert abs(ready - 65.1) <= 0.06
    assert "65.1 of them until the second process was ready" in text
    assert f"ResNet-50: {seconds['first step']:.0f} s |" in text


def test_faster_start() -> None:
    rows = table_rows(PAGE, "## A faster start", "first step")
    versions = ("threads", "alone", "second-process", "repeated")
    starts = [
        result(f"startup-{name}")["starts"][f"now, {kind}"][0]
        for name in (
            *(f"resnet18-{each}" for each in versions),
            *("resnet50", "resnet50-second-process"),
        )
        for kind in ("cold", "second")
    ]
    keys = {"imports": "imports", "run built": "build", "checkpoint": "first checkpoint"}
    for row, found in zip(rows, starts, strict=True):
        for column, key in {**keys, "first step": "first step"}.items():
            assert float(row[column]) == pytest.approx(found["seconds"][key], abs=0.06)
    for group in (starts[2:6], starts[6:8], starts[8:]):
        assert len({(found["loss"], found["second_loss"]) for found in group}) == 1
    for each in (4, 6, 10):
        assert starts[each]["ahead"][0] == 0  # the process has compiled the network
    assert {"50.85 forward pass compiled", "68.80 step made"} <= set(starts[10]["ahead"])
    assert starts[10]["seconds"]["views"] == pytest.approx(34.8, abs=0.06)
    assert not any(found["rebuilt"] for found in starts[2:])


def test_commands() -> None:
    seconds = result("commands")["seconds"]
    rows = table_rows(PAGE, "## Commands without torch", "arguments")
    assert {row["arguments"].strip("`"): row["seconds"] for row in rows} == {
        name: f"{value:.2f}" for name, value in seconds.items()
    }
    assert max(seconds.values()) < 0.5

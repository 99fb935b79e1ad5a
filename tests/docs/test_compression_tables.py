"""Tables of docs/results/2026-11-17-compression.md match the result files."""

import hashlib
import json
import re
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from result_tables import table_rows, welch

PAGE = Path(__file__).parents[2] / "docs" / "results" / "2026-11-17-compression.md"
FOLDER = PAGE.with_suffix("")
COLUMNS = {
    "logistic": "logistic top-1",
    "linear": "linear top-1",
    "kNN 20": "kNN 20 top-1",
    "1 % of the labels": "few labels 1% top-1",
    "10 %": "few labels 10% top-1",
    "corruptions": "corruptions top-1",
}
# Heading of the section, its file, and its number of table rows.
SECTIONS = {
    "## Search on Tiny-ImageNet-100": ("search-tiny-imagenet-100.json", 12),
    "## Second search": ("search-2-tiny-imagenet-100.json", 12),
    "## Third search": ("search-3-tiny-imagenet-100.json", 6),
    "## Final comparison on Tiny-ImageNet-100": ("final-tiny-imagenet-100.json", 20),
    "## Search on CIFAR-10": ("search-cifar10.json", 6),
    "## Final comparison on CIFAR-10": ("final-cifar10.json", 12),
}


def run_key(run: dict[str, Any]) -> tuple[str, ...]:
    """Return (method, kappa_b, beta, kappa_e, p_i, seed) of a run in a result file."""
    if "mode" in run:  # the first search
        beta = f"{run['beta']:g}" if run["mode"] in ("constant", "adaptive") else ""
        return run["mode"], f"{run['kappa_b']:g}", beta, "", "", str(run["seed"])
    settings = run["settings"]
    method = settings.get("method", settings["recipe"].split("/")[0])
    is_adaptive = settings.get("bottleneck.schedule") == "adaptive"
    weight = settings.get("bottleneck.adaptive_weight", "")
    if method == "c-byol":
        method = "c-byol, adaptive"
    elif is_adaptive:
        method = "adaptive"
    elif settings.get("bottleneck.schedule") == "cosine":
        method = "cosine"
    elif method == "c-simclr":
        method = "constant"
    names = ("bottleneck.kappa_b", "bottleneck.beta", "bottleneck.kappa_e")
    kappa_b, beta, kappa_e = (settings.get(name, "") for name in names)
    return method, kappa_b, beta, kappa_e, weight, settings["seed"]


def row_key(row: dict[str, str]) -> tuple[str, ...]:
    """Return the same key of a table row."""
    weights = {"": "", "exp(-nll_i)": "likelihood", "rank of nll_i": "rank"}
    kappa_e = row.get("kappa_e", "").replace("1024", "")  # the default
    names = (row["method"], row.get("kappa_b", ""), row["beta"])
    return *names, kappa_e, weights[row.get("weight p_i", "")], row["seed"]


def test_checksums_of_files() -> None:
    rows = table_rows(PAGE, "## Files", "SHA-256")
    files = sorted(FOLDER.iterdir())
    assert len(rows) == len(files)
    for row, path in zip(rows, files, strict=True):
        assert row["file"] == f"[{path.name}]({FOLDER.name}/{path.name})"
        assert row["SHA-256"] == f"`{hashlib.sha256(path.read_bytes()).hexdigest()}`"


@pytest.mark.parametrize("heading", SECTIONS)
def test_tables_match_result_files(heading: str) -> None:
    name, count = SECTIONS[heading]
    runs = json.loads((FOLDER / name).read_text())["runs"]
    by_key = {run_key(run): run for run in runs if "held_out" in run or "test" in run}
    rows = table_rows(PAGE, heading, "seed", "logistic")
    assert len(rows) == len(by_key) == count
    for row in rows:
        check_row(row, by_key[row_key(row)])


def check_row(row: dict[str, str], run: dict[str, Any]) -> None:
    """Compare the cells of a table row with a run; those of metrics that it lacks are empty."""
    assert {"logistic", "kNN 20", "1 % of the labels", "10 %"} <= row.keys()
    measured = run.get("held_out") or run["test"]
    for title, metric in COLUMNS.items():
        if title not in row:
            continue
        assert bool(row[title]) == (metric in measured), (row, title)
        if row[title]:
            value = measured[metric]
            value = value["value"] if isinstance(value, dict) else value
            # Half of the last digit, and rounding in binary.
            assert float(row[title]) == pytest.approx(100 * value, abs=0.05 + 1e-9), (row, title)
    if "Lipschitz" in row:
        assert float(row["Lipschitz"]) == pytest.approx(lipschitz(run), abs=0.005 + 1e-9)


def training_length() -> dict[tuple[str, ...], dict[str, Any]]:
    """Return the runs with other lengths of training by (method, beta, images, epochs, seed)."""
    found = {}
    for run in runs_of("training-length.json").values():
        settings = run["settings"]
        assert settings["bottleneck.kappa_b"] == "7"
        images = f"{int(settings['data.limit']):,}"
        method, _, beta, *_ = run_key(run)
        found[method, beta, images, settings["train.epochs"], settings["seed"]] = run
    return found


def test_lengths_of_training_match_their_file() -> None:
    runs = training_length()
    rows = table_rows(PAGE, "## Length of training", "seed", "Lipschitz")
    assert len(rows) == len(runs) == 11
    for row in rows:
        names = ("method", "beta", "images", "epochs", "seed")
        check_row(row, runs[tuple(row[name] for name in names)])


def test_differences_of_lengths_of_training() -> None:
    runs = training_length()
    rows = table_rows(PAGE, "## Length of training", "smoother")
    assert len(rows) == sum(method != "simclr" for method, *_ in runs) == 7
    for row in rows:
        trained = (row["images"], row["epochs"], row["seed"])
        ours, theirs = runs[row["method"], row["beta"], *trained], runs["simclr", "", *trained]
        for title, metric in COLUMNS.items():
            if not row.get(title):
                continue
            expected = 100 * (ours["test"][metric]["value"] - theirs["test"][metric]["value"])
            assert float(row[title]) == pytest.approx(expected, abs=0.05 + 1e-9), (row, title)
        ratio = lipschitz(theirs) / lipschitz(ours)
        assert float(row["smoother"]) == pytest.approx(ratio, abs=0.005 + 1e-9)


def lipschitz(run: dict[str, Any]) -> float:
    """Return the mean of the estimates in the eight directions."""
    return mean(directions(run).values())


def directions(run: dict[str, Any]) -> dict[str, float]:
    """Return the estimates in the eight directions."""
    ends = ("+ lipschitz", "- lipschitz")
    found = {name: value for name, value in run["smoothness"].items() if name.endswith(ends)}
    assert len(found) == 8
    return found


@pytest.mark.parametrize(
    ("file", "ours", "other", "low", "high", "smoother"),
    [
        ("final-cifar10.json", "adaptive-k5-b3", "simclr-k5", 1.06, 1.15, 8),
        ("final-cifar10.json", "adaptive-k5-b3", "dcl-k5", 1.06, 1.15, 8),
        ("final-cifar10.json", "adaptive-k7-b3", "simclr-k5", 1.00, 1.06, 7),
        ("final-cifar10.json", "adaptive-k7-b3", "dcl-k5", 1.00, 1.07, 8),
        ("final-cifar10.json", "cifar-cosine-k7-b1", "simclr-k5", 1.06, 1.12, 8),
        ("final-tiny-imagenet-100.json", "adaptive-k5-b3", "simclr-k7", 1.14, 1.37, 8),
        ("final-tiny-imagenet-100.json", "adaptive-k7-b3", "simclr-k7", 1.09, 1.29, 8),
        ("final-tiny-imagenet-100.json", "cosine-k7-b0.3", "simclr-k7", 1.10, 1.22, 8),
        ("final-tiny-imagenet-100.json", "adaptive-k7-b3", "simclr-k5", 0.97, 1.08, 6),
    ],
)
def test_compressed_encoders_are_smoother(
    file: str, ours: str, other: str, low: float, high: float, smoother: int
) -> None:
    runs = runs_of(AT_5) | runs_of(LATE) | runs_of(file)
    pairs = [
        (directions(runs[f"{other}-s{seed}"]), directions(runs[f"{ours}-s{seed}"]))
        for seed in range(3)
    ]
    ratios = [
        sum(theirs[name] for theirs, _ in pairs) / sum(mine[name] for _, mine in pairs)
        for name in pairs[0][0]
    ]
    assert sum(ratio > 1 for ratio in ratios) == smoother
    # The page gives the smallest and largest ratio with two digits.
    assert min(ratios) > low - 0.005
    assert max(ratios) < high + 0.005
    if low > 1:  # the page says that this holds for each seed
        assert all(theirs[name] > mine[name] for theirs, mine in pairs for name in mine)


def test_late_compression_matches_its_file() -> None:
    runs = {}
    for run in runs_of("late-compression.json").values():
        settings = run["settings"]
        assert (settings["bottleneck.schedule"], settings["train.epochs"]) == ("cosine", "80")
        images = f"{settings['data.source']}, {'test' if 'test' in run else 'held out'}"
        _, kappa_b, beta, *_ = run_key(run)
        runs[images, kappa_b, beta, settings["seed"]] = run
    rows = table_rows(PAGE, "## Compression that starts late", "images", "logistic")
    assert len(rows) == len(runs) == 11
    for row in rows:
        check_row(row, runs[tuple(row[name] for name in ("images", "kappa_b", "beta", "seed"))])


def runs_of(file: str) -> dict[str, dict[str, Any]]:
    """Return the runs of a result file by name."""
    return {run["name"]: run for run in json.loads((FOLDER / file).read_text())["runs"]}


TINY, CIFAR10, LATE = "final-tiny-imagenet-100.json", "final-cifar10.json", "late-compression.json"
AT_5 = "simclr-kappa-b-5.json"
# Columns "method" or "data" and "minus" of a row, and the files and runs that it compares.
Compared = dict[tuple[str, str], tuple[tuple[str, str], tuple[str, str]]]
ON_TINY: Compared = {
    (method, minus): ((TINY, ours), (TINY, other))
    for method, ours, minus, other in (
        ("adaptive, kappa_b 10", "adaptive-k10-b1", "SimCLR", "simclr-k7"),
        ("adaptive, kappa_b 7", "adaptive-k7-b3", "SimCLR", "simclr-k7"),
        ("adaptive, kappa_b 7", "adaptive-k7-b3", "DCL", "dcl-k10"),
        ("adaptive, kappa_b 5", "adaptive-k5-b3", "SimCLR", "simclr-k7"),
        ("constant", "constant-k10-b0.3", "SimCLR", "simclr-k7"),
    )
}
ON_CIFAR10: Compared = {
    (f"adaptive, kappa_b {kappa_b}", minus): (
        (CIFAR10, f"adaptive-k{kappa_b}-b3"),
        (CIFAR10, other),
    )
    for kappa_b in (5, 7)
    for minus, other in (("SimCLR", "simclr-k5"), ("DCL", "dcl-k5"))
}
LATE_ON_BOTH: Compared = {
    (data, minus): ((LATE, ours), (file, other))
    for data, file, ours, kappa_b in (
        ("Tiny-ImageNet-100", TINY, "cosine-k7-b0.3", 7),
        ("CIFAR-10", CIFAR10, "cifar-cosine-k7-b1", 5),
    )
    for minus, other in (
        (f"SimCLR, kappa_b {kappa_b}", f"simclr-k{kappa_b}"),
        ("adaptive, kappa_b 7, beta 3", "adaptive-k7-b3"),
    )
}


@pytest.mark.parametrize(
    ("heading", "compared", "count"),
    [
        ("Final comparison on Tiny-ImageNet-100", ON_TINY, 35),
        ("Final comparison on CIFAR-10", ON_CIFAR10, 28),
        ("Compression that starts late", LATE_ON_BOTH, 28),
    ],
)
def test_differences_of_three_seeds(heading: str, compared: Compared, count: int) -> None:
    rows = table_rows(PAGE, f"## {heading}", "minus", "Holm")
    assert len(rows) == count
    pairs = []
    for row in rows:
        runs = (
            [runs_of(file)[f"{name}-s{seed}"] for seed in range(3)]
            for file, name in compared[row.get("method") or row["data"], row["minus"]]
        )
        ours, theirs = (scores(group, row["metric"]) for group in runs)
        pairs.append((ours, theirs))
    check_differences(rows, pairs)


def test_differences_of_two_late_seeds() -> None:
    rows = table_rows(PAGE, "## Compression that starts late", "beta 1 minus SimCLR")
    ours = [runs_of(LATE)[f"cosine-k7-b1-s{seed}"] for seed in (0, 2)]
    theirs = [runs_of(TINY)[f"simclr-k7-s{seed}"] for seed in range(3)]
    metrics = [row["beta 1 minus SimCLR"] for row in rows]
    assert metrics == ["logistic", "kNN 20", "1 % of the labels", "10 %", "Lipschitz"]
    check_differences(rows, [(scores(ours, name), scores(theirs, name)) for name in metrics])
    pairs = [(directions(run), directions(other)) for run in ours for other in theirs]
    assert all(mine[name] < other[name] for mine, other in pairs for name in mine)


def test_simclr_at_kappa_b_5_matches_its_file() -> None:
    rows = table_rows(PAGE, "## SimCLR at kappa_b 5", "seed", "invariance, %")
    runs = {run_key(run): run for run in runs_of(AT_5).values()}
    assert len(rows) == len(runs) == 3
    for row in rows:
        run = runs[row_key(row)]
        assert run["settings"]["train.epochs"] == "80"
        for title, digits in WITH_INVARIANCE.items():
            if title == "logistic":
                continue  # not evaluated
            (expected,) = scores([run], title)
            assert float(row[title]) == pytest.approx(expected, abs=0.5 * 10**-digits + 1e-9)


def test_differences_from_simclr_at_kappa_b_5() -> None:
    runs = runs_of(TINY) | runs_of(LATE)
    theirs = list(runs_of(AT_5).values())
    groups = {
        "adaptive, kappa_b 7, beta 3": [runs[f"adaptive-k7-b3-s{seed}"] for seed in range(3)],
        "adaptive, kappa_b 5, beta 3": [runs[f"adaptive-k5-b3-s{seed}"] for seed in range(3)],
        "late, kappa_b 7, beta 0.3": [runs[f"cosine-k7-b0.3-s{seed}"] for seed in range(3)],
        "late, kappa_b 7, beta 1": [runs[f"cosine-k7-b1-s{seed}"] for seed in (0, 2)],
        "SimCLR, kappa_b 7": [runs[f"simclr-k7-s{seed}"] for seed in range(3)],
    }
    rows = table_rows(PAGE, "## SimCLR at kappa_b 5", "Holm")
    assert len(rows) == 21
    assert {row["method"] for row in rows} == groups.keys()
    columns = [row["metric"] for row in rows]
    ours = [groups[row["method"]] for row in rows]
    pairs = zip(ours, columns, strict=True)
    check_differences(rows, [(scores(group, name), scores(theirs, name)) for group, name in pairs])
    late = groups["late, kappa_b 7, beta 1"]
    found = [(directions(run), directions(other)) for run in late for other in theirs]
    assert all(mine[name] < other[name] for mine, other in found for name in mine)


def test_byol_on_5000_images_matches_its_file() -> None:
    heading = "## BYOL and C-BYOL for 400 epochs"
    runs = {run_key(run): run for run in runs_of("c-byol-5000-images.json").values()}
    rows = table_rows(PAGE, heading, "seed", "rank")
    assert len(rows) == len(runs) == 6
    groups: dict[str, list[dict[str, Any]]] = {"byol": [], "c-byol, adaptive": []}
    for row in rows:
        weight = "likelihood" if row["beta"] else ""
        run = runs[row["method"], "", row["beta"], "", weight, row["seed"]]
        groups[row["method"]].append(run)
        settings = run["settings"]
        assert (settings["data.limit"], settings["train.epochs"]) == ("5000", "400")
        for title, digits in WITH_INVARIANCE.items():
            (expected,) = scores([run], title)
            assert float(row[title]) == pytest.approx(expected, abs=0.5 * 10**-digits + 1e-9)
        rank = run["last_metrics"]["participation_ratio"]
        assert float(row["rank"]) == pytest.approx(rank, abs=0.05 + 1e-9)
    rows = table_rows(PAGE, heading, "C-BYOL minus BYOL")
    assert [row["C-BYOL minus BYOL"] for row in rows] == list(WITH_INVARIANCE)
    theirs, ours = groups.values()
    pairs = [(scores(ours, name), scores(theirs, name)) for name in WITH_INVARIANCE]
    check_differences(rows, pairs)


def check_differences(
    rows: list[dict[str, str]], pairs: list[tuple[list[float], list[float]]]
) -> None:
    """Check that rows show Welch's interval for each pair, and p before and after Holm's rule."""
    found = [welch(ours, theirs) for ours, theirs in pairs]
    corrected = holm([p for *_, p in found])
    for row, (*expected, p), value in zip(rows, found, corrected, strict=True):
        shown = [float(row[each]) for each in ("difference", "low", "high")]
        assert shown == pytest.approx(expected, abs=0.005 + 1e-9)
        assert float(row["p"]) == pytest.approx(p, abs=0.0005 + 1e-9)
        assert float(row["Holm"]) == pytest.approx(value, abs=0.005 + 1e-9)


def holm(p: list[float]) -> list[float]:
    """Return p after Holm's rule: the largest p_j (m - rank of j) over all p_j up to it, or 1."""
    m = len(p)
    steps = {each: each * (m - sum(other < each for other in p)) for each in p}
    return [min(1, max(steps[other] for other in p if other <= each)) for each in p]


def test_targets_repeat_the_final_comparisons() -> None:
    metrics = {  # start of the row, and the metrics that it repeats in this order
        "linear accuracy": ("linear", "logistic"),
        "1 % of the labels": ("1 % of the labels",),
        "corruptions": ("corruptions",),
    }
    targets = table_rows(PAGE, "**Result so far**", "target", "met")
    for start, repeated in metrics.items():
        (row,) = [row for row in targets if row["target"].startswith(start)]
        shown = [float(number) for number in re.findall(r"-?\d+\.\d", row["result"])]
        expected = []
        for metric, data in product(repeated, ("Tiny-ImageNet-100", "CIFAR-10")):
            rows = table_rows(PAGE, f"## Final comparison on {data}", "Holm")
            wanted = ("adaptive, kappa_b 7", "SimCLR", metric)
            (found,) = [r for r in rows if (r["method"], r["minus"], r["metric"]) == wanted]
            expected += [float(found[each]) for each in ("difference", "low", "high")]
        assert shown == pytest.approx(expected, abs=0.055)  # both are rounded


def builtin_runs(epochs: int) -> dict[tuple[str, ...], list[dict[str, Any]]]:
    """Return the runs on the built-in images by (method, kappa_b, beta), sorted by seed."""
    found: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    runs = runs_of(f"builtin-{epochs}-epochs.json").values()
    for run in sorted(runs, key=lambda run: run["name"]):
        assert run["settings"]["train.epochs"] == str(epochs)
        assert run["settings"]["data.source"] == "builtin"
        found.setdefault(run_key(run)[:3], []).append(run)
    return found


# Columns of the tables for the built-in images, and their digits after the point.
BUILTIN_COLUMNS = {"logistic": 1, "kNN 20": 1, "1 % of the labels": 1, "10 %": 1, "Lipschitz": 2}
WITH_INVARIANCE = BUILTIN_COLUMNS | {"invariance, %": 2}
# Epochs, columns and rows of the table of differences.
BUILTIN = [(15, BUILTIN_COLUMNS, 10), (45, WITH_INVARIANCE, 15)]


def scores(runs: list[dict[str, Any]], title: str) -> list[float]:
    """Return the values of a column for several runs."""
    if title == "Lipschitz":
        return [lipschitz(run) for run in runs]
    if title == "invariance, %":
        return [run["invariance"]["invariance relative_distance"] for run in runs]
    return [100 * run["test"][COLUMNS[title]]["value"] for run in runs]


@pytest.mark.parametrize(("epochs", "columns", "_count"), BUILTIN)
def test_builtin_images_match_their_file(epochs: int, columns: dict[str, int], _count: int) -> None:
    runs = builtin_runs(epochs)
    rows = table_rows(PAGE, f"## {epochs} epochs on the built-in images", "seeds", "logistic")
    assert len(rows) == len(runs)
    for row in rows:
        group = runs[row["method"], row["kappa_b"], row["beta"]]
        assert row["seeds"] == str(len(group))
        for title, digits in columns.items():
            expected = mean(scores(group, title))
            assert float(row[title]) == pytest.approx(expected, abs=0.5 * 10**-digits + 1e-9)


def test_search_of_byol_matches_its_file() -> None:
    runs = runs_of("search-byol-builtin.json").values()
    rows = table_rows(PAGE, "## 15 epochs on the built-in images", "target decay")
    for row, run in zip(rows, runs, strict=True):
        settings = run["settings"]
        assert row["learning rate"] == settings["optim.lr"]
        assert row["target decay"] == settings["target.ema_decay"]
        check_row(row, run)
        assert 1.5 < run["last_metrics"]["participation_ratio"] < 3.5


@pytest.mark.parametrize(("epochs", "columns", "count"), BUILTIN)
def test_differences_on_builtin_images(epochs: int, columns: dict[str, int], count: int) -> None:
    runs = builtin_runs(epochs)
    rows = table_rows(PAGE, f"## {epochs} epochs on the built-in images", "minus")
    assert len(rows) == count
    found = {}
    for index, row in enumerate(rows):
        ours = runs[row["method"], row["kappa_b"], row["beta"]]
        method, kappa_b, *beta = row["minus"].replace(", beta", "").split()
        theirs = runs[method, kappa_b, "".join(beta)]
        for title, digits in columns.items():
            shown = [float(number) for number in re.findall(r"[-+]?\d+\.\d+", row[title])]
            *expected, p = welch(scores(ours, title), scores(theirs, title))
            assert shown == pytest.approx(expected, abs=0.5 * 10**-digits + 1e-9), (row, title)
            assert row[title].startswith("**") == (expected[1] * expected[2] > 0), (row, title)
            found[index, title] = p
    for (index, title), p in zip(found, holm(list(found.values())), strict=True):
        assert ("†" in rows[index][title]) == (p < 0.05), (rows[index], title)

"""Differences between runs match scipy and a naive bootstrap; noise gets no verdict."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console
from scipy import stats
from tiny import tiny
from torch import Tensor

from compressive.config import Config, override
from compressive.evaluation.compare import (
    Difference,
    Experiment,
    compare,
    open_groups,
    short_names,
)
from compressive.evaluation.comparison_table import (
    differences_markdown,
    differences_table,
    overall_verdict,
    verdicts,
)
from compressive.evaluation.results import Results
from compressive.evaluation.results_table import results_table
from compressive.metric_info import ONE_SEED
from compressive.rundir.folder import write_config

KEY = "linear/set/top-1"


def write_run(folder: Path, hits: Tensor, config: Config, metric: str = "top-1") -> str:
    write_config(folder, config, torch.device("cpu"))
    results = Results(str(folder))

    results.add("linear", "set", metric, hits, protocol={}, images="the same")
    results.write(folder)
    return str(folder)


def hits(share: float, n: int = 2000, seed: int = 0) -> Tensor:
    return torch.rand(n, generator=torch.Generator().manual_seed(seed)) < share


def compare_runs(*places: str) -> Difference:
    first, second = open_groups(places)
    (found,) = compare(first, second)
    return found


def test_single_runs_are_compared_by_paired_images(tmp_path: Path) -> None:
    """The classifiers agree on most images, so the difference is more certain than either value."""
    a = hits(0.7)
    b = torch.where(hits(0.2, seed=1), hits(0.9, seed=2), a)
    runs = [
        write_run(tmp_path / name, value, tiny(f"bottleneck.beta={beta}"))
        for name, value, beta in (("a", a, 0.1), ("b", b, 1.0))
    ]
    found = compare_runs(*runs)
    delta = b.double() - a.double()
    rng = np.random.default_rng(0)
    naive = [float(delta[rng.integers(0, 2000, 2000)].mean()) for _ in range(4000)]
    assert found.difference == pytest.approx(float(delta.mean()))
    assert found.low is not None
    assert found.high is not None
    # Ends of the naive bootstrap of 4000 draws have a standard error of 2 % of the half width.
    half = (np.quantile(naive, 0.975) - np.quantile(naive, 0.025)) / 2
    assert found.low == pytest.approx(float(np.quantile(naive, 0.025)), abs=0.1 * half)
    assert found.high == pytest.approx(float(np.quantile(naive, 0.975)), abs=0.1 * half)
    # One seed each allows no verdict about the methods.
    assert (found.over, found.verdict) == ("images", "networks differ")


@pytest.mark.parametrize(("wins", "losses"), [(0, 0), (4, 0), (5, 0), (6, 0), (9, 2), (40, 20)])
def test_few_discordant_images_match_a_sign_test(tmp_path: Path, wins: int, losses: int) -> None:
    """McNemar's exact test; a plain t test calls four wins of 1000 a difference (p = 0.045)."""
    a, b = torch.zeros(1000, dtype=torch.bool), torch.zeros(1000, dtype=torch.bool)
    a[:losses], b[losses : losses + wins] = True, True
    runs = [
        write_run(tmp_path / str(i), value, tiny(f"bottleneck.beta={i}"))
        for i, value in enumerate((a, b))
    ]
    found = compare_runs(*runs)
    exact = stats.binomtest(wins, wins + losses).pvalue if wins else 1.0
    assert found.p is not None
    assert (found.verdict == "networks differ") == (exact < 0.05)
    assert found.p == pytest.approx(exact, abs=0.05)


def test_noise_is_undecided(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / str(seed), hits(0.7, seed=seed), tiny(f"bottleneck.beta={seed}"))
        for seed in (1, 2)
    ]
    assert compare_runs(*runs).verdict == "undecided"


@pytest.mark.parametrize(
    ("metric", "verdict"), [("top-1", "better"), ("nll", "worse"), ("RankMe", "higher")]
)
def test_verdict_depends_on_the_direction_of_the_metric(
    tmp_path: Path, metric: str, verdict: str
) -> None:
    runs = [
        write_run(
            tmp_path / f"{i}-{seed}",
            hits(share, seed=seed),
            tiny(f"bottleneck.beta={i}", f"seed={seed}"),
            metric,
        )
        for i, share in enumerate((0.3, 0.7))
        for seed in (0, 1, 2)
    ]
    assert compare_runs(*runs).verdict == verdict
    single = compare_runs(runs[0], *runs[3:])  # one seed of one method is not enough either
    assert (single.over, single.verdict) == ("images", "networks differ")


def test_several_seeds_use_the_welch_interval(tmp_path: Path) -> None:
    shares = {0.1: (0.70, 0.72, 0.74), 1.0: (0.78, 0.80)}
    runs, means = [], []
    for beta, of_seeds in shares.items():
        values = [hits(share, seed=10 + i) for i, share in enumerate(of_seeds)]
        means.append([float(value.double().mean()) for value in values])
        for seed, value in enumerate(values):
            config = override(tiny(f"bottleneck.beta={beta}"), f"seed={seed}")
            runs.append(write_run(tmp_path / f"{beta}-{seed}", value, config))
    found = compare_runs(*runs)
    welch = stats.ttest_ind(means[1], means[0], equal_var=False).confidence_interval()
    assert (found.low, found.high) == pytest.approx((welch.low, welch.high), rel=1e-6)
    assert found.over == "seeds"


def of_seeds(
    folder: Path, values: dict[str, tuple[list[float], list[float]]], *, seeds: int = 3
) -> list[Difference]:
    """Compare two experiments with these values per seed and metric."""
    groups = []
    for side in (0, 1):
        runs = [Results(f"{side}-{seed}") for seed in range(seeds)]
        for task, both in values.items():
            for run, value in zip(runs, both[side], strict=True):
                run.add(task, "set", "top-1", value, protocol={}, n=9)
        groups.append(Experiment(str(side), tuple(runs)))
    return compare(*groups)


def test_verdicts_are_adjusted_for_the_number_of_metrics(tmp_path: Path) -> None:
    """Some of 30 metrics without a difference have p < 0.05 by chance."""
    random = np.random.default_rng(0)
    values = {str(i): tuple(random.normal(0.7, 0.01, (2, 3)).tolist()) for i in range(30)}
    tests: list[Any] = [stats.ttest_ind(*both, equal_var=False) for both in values.values()]
    raw = [float(test.pvalue) for test in tests]
    assert 0 < sum(p < 0.05 for p in raw) < 5
    found = of_seeds(tmp_path, values)
    assert [each.p for each in found] == pytest.approx(
        stats.false_discovery_control(raw).tolist(), rel=1e-5
    )
    assert {each.verdict for each in found} == {"undecided"}
    assert overall_verdict(found) == "B is better in 0 and worse in 0 of 30 metrics"
    values["real"] = [0.70, 0.71, 0.72], [0.90, 0.91, 0.92]
    found = of_seeds(tmp_path, values)
    assert [each.key for each in found if each.verdict == "better"] == ["real/set/top-1"]
    assert overall_verdict(found) == "B is better in 1 and worse in 0 of 31 metrics"


def few_labels(draws: list[float], hit: Tensor, protocol: dict[str, object]) -> Experiment:
    results = Results("run")
    given = {"draws": draws, **protocol}
    results.add("few", "set", "top-1", hit, protocol=given, images="same", draws=draws)
    return Experiment("a", (results,))


def test_few_label_difference_includes_variance_of_draws() -> None:
    """The runs differ by 10 points in one draw and by none in the others: undecided."""
    a, b = torch.full((3000,), 0.5), torch.full((3000,), 0.5 + 0.1 / 3)
    a[::2] -= 0.2
    b[::2] -= 0.2
    draws = [[0.4, 0.4, 0.4], [0.4, 0.4, 0.5]]
    for value, each in zip((a, b), draws, strict=True):
        value += float(np.mean(each)) - value.mean()
    (found,) = compare(few_labels(draws[0], a, {}), few_labels(draws[1], b, {}))
    assert found.verdict == "undecided"
    assert found.low is not None
    assert found.high is not None
    # Student's interval of three draws, which outweigh the images.
    reach = stats.t.ppf(0.975, 2) * np.std([0, 0, 0.1], ddof=1) / np.sqrt(3)
    assert (found.high - found.low) / 2 == pytest.approx(reach, rel=0.01)
    # Draws of another metric, as older files have them for top-5, are not used.
    (other,) = compare(few_labels([0.9, 0.8], a, {}), few_labels([0.9, 0.8], b, {}))
    assert other.verdict == "networks differ"


def test_runs_on_different_images_are_not_compared(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / str(i), hits(0.5 + i / 4), tiny(f"bottleneck.beta={i}"))
        for i in (0, 1)
    ]
    other = (tmp_path / "1" / "results.json").read_text().replace('"the same"', '"others"')
    (tmp_path / "1" / "results.json").write_text(other)
    found = compare_runs(*runs)
    assert (found.low, found.verdict) == (None, "measured differently")


@pytest.mark.slow
def test_seeds_on_different_images_get_no_verdict(tmp_path: Path) -> None:
    runs = [
        write_run(
            tmp_path / f"{beta}-{seed}",
            hits(share, seed=seed),
            tiny(f"bottleneck.beta={beta}", f"seed={seed}"),
        )
        for beta, share in ((0.1, 0.3), (1.0, 0.7))
        for seed in (0, 1, 2)
    ]
    assert compare_runs(*runs).verdict == "better"
    path = tmp_path / "1.0-2" / "results.json"
    path.write_text(path.read_text().replace('"the same"', '"others"'))
    assert compare_runs(*runs).verdict == "measured differently"


@pytest.mark.parametrize(("n", "verdict"), [(19, "too few images"), (20, "networks differ")])
def test_fewer_than_20_images_get_no_verdict(tmp_path: Path, n: int, verdict: str) -> None:
    """If 3 of 6 images improve, a bootstrap gives [17, 83] but a sign test only p = 1/4."""
    a, b = torch.zeros(n, dtype=torch.bool), torch.ones(n, dtype=torch.bool)
    runs = [
        write_run(tmp_path / str(i), value, tiny(f"bottleneck.beta={i}"))
        for i, value in enumerate((a, b))
    ]
    assert compare_runs(*runs).verdict == verdict


def test_different_epochs_get_no_verdict(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / str(i), hits(0.3 + i / 4), tiny(f"bottleneck.beta={i}"))
        for i in (0, 1)
    ]
    path = tmp_path / "1" / "results.json"
    path.write_text(path.read_text().replace('"protocol": {}', '"protocol": {"epochs": 1}'))
    assert compare_runs(*runs).verdict == "measured differently"


@pytest.mark.slow
def test_seeds_without_spread_are_compared_by_images(tmp_path: Path) -> None:
    """Both seeds have the same value, so the interval is over images."""
    runs = [
        write_run(
            tmp_path / f"{beta}-{seed}",
            hits(share),
            tiny(f"bottleneck.beta={beta}", f"seed={seed}"),
        )
        for beta, share in ((0.1, 0.5), (1.0, 0.51))
        for seed in (0, 1)
    ]
    assert compare_runs(*runs).over == "images"


def test_duplicate_run_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", hits(0.5), tiny())
    with pytest.raises(ValueError, match="given twice"):
        open_groups([run, run])


def test_runs_on_different_data_are_separate_experiments(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / name, hits(0.5), tiny(f"data.source={name}", f"seed={seed}"))
        for seed, name in enumerate(("a", "b"))
    ]
    assert len(open_groups(runs)) == 2


A, B = Experiment("a", ()), Experiment("b", ())


def lines(*found: Difference) -> list[str]:
    """Return the rows of the Markdown table."""
    return differences_markdown(A, B, found).split("\n\n")[0].splitlines()[2:]


def difference(key: str, a: float, b: float, half: float | None, over: str = "seeds") -> Difference:
    low, high = (None, None) if half is None else (b - a - half, b - a + half)
    over = "" if half is None else over
    return Difference(key, a, b, b - a, low, high, over, "better", 0.01)


@pytest.mark.parametrize(
    ("key", "a", "b", "half", "row"),
    [
        ("linear/set/top-1", 0.8783, 0.8949, 0.0065, "87.8 | 89.5 | 1.7 [1.0, 2.3]"),
        ("linear/set/nll", 0.35048, 0.30451, 0.0127, "0.350 | 0.305 | -0.046 [-0.059, -0.033]"),
        ("geometry/set/RankMe", 345.47, 340.74, 1.61, "345 | 341 | -5 [-6, -3]"),
        (
            "information/set/positive_cosine",
            0.829,
            0.8798,
            7e-4,
            "0.829 | 0.880 | 0.0508 [0.0501, 0.0515]",
        ),
        ("geometry/set/alignment", 0.25, 0.5, None, "0.250 | 0.500 | 0.250"),
        ("linear/set/nll", 1.5, float("inf"), None, "1.50 | inf | inf"),
        ("geometry/set/alignment", 0.0, 0.0, 0.0, "0 | 0 | 0 [0, 0]"),
    ],
)
def test_values_are_rounded_to_significant_digits(
    key: str, a: float, b: float, half: float | None, row: str
) -> None:
    (line,) = lines(difference(key, a, b, half))
    assert row in line


def test_row_names_omit_what_all_rows_share() -> None:
    keys = ["linear/set/top-1", "linear/set/nll", "kNN 20/set/top-1", "linear/set/mean per class"]
    keys += ["corruption/set-C fog/top-1", "smoothness hue+/set test/lipschitz"]
    keys += [
        "smoothness hue+/set test/lipschitz_squared_kl",
        "extra corruption/set-C spatter/top-1",
    ]
    names = [row.split(" | ")[0] for row in lines(*(difference(k, 0.1, 0.2, 0.01) for k in keys))]
    assert names == [
        *("| linear, top-1", "| linear, nll", "| kNN 20"),
        *("| corruption, fog", "| smoothness hue+, test"),
    ]


def test_row_names_include_the_dataset_if_there_are_several() -> None:
    keys = ["linear/cifar10/top-1", "linear/cifar100/top-1", "linear/a/b/top-1"]
    names = [row.split(" | ")[0] for row in lines(*(difference(k, 0.1, 0.2, 0.01) for k in keys))]
    assert names == ["| linear, cifar10", "| linear, cifar100", "| linear, a/b"]


def test_secondary_metric_is_shown_if_it_is_the_only_one() -> None:
    (row,) = lines(difference("linear/set/mean per class", 0.1, 0.2, None))
    assert row == "| linear | 10.0 | 20.0 | 10.0 | better |"


def test_rows_name_their_interval_kind_if_kinds_differ() -> None:
    found = [
        difference("linear/set/top-1", 0.1, 0.2, 0.01),
        difference("kNN 20/set/top-1", 0.1, 0.2, 0.01, "images"),
    ]
    assert [row.split(" | ")[-1] for row in lines(*found)] == [
        "better (seeds) |",
        "better (images) |",
    ]
    assert "intervals of single metrics over images or seeds" in differences_markdown(A, B, found)


@pytest.mark.parametrize("width", [40, 60, 80])
def test_narrow_terminal_shows_all_digits(width: int) -> None:
    found = [difference("linear/set/nll", 0.35048, 0.30451, 0.0127)]
    console = Console(width=width, file=io.StringIO())
    with console.capture() as shown:
        console.print(differences_table(A, B, found, width=width))
    digits = "".join(shown.get().split())
    assert "0.3500.305" in digits
    assert digits.count("-0.0") == 3
    for part in ("0.046", "0.059", "0.033"):
        assert part in shown.get()


@pytest.mark.parametrize(
    ("places", "names"),
    [
        (["runs/a/evaluation", "runs/b/evaluation"], ["a", "b"]),
        (["runs/a/evaluation", "/other/b/evaluation"], ["runs/a", "/other/b"]),
        (["r/a/evaluation", "r/a/held-out"], ["evaluation", "held-out"]),
        (["runs/a/evaluation", "other/a/evaluation"], ["runs/a", "other/a"]),
        (["runs/a/held-out/results.json", "runs/b/held-out/results.json"], ["a", "b"]),
        (["a", "a/evaluation"], ["a", "a/evaluation"]),
    ],
)
def test_short_names_are_distinct(places: list[str], names: list[str]) -> None:
    assert short_names(places) == names


def evaluate_run(run: Path, share: float, *settings: str) -> Path:
    """Write a run with results where a report finds them; return its folder."""
    write_config(run, tiny(*settings), torch.device("cpu"))
    results = Results(str(run))
    for task, dataset in (("linear", "set"), ("corruption", "set-C fog")):
        results.add(task, dataset, "top-1", hits(share), protocol={}, images="the same")
    results.write(run / "evaluation")
    return run


def test_two_experiments_have_verdicts(tmp_path: Path) -> None:
    a = evaluate_run(tmp_path / "a", 0.3, "bottleneck.beta=0")
    b = evaluate_run(tmp_path / "b", 0.7, "bottleneck.beta=1")
    found = verdicts([a, b])
    assert found is not None
    assert (found.first, found.second) == ("a", "b")
    # Single corruptions have no row; the report plots them.
    ((figure, first, second, delta, verdict),) = found.lines
    shares = [float(hits(share).double().mean()) for share in (0.3, 0.7)]
    assert (figure, verdict) == ("linear", "networks differ")
    assert [first, second] == [f"{100 * share:.1f}" for share in shares]
    assert delta.startswith(f"{100 * (shares[1] - shares[0]):.1f} [")
    assert found.note.startswith("on set; ")
    assert "; 95 % intervals of single metrics over images; " in found.note
    assert found.note.endswith("; verdicts adjusted for 2 comparisons (Benjamini-Hochberg)")
    assert found.headline == f"these two networks differ in 2 of 2 metrics; {ONE_SEED}"


@pytest.mark.slow
def test_other_than_two_experiments_have_no_verdicts(tmp_path: Path) -> None:
    a, b, c = (
        evaluate_run(tmp_path / str(beta), 0.5, f"bottleneck.beta={beta}") for beta in (0, 1, 2)
    )
    same = evaluate_run(tmp_path / "seed", 0.6, "bottleneck.beta=0", "seed=1")
    assert verdicts([a]) is None
    assert verdicts([a, same]) is None  # one experiment
    assert verdicts([a, b, c]) is None
    assert verdicts([a, a]) is None
    assert verdicts([a, b]) is not None
    (b / "evaluation" / "results.json").write_text("{")
    assert verdicts([a, b]) is None
    (b / "evaluation" / "results.json").unlink()
    assert verdicts([a, b]) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("classifier", "head", "augmentation", "epochs", "labels", "bank", "bound", "types"),
        *("left_out", "table", "source", "value", "train_images", "views", "norm"),
        "learned_from",
    ],
)
def test_different_protocols_get_no_verdict(tmp_path: Path, name: str) -> None:
    runs = [
        write_run(tmp_path / str(i), hits(0.3 + i / 4), tiny(f"bottleneck.beta={i}"))
        for i in (0, 1)
    ]
    assert compare_runs(*runs).verdict == "networks differ"
    for i, run in enumerate(runs):
        path = Path(run) / "results.json"
        path.write_text(
            path.read_text().replace('"protocol": {}', f'"protocol": {{"{name}": {i}}}')
        )
    assert compare_runs(*runs).verdict == "measured differently"


def test_results_without_learned_from_can_be_compared(tmp_path: Path) -> None:
    """Older results lack `learned_from`, which alone does not make them different."""
    runs = [
        write_run(tmp_path / str(i), hits(0.3 + i / 4), tiny(f"bottleneck.beta={i}"))
        for i in (0, 1)
    ]
    path = Path(runs[1]) / "results.json"
    path.write_text(
        path.read_text().replace('"protocol": {}', '"protocol": {"learned_from": "these"}')
    )
    assert compare_runs(*runs).verdict == "networks differ"


def test_notes_come_only_from_the_last_command() -> None:
    results = Results("a", command="compressive evaluate a --data b")
    results.add("kNN 20", "b", "top-1", 0.5, protocol={"notes": ["b"]}, n=10)
    results.command = "compressive evaluate a"
    results.add("kNN 20", "a", "top-1", 0.5, protocol={"notes": ["a"]}, n=10)
    assert results.notes == ["a"]


def test_brier_score_is_printed_times_100(tmp_path: Path) -> None:
    results = Results("a")
    results.add("linear", "set", "brier", 0.312, protocol={}, n=10)
    results.add("linear", "set", "ece", 0.043, protocol={}, n=10)
    console = Console(width=120, file=io.StringIO())
    console.print(results_table(results))
    text = console.file.getvalue()  # pyright: ignore
    assert "31.2" in text
    assert "4.3" in text
    scores = torch.tensor([0.1, 0.5]).repeat(50)
    runs = [
        write_run(tmp_path / str(i), scores + i / 4, tiny(f"bottleneck.beta={i}"), "brier")
        for i in (0, 1)
    ]
    first, second = open_groups(runs)
    assert "| 30.0 | 55.0 | 25.0 [" in differences_markdown(first, second, compare(first, second))

"""Plot the effect of beta on CIFAR-10 (held-out labels) from the result files.

beta.svg: 200 epochs, kappa_b = 5. temperature.svg: 100 epochs, kappa_b = 3, 5 and 10. c-byol.svg:
100 epochs of C-BYOL.

uv run --group docs python docs/pictures/beta.py
"""

import json
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results" / "2026-11-15-cifar10"
SEARCH = RESULTS / "search"
INK, BLUE, ORANGE, GREEN, GRAY = "#24292f", "#1f6feb", "#d4691e", "#2da44e", "#8b949e"
LINES = {
    "logistic": ("logistic regression, all labels", BLUE),
    "kNN 20": ("nearest neighbors", ORANGE),
    "few labels 10%": ("10 % of the labels", GRAY),
    "few labels 1%": ("1 % of the labels", GREEN),
}
Accuracies = dict[str, tuple[float, float, float]]  # task -> value, low, high, in percent


def main() -> None:
    """Write the figures next to this file."""
    matplotlib.rcParams.update(
        {"font.family": "sans-serif", "font.size": 10.5, "svg.hashsalt": "0"}
    )
    matplotlib.rcParams.update({"text.color": INK, "axes.edgecolor": GRAY, "axes.labelcolor": INK})
    save(long_runs(), "beta")
    save(temperatures(), "temperature")
    save(bootstrap(), "c-byol")


def long_runs() -> Figure:
    """Plot accuracy and nats over beta after 200 epochs."""
    betas = ("0", "0.1", "0.3", "1")
    last = readings(RESULTS)
    nats = {
        name: [last[f"beta{b}"][name] for b in betas]
        for name in ("reducible_residual", "predictive")
    }
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 4), width_ratios=(1.5, 1))
    plain = top1(RESULTS / "held-out-simclr.json")
    curves(left, [top1(RESULTS / f"held-out-beta{b}.json") for b in betas])
    for task, (_, color) in LINES.items():
        left.axhline(plain[task][0], color=color, lw=1, ls=(0, (4, 3)))
    left.set_ylim(83.4, 92)
    left.legend(frameon=False, fontsize=9, loc=(0.02, 0.3))
    left.text(3.28, plain["logistic"][0] + 0.1, "SimCLR", color=GRAY, ha="right", fontsize=9)
    xs = range(len(betas))
    right.plot(xs, nats["reducible_residual"], "o-", color=BLUE, lw=1.8, ms=5)
    right.set_ylabel("reducible information, nats", color=BLUE)
    right.set_ylim(0.3, 0.45)
    other = right.twinx()
    other.plot(xs, nats["predictive"], "s--", color=ORANGE, lw=1.4, ms=4)
    other.set_ylabel("predictive information, nats", color=ORANGE)
    other.set_ylim(3.3, 3.8)
    other.spines["top"].set_visible(False)
    for axes in (left, right):
        axes.set_xticks(xs, betas)
        axes.set_xlim(-0.3, len(betas) - 0.7)
        axes.set_xlabel("beta (evenly spaced)")
    return figure


def temperatures() -> Figure:
    """Plot beta at the paper's temperature, and all runs by their positive cosine."""
    ticks = {
        "SimCLR": "simclr-kappa_b10",
        "0": "kappa_b10-beta0",
        "0.3": "kappa_b10-beta0.3",
        "1": "kappa_b10-beta1",
        "3": "kappa_b10-beta3",
    }
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 4), width_ratios=(1, 1))
    curves(left, [top1(SEARCH / f"{name}.json") for name in ticks.values()])
    left.set_xticks(range(len(ticks) + 1), [*ticks, "10"])
    left.set_xlim(-0.3, len(ticks) + 0.4)
    left.text(len(ticks), 81.5, "collapse", color=INK, ha="center", va="center", rotation=90)
    left.set_xlabel("beta (evenly spaced)")
    left.set_title("kappa_b = 10, the paper's temperature", fontsize=10.5)
    left.set_ylim(71.2, 88.5)
    left.legend(frameon=False, fontsize=8.5, loc="lower right")
    last = readings(SEARCH)
    for name, reading in last.items():
        kappa_b = 10 if "kappa_b10" in name else 3 if "kappa_b3" in name else 5
        color = {3: GREEN, 5: BLUE, 10: ORANGE}[kappa_b]
        value, low, high = top1(SEARCH / f"{name}.json")["logistic"]
        plain = name.startswith("simclr")
        right.errorbar(
            reading["positive_cosine"],
            value,
            [[value - low], [high - value]],
            fmt="o",
            ms=7,
            color=color,
            mfc="white" if plain else color,
            elinewidth=0.8,
        )
    for label, x, y, color in (
        ("kappa_b = 10: SimCLR", 0.834, 85.1, ORANGE),
        ("beta 0", 0.844, 86.2, ORANGE),
        ("beta 0.3", 0.8635, 86.15, ORANGE),
        ("beta 1", 0.8875, 86.6, ORANGE),
        ("beta 3", 0.93, 84.2, ORANGE),
        ("kappa_b = 5", 0.89, 88.5, BLUE),
        ("kappa_b = 3", 0.894, 87.6, GREEN),
    ):
        right.text(x, y, label, color=color, fontsize=9)
    right.set_title("all runs: hollow SimCLR, filled compressed", fontsize=10.5)
    right.set_xlabel("positive cosine: mean cosine of the two views")
    right.set_ylabel("logistic regression, %")
    return figure


def bootstrap() -> Figure:
    """Plot accuracy over beta for C-BYOL, and BYOL."""
    ticks = {"BYOL": "byol-sgd"} | {b: f"c-byol-beta{b}" for b in ("0", "0.01", "0.1", "1")}
    figure, axes = plt.subplots(figsize=(6.2, 4))
    curves(axes, [top1(SEARCH / f"{name}.json") for name in ticks.values()])
    axes.set_xticks(range(len(ticks)), list(ticks))
    axes.set_xlabel("beta of C-BYOL (evenly spaced)")
    axes.set_ylim(72.5, 91)
    axes.legend(frameon=False, fontsize=8.5, loc="upper center", ncols=2)
    return figure


def curves(axes: Axes, runs: list[Accuracies]) -> None:
    """Plot the accuracy of each task over the runs, with its interval."""
    xs = range(len(runs))
    for task, (label, color) in LINES.items():
        value, low, high = ([run[task][i] for run in runs] for i in range(3))
        axes.plot(xs, value, "o-", color=color, lw=1.8, ms=5, label=label)
        axes.fill_between(xs, low, high, color=color, alpha=0.13, lw=0)
    axes.set_ylabel("top-1 accuracy, %")


def top1(path: Path) -> Accuracies:
    """Return the accuracy of each task in percent, with its interval."""
    records = json.loads(path.read_text())["records"]
    return {
        r["task"]: (100 * r["value"], 100 * r["low"], 100 * r["high"])
        for r in records
        if r["metric"] == "top-1"
    }


def readings(folder: Path) -> dict[str, dict[str, float]]:
    """Return the metrics at the end of training, by run."""
    return json.loads((folder / "last-readings.json").read_text())["runs"]


def save(figure: Figure, name: str) -> None:
    """Save without the upper and right sides of the frame and without a date."""
    for axes in figure.axes:
        axes.spines["top"].set_visible(False)
    figure.axes[0].spines["right"].set_visible(False)
    if len(figure.axes) == 2:
        figure.axes[1].spines["right"].set_visible(False)
    figure.tight_layout()
    figure.savefig(HERE / f"{name}.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()

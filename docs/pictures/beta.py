"""Draw beta at 200 epochs of CIFAR-10, judged by held-out labels, from the files of the results.

uv run --group docs python docs/pictures/beta.py
"""

import json
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results" / "2026-11-15-cifar10"
BETAS = ("0", "0.1", "0.3", "1")
INK, BLUE, ORANGE, GREEN, GRAY = "#24292f", "#1f6feb", "#d4691e", "#2da44e", "#8b949e"
LINES = {
    "logistic": ("logistic regression, all labels", BLUE),
    "kNN 20": ("nearest neighbors", ORANGE),
    "few labels 10%": ("10 % of the labels", GRAY),
    "few labels 1%": ("1 % of the labels", GREEN),
}


def top1(name: str) -> dict[str, tuple[float, float, float]]:
    """Accuracy of each task in per cent, with its interval."""
    records = json.loads((RESULTS / f"held-out-{name}.json").read_text())["records"]
    return {
        r["task"]: (100 * r["value"], 100 * r["low"], 100 * r["high"])
        for r in records
        if r["metric"] == "top-1"
    }


def main() -> None:
    """Write beta.svg beside this file."""
    matplotlib.rcParams.update(
        {"font.family": "sans-serif", "font.size": 10.5, "svg.hashsalt": "0"}
    )
    matplotlib.rcParams.update({"text.color": INK, "axes.edgecolor": GRAY, "axes.labelcolor": INK})
    last = json.loads((RESULTS / "last-readings.json").read_text())["runs"]  # of training
    nats = {
        name: [last[f"beta{beta}"][name] for beta in BETAS] for name in ("movable", "predictive")
    }
    runs, plain = [top1(f"beta{beta}") for beta in BETAS], top1("simclr")
    xs = range(len(BETAS))
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.5, 4), width_ratios=(1.5, 1))
    for task, (label, color) in LINES.items():
        value, low, high = ([run[task][i] for run in runs] for i in range(3))
        left.plot(xs, value, "o-", color=color, lw=1.8, ms=5, label=label)
        left.fill_between(xs, low, high, color=color, alpha=0.13, lw=0)
        left.axhline(plain[task][0], color=color, lw=1, ls=(0, (4, 3)))
    left.set_ylabel("top-1 accuracy, %")
    left.set_ylim(83.4, 92)
    left.legend(frameon=False, fontsize=9, loc=(0.02, 0.3))
    left.text(3.28, plain["logistic"][0] + 0.1, "SimCLR", color=GRAY, ha="right", fontsize=9)
    right.plot(xs, nats["movable"], "o-", color=BLUE, lw=1.8, ms=5)
    right.set_ylabel("movable information, nats", color=BLUE)
    right.set_ylim(0.3, 0.45)
    other = right.twinx()
    other.plot(xs, nats["predictive"], "s--", color=ORANGE, lw=1.4, ms=4)
    other.set_ylabel("predictive information, nats", color=ORANGE)
    other.set_ylim(3.3, 3.8)
    for axes in (left, right):
        axes.set_xticks(xs, BETAS)
        axes.set_xlim(-0.3, len(BETAS) - 0.7)
        axes.set_xlabel("beta (evenly spaced)")
    for axes in (left, right, other):
        axes.spines["top"].set_visible(False)
    left.spines["right"].set_visible(False)
    figure.tight_layout()
    figure.savefig(HERE / "beta.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()

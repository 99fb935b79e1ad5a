"""Plot a sweep of beta on CIFAR-10 from its results.

uv run --group docs python docs/pictures/compression.py
"""

import json
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results" / "beta_cifar10_h200_2026-11-15.json"
INK, BLUE, ORANGE, GREEN, GRAY = "#24292f", "#1f6feb", "#d4691e", "#2da44e", "#8b949e"
LINES = {
    "logistic, top-1": ("all labels", BLUE),
    "few labels 1%, top-1": ("1 % of the labels", GREEN),
    "corruptions, top-1": ("14 corruptions", ORANGE),
}
CHANGES = [
    f"{name}{sign}" for name in ("brightness", "contrast", "saturation", "hue") for sign in "+-"
]


def band(axes, xs, triples, color, label=None, scale=1.0) -> None:
    """Plot a line with its interval."""
    value, low, high = ([scale * triple[i] for triple in triples] for i in range(3))
    axes.plot(xs, value, "o-", color=color, lw=1.8, ms=5, label=label)
    axes.fill_between(xs, low, high, color=color, alpha=0.15, lw=0)


def main() -> None:
    """Write compression.svg next to this file."""
    matplotlib.rcParams.update(
        {"font.family": "sans-serif", "font.size": 10.5, "svg.hashsalt": "0"}
    )
    matplotlib.rcParams.update({"text.color": INK, "axes.edgecolor": GRAY, "axes.labelcolor": INK})
    runs = json.loads(RESULTS.read_text())["runs"]
    done = {beta: run for beta, run in runs.items() if "collapsed" not in run}
    names, xs = list(runs), list(range(len(done)))
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.6))
    for key, (label, color) in LINES.items():
        band(left, xs, [run[key] for run in done.values()], color, label, scale=100)
    left.set_ylabel("top-1 accuracy, %")
    left.set_ylim(60, 84)
    left.legend(frameon=False, loc=(0.02, 0.52), fontsize=9)
    band(middle, xs, [run["information, reducible_residual"] for run in done.values()], BLUE)
    middle.set_ylabel("reducible information, nats")
    middle.set_ylim(0.92, 1.06)
    for axes in (left, middle):
        axes.set_xticks(range(len(names)), names)
        axes.set_xlim(-0.3, len(names) - 0.7)
        axes.set_xlabel("beta (evenly spaced)")
        axes.axvspan(len(done) - 0.5, len(names) - 0.7, color=GRAY, alpha=0.15, lw=0)
        middle_of_collapse = (len(done) + len(names) - 1) / 2
        low, high = axes.get_ylim()
        axes.text(
            middle_of_collapse, (low + high) / 2, "collapse", ha="center", color=GRAY, rotation=90
        )
    first = [done["0"][f"smoothness {change}, lipschitz"][0] for change in CHANGES]
    last = [done["0.3"][f"smoothness {change}, lipschitz"][0] for change in CHANGES]
    places = range(len(CHANGES))
    right.barh([p - 0.2 for p in places], first, 0.36, color=GRAY, label="beta 0")
    right.barh([p + 0.2 for p in places], last, 0.36, color=BLUE, label="beta 0.3")
    right.set_yticks(places, CHANGES)
    right.invert_yaxis()
    right.set_xlabel("local Lipschitz estimate")
    right.set_xlim(0, 5)
    right.legend(frameon=False, fontsize=9, loc="upper right")
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(HERE / "compression.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()

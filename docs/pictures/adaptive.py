"""Draw accuracy over smoothness of runs on Tiny-ImageNet-100, from the result file.

uv run --group docs python docs/pictures/adaptive.py
"""

import json
from pathlib import Path
from statistics import mean

import matplotlib
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results" / "2026-11-17-compression" / "search-3-tiny-imagenet-100.json"
INK, BLUE, ORANGE, GREEN = "#24292f", "#1f6feb", "#d4691e", "#2da44e"
# Run: label, color, marker.
RUNS = {
    "simclr-k7-s1": ("SimCLR, kappa_b 7", ORANGE, "o"),
    "dcl-k10-s1": ("DCL, kappa_b 10", GREEN, "s"),
    "adaptive-k10-b3-e16384-s1": ("adaptive, kappa_b 10, beta 3, kappa_e 16384", BLUE, "o"),
    "adaptive-k10-b3-s0": ("adaptive, kappa_b 10, beta 3 (seed 0)", BLUE, "^"),
    "adaptive-k10-b10-s1": ("adaptive, kappa_b 10, beta 10", BLUE, "D"),
    "adaptive-k15-b3-s1": ("adaptive, kappa_b 15, beta 3", BLUE, "X"),
}
PANELS = {"logistic top-1": "all labels", "few labels 1% top-1": "1 % of the labels"}


def main() -> None:
    """Write adaptive.svg next to this file."""
    matplotlib.rcParams.update(
        {"font.size": 10.5, "svg.hashsalt": "0", "svg.fonttype": "none", "text.color": INK}
    )
    runs = {run["name"]: run for run in json.loads(RESULTS.read_text())["runs"]}
    figure, panels = plt.subplots(1, 2, figsize=(9.5, 4.6))
    for axes, (metric, title) in zip(panels, PANELS.items(), strict=True):
        for name, (label, color, marker) in RUNS.items():
            smoothness = runs[name]["smoothness"].items()
            x = mean(value for key, value in smoothness if key.endswith(" lipschitz"))
            found = runs[name]["held_out"][metric]
            y, low, high = (100 * found[key] for key in ("value", "low", "high"))
            error = [[y - low], [high - y]]
            axes.errorbar(x, y, error, fmt=marker, color=color, ms=7, lw=1, label=label)
        axes.set(xlim=(1.2, 3.2), xlabel="Lipschitz estimate (lower is smoother)")
        axes.set_title(f"logistic regression, {title}", fontsize=10.5)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("held-out accuracy, %")
    figure.legend(
        *panels[0].get_legend_handles_labels(), loc="lower center", ncols=2, frameon=False
    )
    figure.tight_layout(rect=(0, 0.2, 1, 1))
    figure.savefig(HERE / "adaptive.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()

"""Draw accuracy over smoothness of the final comparisons, from the result files.

uv run --group docs python docs/pictures/adaptive.py
"""

import json
from pathlib import Path
from statistics import mean

import matplotlib
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results" / "2026-11-17-compression"
INK, BLUE, ORANGE, GREEN, GRAY = "#24292f", "#1f6feb", "#d4691e", "#2da44e", "#8c959f"
PURPLE, PINK = "#8250df", "#bf3989"
LIGHT, DARK = "#79c0ff", "#0a3069"
# Method: label, color, marker.
METHODS = {
    "simclr": ("SimCLR at its best temperature", ORANGE, "o"),
    "dcl": ("DCL", GREEN, "s"),
    "constant": ("C-SimCLR, constant beta", GRAY, "X"),
    "cosine-k7-b0.3": ("C-SimCLR, late beta of 0.3, kappa_b 7", PINK, "v"),
    "cosine-k7-b1": ("C-SimCLR, late beta of 1, kappa_b 7", PURPLE, "^"),
    "adaptive-k10": ("C-SimCLR, adaptive beta, kappa_b 10", DARK, "D"),
    "adaptive-k7": ("C-SimCLR, adaptive beta, kappa_b 7 (default)", BLUE, "D"),
    "adaptive-k5": ("C-SimCLR, adaptive beta, kappa_b 5", LIGHT, "D"),
}
# Result file, limits of x and y.
PANELS = {
    "CIFAR-10": ("final-cifar10.json", (1.38, 1.57), (87.0, 88.5)),
    "Tiny-ImageNet-100": ("final-tiny-imagenet-100.json", (1.95, 3.15), (48.5, 51.5)),
}


def main() -> None:
    """Write adaptive.svg next to this file."""
    matplotlib.rcParams.update(
        {"font.size": 10.5, "svg.hashsalt": "0", "svg.fonttype": "none", "text.color": INK}
    )
    figure, panels = plt.subplots(1, 2, figsize=(9.5, 4.8))
    for axes, (data, (file, across, up)) in zip(panels, PANELS.items(), strict=True):
        late = json.loads((RESULTS / "late-compression.json").read_text())["runs"]
        runs = json.loads((RESULTS / file).read_text())["runs"]
        runs += [run for run in late if run["settings"]["data.source"] == data and "test" in run]
        for method, (label, color, marker) in METHODS.items():
            points = [
                (_lipschitz(run), 100 * run["test"]["logistic top-1"]["value"])
                for run in runs
                if run["name"].removeprefix("cifar-").startswith(method)
            ]
            x, y = [p[0] for p in points], [p[1] for p in points]
            axes.plot(x, y, marker, color=color, ms=8, label=label)
        axes.set(xlim=across, ylim=up, xlabel="Lipschitz estimate (lower is smoother)")
        axes.set_title(data, fontsize=10.5)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("logistic regression, test accuracy, %")
    figure.legend(
        *panels[1].get_legend_handles_labels(), loc="lower center", ncols=2, frameon=False
    )
    figure.tight_layout(rect=(0, 0.2, 1, 1))
    figure.savefig(HERE / "adaptive.svg", metadata={"Date": None})


def _lipschitz(run: dict[str, dict[str, float]]) -> float:
    ends = ("+ lipschitz", "- lipschitz")
    return mean(value for name, value in run["smoothness"].items() if name.endswith(ends))


if __name__ == "__main__":
    main()

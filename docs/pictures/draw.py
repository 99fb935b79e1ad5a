"""Draw the information meter: uv run --group docs python docs/pictures/draw.py."""

import math
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import torch

from compressive import VonMisesFisher
from compressive.objectives import csimclr_loss

HERE = Path(__file__).parent
LABELS = {10.0: (8, 47), 100.0: (0, 27), 1000.0: (0, -22)}
INK, BLUE, ORANGE, GREEN, GRAY = "#24292f", "#1f6feb", "#d4691e", "#2da44e", "#8b949e"


def views(batch: int, dim: int, cosine: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return pairs of random directions with a given cosine."""
    mu, other = torch.nn.functional.normalize(torch.randn(2, batch, dim), dim=-1)
    across = other - (other * mu).sum(-1, keepdim=True) * mu
    across = torch.nn.functional.normalize(across, dim=-1)
    return mu, cosine * mu + math.sqrt(1 - cosine**2) * across


def sphere(axes) -> None:
    """Plot samples on the sphere in R^3 at three concentrations."""
    grid = torch.linspace(0, 2 * math.pi, 200)
    for height in (-0.6, -0.3, 0.0, 0.3, 0.6):
        ring = math.sqrt(1 - height**2)
        axes.plot(
            ring * grid.cos(), ring * grid.sin() * 0.25 + height, color=GRAY, lw=0.4, alpha=0.6
        )
    axes.plot(grid.cos(), grid.sin(), color=GRAY, lw=0.8)
    means = torch.tensor([[-0.62, 0.45, 0.64], [0.55, 0.35, 0.76], [0.05, -0.6, 0.8]])
    for mu, kappa, color in zip(means, (10.0, 100.0, 1000.0), (ORANGE, GREEN, BLUE), strict=True):
        z = VonMisesFisher(mu / mu.norm(), kappa).sample((400,))
        z = z[z[:, 2] > 0]
        axes.scatter(z[:, 0], z[:, 1], s=4, color=color, alpha=0.55, linewidths=0)
        axes.annotate(
            rf"$\kappa$ = {kappa:g}",
            mu[:2].tolist(),
            color=INK,
            fontsize=9,
            ha="center",
            xytext=LABELS[kappa],
            textcoords="offset points",
        )
    axes.set_aspect("equal")
    axes.axis("off")
    axes.set_title("e(z|x): how sharply a view is kept", fontsize=10, color=INK)


def meter(axes) -> None:
    """Plot reducible residual and predictive information over the cosine of two views."""
    cosines = torch.linspace(0, 1, 41)
    outs = [
        csimclr_loss(
            *views(512, 256, c), kappa_e=1024.0, kappa_b=10.0, residual_estimator="analytic"
        )
        for c in cosines.tolist()
    ]
    predictive = [out.predictive_x.mean() for out in outs]
    reducible_residual = [out.reducible_residual.mean() for out in outs]
    axes.plot(cosines, predictive, color=BLUE, lw=2, label="I(Y;Z), shared with the other view")
    axes.plot(cosines, reducible_residual, color=ORANGE, lw=2, label="I(X;Z|Y), reducible part")
    axes.axhline(outs[0].bound, color=GRAY, lw=0.8, ls="--")
    axes.text(
        1,
        outs[0].bound + 0.15,
        "log K: no estimate of I(Y;Z) exceeds it",
        fontsize=8,
        color=GRAY,
        ha="right",
    )
    axes.set_xlabel("cosine of the two views", fontsize=9)
    axes.set_ylabel("nats per image", fontsize=9)
    axes.legend(frameon=False, fontsize=8, loc="lower center", bbox_to_anchor=(0.55, 0.02))
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.set_title("the information meter", fontsize=10, color=INK)


def main() -> None:
    """Write meter.svg next to this file."""
    matplotlib.rcParams["svg.hashsalt"] = "compressive"
    torch.manual_seed(0)
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.4, 3.4), width_ratios=(1, 1.35))
    sphere(left)
    meter(right)
    figure.tight_layout()
    figure.savefig(HERE / "meter.svg", metadata={"Date": None}, facecolor="white")


if __name__ == "__main__":
    main()

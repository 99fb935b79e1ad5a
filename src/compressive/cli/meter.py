"""The information meter on random directions: what the concentrations mean."""

import math

import torch
from rich.table import Table
from torch import Tensor

from compressive.objectives import csimclr_loss

_AGREEMENTS = (0.0, 0.25, 0.5, 0.75, 1.0)


def meter_table(dim: int, batch: int, kappa_e: float, kappa_b: float, seed: int) -> Table:
    """What C-SimCLR keeps and tells of random directions that agree more and more."""
    if dim < 2 or batch < 1:
        raise ValueError(f"--dim must be 2 or more and --batch 1 or more, got {dim} and {batch}")
    if seed < 0:
        raise ValueError(f"--seed must be 0 or more, got {seed}")
    torch.manual_seed(seed)
    table = Table(
        title=f"C-SimCLR, n = {dim}, kappa_e = {kappa_e:g}, kappa_b = {kappa_b:g}, {batch} images",
        caption="nats per image; closed-form residual, sampled z",
    )
    for name in (
        "agreement\nmu_x.mu_y",
        "residual\nI(X;Z|Y)",
        "reducible\npart",
        "predictive\nI(Y;Z)",
    ):
        table.add_column(name, justify="right")
    bound = 0.0
    for agreement in _AGREEMENTS:
        mu_x, mu_y = _views(batch, dim, agreement)
        out = csimclr_loss(
            mu_x, mu_y, kappa_e=kappa_e, kappa_b=kappa_b, residual_estimator="analytic"
        )
        bound = out.bound
        means = (
            x.mean().item() for x in (out.residual_x, out.reducible_residual, out.predictive_x)
        )
        table.add_row(f"{agreement:.2f}", *(f"{value:.2f}" for value in means))
    table.add_section()
    table.add_row("at most", "", "", f"log K = {bound:.2f}")
    return table


def _views(batch: int, dim: int, agreement: float) -> tuple[Tensor, Tensor]:
    """Pairs of random directions at a given cosine."""
    mu_x, other = torch.nn.functional.normalize(torch.randn(2, batch, dim), dim=-1)
    across = other - (other * mu_x).sum(-1, keepdim=True) * mu_x
    across = torch.nn.functional.normalize(across, dim=-1)
    return mu_x, agreement * mu_x + math.sqrt(1 - agreement**2) * across

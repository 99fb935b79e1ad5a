"""The information meter on random directions: shows what the concentrations mean."""

import math

import torch
import torch.nn.functional as F
from rich.table import Table

from compressive.objectives import csimclr_loss

_COSINES = (0.0, 0.25, 0.5, 0.75, 1.0)


def meter_table(dim: int, batch: int, kappa_e: float, kappa_b: float, seed: int) -> Table:
    """Return residual and predictive information for pairs of increasing cosine similarity."""
    torch.manual_seed(seed)
    table = Table(
        title=f"C-SimCLR, n = {dim}, kappa_e = {kappa_e:g}, kappa_b = {kappa_b:g}, {batch} images",
        caption="nats per image; closed-form residual, sampled z",
    )
    names = "cosine\nmu_x.mu_y", "residual\nI(X;Z|Y)", "reducible\npart", "predictive\nI(Y;Z)"
    for name in names:
        table.add_column(name, justify="right")
    bound = 0.0
    for cosine in _COSINES:
        mu_x, other = F.normalize(torch.randn(2, batch, dim), dim=-1)
        across = F.normalize(other - (other * mu_x).sum(-1, keepdim=True) * mu_x, dim=-1)
        mu_y = cosine * mu_x + math.sqrt(1 - cosine**2) * across
        out = csimclr_loss(
            mu_x, mu_y, kappa_e=kappa_e, kappa_b=kappa_b, residual_estimator="analytic"
        )
        bound = out.bound
        measured = out.residual_x, out.reducible_residual, out.predictive_x
        table.add_row(f"{cosine:.2f}", *(f"{x.mean().item():.2f}" for x in measured))
    table.add_section()
    table.add_row("at most", "", "", f"log K = {bound:.2f}")
    return table

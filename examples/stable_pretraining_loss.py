"""A loss of stable-pretraining, compressed: sample z, pass it to the loss, and add the residual.

pip install stable-pretraining; python examples/stable_pretraining_loss.py
"""

import stable_pretraining as spt
import torch
import torch.nn.functional as F
from torch import nn
from torchvision.models import resnet18

from compressive import VonMisesFisher
from compressive.objectives import residual_information

KAPPA_E, KAPPA_B, BETA = 1024.0, 10.0, 0.1


def main(steps: int = 8) -> list[float]:
    """Train on random images; return the losses."""
    torch.manual_seed(0)
    images = torch.rand(32, 3, 32, 32)
    network = nn.Sequential(resnet18(num_classes=128), nn.ReLU(), nn.Linear(128, 64))
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    criterion = spt.losses.NTXEntLoss(temperature=1 / KAPPA_B)  # or any other of their losses
    losses = []
    for number in range(steps):
        x, y = (images + 0.1 * torch.randn_like(images) for _ in range(2))
        mu_x, mu_y = (F.normalize(network(view), dim=-1) for view in (x, y))
        e_x, e_y = VonMisesFisher(mu_x, KAPPA_E), VonMisesFisher(mu_y, KAPPA_E)
        b_x, b_y = VonMisesFisher(mu_x, KAPPA_B), VonMisesFisher(mu_y, KAPPA_B)
        z_x, z_y = e_x.rsample(), e_y.rsample()
        # before: loss = criterion(mu_x, mu_y)
        residual = residual_information(z_x, e_x, b_y) + residual_information(z_y, e_y, b_x)
        loss = criterion(z_x, z_y) + BETA * residual.mean() / 2  # their loss averages the views
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        print(f"step {number}: loss {loss.item():.3f}, residual {residual.mean() / 2:.1f} nats")
    return losses


if __name__ == "__main__":
    main()

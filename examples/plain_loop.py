"""C-SimCLR in a plain PyTorch loop with torch.compile.

python examples/plain_loop.py [--steps 20] [--compile no]
"""

import argparse
from collections.abc import Callable

import torch
from torch import Tensor, nn

from compressive.objectives import csimclr_loss
from compressive.optim import LARS, parameter_groups


class Model(nn.Module):
    """A backbone with a projection, and the loss of two views."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(  # use your network here
            *(nn.Conv2d(3, 32, 3, stride=2), nn.BatchNorm2d(32), nn.ReLU()),
            *(nn.Conv2d(32, 64, 3, stride=2), nn.BatchNorm2d(64), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        )
        self.head = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss and the residual information in nats."""
        r_x, r_y = self.head(self.backbone(torch.cat([x, y]))).chunk(2)
        found = csimclr_loss(r_x, r_y, kappa_e=1024.0, kappa_b=10.0, beta=0.1)
        return found.loss, found.residual_x.detach().mean()


def views(images: Tensor) -> tuple[Tensor, Tensor]:
    """Return two noisy, mirrored or not, versions of each image; use your augmentations here."""

    def one() -> Tensor:
        is_flipped = torch.rand(len(images), 1, 1, 1) < 0.5
        return torch.where(is_flipped, images.flip(-1), images) + 0.1 * torch.randn_like(images)

    return one(), one()


def main(steps: int = 20, *, compiled: bool = True) -> list[float]:
    """Train on random images; return the losses."""
    torch.manual_seed(0)
    images = torch.rand(64, 3, 1, 1) + 0.3 * torch.rand(64, 3, 32, 32)  # one color each
    model = Model()
    optimizer = LARS(parameter_groups(model, weight_decay=1e-6), lr=0.1)
    step: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = model
    if compiled:
        step = torch.compile(model, fullgraph=True)
    losses = []
    for number in range(steps):
        loss, residual = step(*views(images))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if number % 5 == 0:
            print(f"step {number}: loss {loss.item():.3f}, residual {residual.item():.1f} nats")
    return losses


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--compile", choices=["yes", "no"], default="yes")
    given = parser.parse_args()
    main(given.steps, compiled=given.compile == "yes")

"""lightly's SimCLR, compressed: the loop of lightly's documentation with another loss.

pip install lightly; python examples/lightly_simclr.py
"""

import torch
from lightly.loss import NTXentLoss
from lightly.models.modules import SimCLRProjectionHead
from lightly.transforms import SimCLRTransform
from PIL import Image
from torch import Tensor, nn
from torchvision.models import resnet18

from compressive.objectives import csimclr_loss


class SimCLR(nn.Module):
    """The model of lightly's documentation."""

    def __init__(self) -> None:
        super().__init__()
        network = resnet18()
        self.backbone = nn.Sequential(*list(network.children())[:-1])
        self.projection_head = SimCLRProjectionHead(512, 512, 64)

    def forward(self, x: Tensor) -> Tensor:
        """Return projections."""
        return self.projection_head(self.backbone(x).flatten(start_dim=1))


def main(steps: int = 8) -> list[float]:
    """Train on random images; return the losses."""
    torch.manual_seed(0)
    pixels = torch.randint(0, 256, (32, 2, 2, 3), dtype=torch.uint8).numpy()
    images = [Image.fromarray(each).resize((40, 40)) for each in pixels]  # four colors each
    transform = SimCLRTransform(input_size=32)
    model = SimCLR()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.06, momentum=0.9)
    criterion = NTXentLoss(temperature=0.1)  # only to show what it would be
    losses = []
    for number in range(steps):
        pairs = [transform(image) for image in images]
        x, y = (torch.stack([pair[i] for pair in pairs]) for i in (0, 1))
        r_x, r_y = model(x), model(y)
        # before: loss = criterion(r_x, r_y)
        found = csimclr_loss(r_x, r_y, kappa_e=1024.0, kappa_b=1 / 0.1, beta=0.1)
        optimizer.zero_grad()
        found.loss.backward()
        optimizer.step()
        losses.append(found.loss.item())
        print(
            f"step {number}: loss {found.loss.item():.3f}, NTXentLoss "
            f"{criterion(r_x, r_y).item():.3f}, residual {found.residual_x.mean().item():.1f} nats"
        )
    return losses


if __name__ == "__main__":
    main()

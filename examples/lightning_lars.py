"""C-SimCLR in a Lightning module, with the LARS and the schedule of the paper.

pip install lightning; python examples/lightning_lars.py
"""

import lightning
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import resnet18

from compressive.objectives import csimclr_loss
from compressive.optim import LARS, parameter_groups, warmup_cosine

LR, WARMUP = 0.5, 2  # peak learning rate, and steps of warm-up


class CSimCLR(lightning.LightningModule):
    """A backbone with a projection; the loss gathers the views of all processes itself."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.network = nn.Sequential(resnet18(num_classes=128), nn.ReLU(), nn.Linear(128, 64))
        self.steps = steps
        self.losses: list[float] = []

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Return the loss of a batch of pairs of views."""
        x, y = batch
        r_x, r_y = self.network(torch.cat([x, y])).chunk(2)
        found = csimclr_loss(r_x, r_y, kappa_e=1024.0, kappa_b=10.0, beta=0.1)
        self.log("loss", found.loss, prog_bar=True)
        self.log("residual", found.residual_x.mean())
        self.losses.append(float(found.loss.detach()))
        return found.loss

    def configure_optimizers(self) -> OptimizerLRScheduler:
        """Return LARS with a schedule that changes at every step."""
        optimizer = LARS(parameter_groups(self, weight_decay=1e-6), lr=LR)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: warmup_cosine(step, peak=1.0, warmup=WARMUP, total=self.steps)
        )
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main(steps: int = 8) -> list[float]:
    """Train on random images; return the losses."""
    lightning.seed_everything(0, verbose=False)
    images = torch.rand(64, 3, 32, 32)
    noisy = [images + 0.1 * torch.randn_like(images) for _ in range(2)]
    loader = DataLoader(TensorDataset(*noisy), batch_size=32, shuffle=True, drop_last=True)
    module = CSimCLR(steps)
    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, loader)
    print(f"loss {module.losses[0]:.3f} at the first step, {module.losses[-1]:.3f} at the last")
    return module.losses


if __name__ == "__main__":
    main()

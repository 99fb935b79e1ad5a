"""Stochastic depth whose random numbers do not depend on the number of processes."""

from timm.layers.drop import DropPath
from torch import Tensor, nn

from compressive.distributed import rank, world_size


def share_drop_path(module: nn.Module, batch: int) -> None:
    """Make timm's drop paths draw for the images of all processes; do nothing for one process.

    `batch` is the number of images of a forward pass in this process. All processes have the same
    seed in a step (see `train.loop.seed_step`), so timm's own layers would drop the same rows in
    each of them.
    """
    if world_size() == 1:
        return
    for name, child in module.named_children():
        if type(child) is DropPath:
            setattr(module, name, SharedDropPath(child, batch))
        else:
            share_drop_path(child, batch)


class SharedDropPath(nn.Module):
    """timm's DropPath with the rows that a single process would drop."""

    def __init__(self, layer: DropPath, batch: int) -> None:
        super().__init__()
        self.drop_prob: float = layer.drop_prob
        self.scale_by_keep: bool = layer.scale_by_keep
        self.batch = batch
        self.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        """Drop rows of x; x may hold several views of the batch, one after another."""
        if not self.drop_prob or not self.training:
            return x
        # A method of its own may pass other numbers of rows; these form one view.
        batch = len(x) if len(x) % self.batch else self.batch
        kept = x.new_empty((len(x) // batch, world_size(), batch)).bernoulli_(1 - self.drop_prob)
        mask = kept[:, rank()].reshape(len(x), *[1] * (x.dim() - 1))
        if self.scale_by_keep and self.drop_prob < 1:
            mask = mask / (1 - self.drop_prob)
        return x * mask

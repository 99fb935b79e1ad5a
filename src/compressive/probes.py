"""Classifiers on frozen features."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from compressive.metrics import top_k_accuracy

# Strengths of the L2 penalty that are tried, on standardized features. Assumed: they span from
# none that matters to one that costs accuracy on every set we have seen.
PENALTIES = (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)


class Linear:
    """Multinomial logistic regression: standardized features, an L2 penalty, L-BFGS to the end."""

    def __init__(
        self,
        feats: Float[Tensor, "count feat"],
        labels: Int[Tensor, " count"],
        *,
        classes: int,
        penalty: float,
        steps: int = 200,
    ) -> None:
        self.mean = feats.mean(0)
        self.std = feats.std(0).clamp(min=1e-6)
        x = self._standard(feats)
        self.weight = x.new_zeros(x.shape[1], classes, requires_grad=True)
        self.bias = x.new_zeros(classes, requires_grad=True)
        optimizer = torch.optim.LBFGS(
            [self.weight, self.bias],
            max_iter=steps,
            tolerance_grad=1e-6,
            history_size=20,
            line_search_fn="strong_wolfe",
        )

        def loss() -> Tensor:
            optimizer.zero_grad()
            fit = F.cross_entropy(x @ self.weight + self.bias, labels)
            total = fit + penalty * self.weight.square().sum() / 2
            total.backward()
            return total

        optimizer.step(loss)
        self.weight, self.bias = self.weight.detach(), self.bias.detach()

    def _standard(self, feats: Tensor) -> Tensor:
        return (feats.float() - self.mean) / self.std

    def logits(self, feats: Float[Tensor, "count feat"]) -> Float[Tensor, "count classes"]:
        """Scores of each class."""
        return self._standard(feats) @ self.weight + self.bias


def linear_probe(
    train: tuple[Float[Tensor, "count feat"], Int[Tensor, " count"]],
    test: tuple[Float[Tensor, "asked feat"], Int[Tensor, " asked"]],
    *,
    classes: int,
    penalties: Sequence[float] = PENALTIES,
    steps: int = 200,
) -> float:
    """Test accuracy of a linear classifier whose penalty was chosen on a fifth of the train part.

    The test part is looked at once, at the end.
    """
    feats, labels = train
    # At random: every fifth could be a class of its own where classes take turns.
    order = torch.randperm(len(feats), generator=torch.Generator().manual_seed(0))
    chosen = (order % 5 == 0).to(feats.device)

    def accuracy(penalty: float) -> float:
        fitted = Linear(
            feats[~chosen], labels[~chosen], classes=classes, penalty=penalty, steps=steps
        )
        return float(top_k_accuracy(fitted.logits(feats[chosen]), labels[chosen]))

    best = max(penalties, key=accuracy)
    final = Linear(feats, labels, classes=classes, penalty=best, steps=steps)
    return float(top_k_accuracy(final.logits(test[0]), test[1]))

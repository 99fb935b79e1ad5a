"""Recipes of the quick start: built-in images on two CPU cores."""

from compressive.recipes.recipe import Recipe, SettingSources, make_recipe
from compressive.recipes.small_batch import SMALL_BATCH


def quickstart(method: str) -> Recipe:
    """Return our recipe for the built-in images, which takes minutes on two CPU cores."""
    why = "ours, to finish in minutes on two CPU cores"
    layer: SettingSources = {
        "data.source": ("builtin", why),
        "views.size": (32, "size of the images"),
        "views.crop_scale_min": (0.5, "ours, tuned on held-out labels: 0.08 takes twice as long"),
        "views.blur": (False, "as for CIFAR-10"),
        "network.name": ("test_resnet", "ours: 0.4 million weights, timm's smallest ResNet"),
        "network.hidden_dim": (512, why),
        "bottleneck.kappa_b": (7.0, "ours: the default of `pretrain`"),
        "bottleneck.beta": (1.0, "ours: the default of `pretrain` for small batches"),
        "bottleneck.schedule": ("adaptive", "ours: a constant beta of 0.1 is 4 points worse"),
        "bottleneck.warmup_epochs": (1.0, "ours: seeds differ less than without it"),
        "optim.name": ("adamw", "ours: faster than SGD in so few steps"),
        "optim.lr": (0.064, "ours: the best of a few tried values"),
        "optim.weight_decay": (0.01, "default of torch"),
        "optim.warmup_epochs": (1.0, why),
        "train.batch_size": (32, "ours: more steps in the same time"),
        "train.epochs": (3, "ours: 5 points better than 2"),
        "probe.every_epochs": (1.0, why),
        "probe.bank": (2000, why),
    }
    return make_recipe(
        f"{method}/quickstart",
        method,
        *(SMALL_BATCH, layer),
        about="Ours: the built-in images, to try all commands.",
        expected="not in the paper; linear, five seeds: SimCLR 83.9, C-SimCLR 83.8, pixels 9.5",
        hardware="two CPU cores",
        needs="cpu",
        result=f"linear {83.9 if method == 'simclr' else 83.8}",
    )

"""Settings shared by all recipes whose batch fits on one device."""

from compressive.recipes.recipe import SettingSources

# For a batch that fits on one device. "The pilot" was 60 epochs of CIFAR-10 with ResNet-18 at batch
# 512 on an H200, one seed; only its numbers were kept. dkobak is dkobak/simclr-cifar10.
SMALL_BATCH: SettingSources = {
    "views.policy": ("byol", "paper, Table 6"),
    "views.crop_scale_min": (0.08, "paper, sec. A.1; solo-learn's for CIFAR-10"),
    "network.name": ("resnet18", "ours"),
    "network.hidden_dim": (2048, "solo-learn's SimCLR for CIFAR-10"),
    "network.projection_dim": (256, "paper, sec. A.2: kappa_e has its meaning on that sphere"),
    "bottleneck.kappa_e": (1024.0, "paper, sec. A.5"),
    "bottleneck.kappa_b": (5.0, "temperature 0.2: solo-learn for CIFAR-10, simclr#166"),
    "bottleneck.beta": (0.1, "ours, not the paper's: in the pilot the best of 0, 0.1 and 1"),
    "optim.name": ("sgd", "ours, the pilot's"),
    "optim.lr": (0.2, "ours, the pilot's: 0.4 at batch 512"),
    "optim.momentum": (0.9, "ours, everybody's"),
    # For weights before a batch norm only lr times decay matters in the long run: 4e-5 at batch
    # 512, where dkobak has 3e-5 for 1000 epochs and 6e-5 for 100. 5e-4 gains after 100 epochs (kNN
    # +0.5 to +0.7, held-out) and nothing after 200.
    "optim.weight_decay": (1e-4, "ours; with this lr about dkobak's lr times decay"),
}


def view_settings(size: int, has_gpu: bool) -> SettingSources:
    """Return the view size and the settings that depend on it."""
    # ResNet's own stem would reduce 32 pixels to 8.
    # At 64 the small stem costs 16 times as much as ResNet's own: too much for a CPU.
    small = size <= (64 if has_gpu else 32)
    stem = "SimCLR's for CIFAR-10" if small else "ours: timm can load the encoder"
    blur = "SimCLR's command for CIFAR-10 has none" if size <= 32 else "paper, Table 6"
    return {
        "views.size": (size, "about the images' own size"),
        "views.blur": (size > 32, blur),
        "network.stem": ("cifar" if small else "imagenet", stem),
    }

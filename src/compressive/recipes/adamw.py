"""Recipes for ViT-S/16 and ConvNeXt-T on ImageNet with AdamW."""

from compressive.recipes import paper
from compressive.recipes.recipe import Recipe, SettingSources, make_recipe

_MOCO = "MoCo v3 for ViTs (Chen et al. 2021, sec. 4 and 5)"
_CONVNEXT = "ConvNeXt-T on ImageNet (Liu et al. 2022, Table 5)"
VIT: SettingSources = {
    "optim.name": ("adamw", _MOCO),
    "optim.lr": (1.5e-4, f"{_MOCO}: 1.5e-4 x batch / 256"),
    "optim.weight_decay": (0.1, _MOCO),
    "network.variant": ("timm", "timm's network"),
}
CONVNEXT: SettingSources = {
    "optim.name": ("adamw", _CONVNEXT),
    "optim.lr": (2.5e-4, f"{_CONVNEXT}: 4e-3 at batch 4096, with labels"),
    "optim.weight_decay": (0.05, _CONVNEXT),
    "network.variant": ("timm", "timm's network"),
}
NETWORKS = {  # timm name, description, settings, epochs of warm-up, drop path
    "vits16": ("vit_small_patch16_224", "ViT-S/16", VIT, (40.0, _MOCO), (0.0, _MOCO)),
    "convnextt": (*("convnext_tiny", "ConvNeXt-T", CONVNEXT, (20.0, _CONVNEXT), (0.1, _CONVNEXT)),),
}
_ELSEWHERE = {  # MoCo v3, Table 4, 300 epochs: linear top-1 of ViT-S/16
    ("simclr", "vits16"): "69.0 % top-1 (MoCo v3, Table 4)",
    ("byol", "vits16"): "71.0 % top-1 (MoCo v3, Table 4)",
}


def optimizer_settings(network: str) -> SettingSources:
    """Return the optimizer of a ViT or ConvNeXt; {} for other networks."""
    if network.startswith(("vit_", "deit", "swin")):
        return VIT
    return CONVNEXT if network.startswith("convnext") else {}


def imagenet_adamw(method: str, network: str) -> Recipe:
    """Return the recipe of a method with ViT-S/16 or ConvNeXt-T, 300 epochs of ImageNet."""
    name, described, optimizer, warmup, drop_path = NETWORKS[network]
    own: SettingSources = {
        "network.name": (name, "recipe name"),
        "network.drop_path": drop_path,
        "optim.warmup_epochs": warmup,
        "train.epochs": (300, _MOCO if network == "vits16" else _CONVNEXT),
    }
    if method == "c-byol":
        own |= {"decoder.kappa_d": (10.0, "paper, sec. A.6, 300 epochs: twice the weight 5")}
    elsewhere = _ELSEWHERE.get((method, network), "")
    known = f"published elsewhere: {elsewhere}" if elsewhere else "nothing published"
    return make_recipe(
        f"{method}/imagenet-{network}-300",
        method,
        *(paper.ALWAYS, paper.LOSS[method], optimizer, own),
        about=f"Ours: {described}, ImageNet, 300 epochs, AdamW.",
        expected=f"not in the paper and not run here; {known}",
        hardware="several GPUs",
        needs="cluster",
        result=elsewhere.partition(" (")[0],
    )

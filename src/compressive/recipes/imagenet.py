"""The paper's ImageNet recipes."""

from compressive.recipes import paper
from compressive.recipes.recipe import Recipe, make_recipe


def imagenet(method: str, network: str, epochs: int) -> Recipe:
    """The paper's runs: Table 1, Table 10 (deeper ResNets) and sec. 3.2 (1500 epochs).

    Linear evaluation gives 69.1 to 78.8 % top-1, each recipe says its own. 64 Cloud TPU v3 cores,
    for hours that the paper does not state.
    """
    run = (method, network, epochs)
    return make_recipe(
        f"{method}/imagenet-{network}-{epochs}",
        method,
        paper.settings(run),
        about=f"{paper.place(run)}: {paper.NETWORKS[network][2]}, ImageNet, {epochs} epochs.",
        expected=paper.result(run),
        hardware=paper.hardware(run),
        variants=paper.variants(run),
    )

"""The paper's ImageNet recipes."""

from compressive.recipes import paper
from compressive.recipes.recipe import Recipe, make_recipe


def imagenet(method: str, network: str, epochs: int) -> Recipe:
    """Return a run of Table 1, Table 10 (deeper ResNets) or sec. 3.2 (1500 epochs).

    Linear evaluation gives 69.1 to 78.8 % top-1; `expected` has the value of each run. The paper
    used 64 Cloud TPU v3 cores and does not state the hours.
    """
    key = (method, network, epochs)
    return make_recipe(
        f"{method}/imagenet-{network}-{epochs}",
        method,
        paper.settings(key),
        about=f"{paper.place(key)}: {paper.NETWORKS[network][2]}, ImageNet, {epochs} epochs.",
        expected=paper.result(key),
        hardware=paper.hardware(key),
        variants=paper.variants(key),
    )

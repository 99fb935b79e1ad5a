"""Recipes by name: complete configs with the origin of each value."""

import difflib
from collections.abc import Callable
from functools import partial

from compressive.recipes import adamw, paper
from compressive.recipes.auto import AUTO as AUTO
from compressive.recipes.auto import auto_recipe as auto_recipe
from compressive.recipes.cifar10 import BEST, OTHER_METHODS, cifar10, other_method
from compressive.recipes.continued import SHOWN as SHOWN
from compressive.recipes.quickstart import quickstart
from compressive.recipes.recipe import Recipe as Recipe


def names() -> list[str]:
    """Return the names of all recipes, the paper's first."""
    return list(_registry())


def get(name: str) -> Recipe:
    """Return the recipe of that name."""
    known = _registry()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3)
        methods = dict.fromkeys(each.partition("/")[0] for each in known)
        near = near or difflib.get_close_matches(name.partition("/")[0], methods, n=1)
        hint = f"did you mean {' or '.join(near)}?" if near else "`compressive recipes` lists them"
        raise ValueError(f"no recipe {name!r}; {hint}")
    return known[name]()


def grouped(prefix: str = "", *, has_gpu: bool = False) -> dict[str, list[Recipe]]:
    """Return the recipes whose names begin with `prefix`, by what they need; the easiest first."""
    here = "on this machine"
    titles = {"cpu": here, "gpu": here if has_gpu else "on one GPU", "cluster": "on several GPUs"}
    found: dict[str, list[Recipe]] = {title: [] for title in titles.values()}
    for name in names():
        if name.startswith(prefix):
            recipe = get(name)
            found[titles[recipe.needs]].append(recipe)
    return {title: some for title, some in found.items() if some}


def _registry() -> dict[str, Callable[[], Recipe]]:
    """Return a function for each name that makes the recipe."""
    made: dict[str, Callable[[], Recipe]] = {}
    for key in (*paper.TABLE_1, *paper.TABLE_10, *paper.SECTION_3_2):
        made["{}/imagenet-{}-{}".format(*key)] = partial(paper.imagenet, key)
    made["{}/cifar10-r18-{}".format(*BEST)] = partial(cifar10, *BEST)
    for epochs in (200, 1000):
        for method in paper.PAPER_METHODS:
            made[f"{method}/cifar10-r18-{epochs}"] = partial(cifar10, method, epochs)
    for method in OTHER_METHODS:
        made[f"{method}/cifar10-r18-200"] = partial(other_method, method, 200)
    for network in adamw.ADAMW_NETWORKS:
        for method in ("simclr", "c-simclr", "c-byol"):
            name = f"{method}/imagenet-{network}-300"
            made[name] = partial(adamw.imagenet_adamw, method, network)
    return made | {f"{m}/quickstart": partial(quickstart, m) for m in ("simclr", "c-simclr")}

"""Choose settings for a data source from its images and this machine."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from compressive import recipes
from compressive.config import Config, flat, with_data
from compressive.data.decode import Unreadable
from compressive.data.source import Source
from compressive.device import pick_device
from compressive.distributed import world_size
from compressive.platforms.accelerators import device_memory
from compressive.train.images import load_source
from compressive.train.online_eval import evenly_spaced_indices


def auto_config(
    data: str,
    changes: Sequence[str] = (),
    source: Source | None = None,
    weights: Mapping[str, Any] | None = None,
) -> recipes.Recipe:
    """Return a recipe for these images and this machine, given the settings in `changes`.

    `weights` are the settings that the weights determine which the run starts from.
    """
    wanted = with_data(Config(), data, *changes)
    source = load_source(wanted, source)
    # Use total, not free memory: a command must give the same settings when it resumes.
    device = pick_device(wanted.train.device)
    known = device_memory(device)
    memory = known.total / 2**30 * world_size() if known else 0.0
    memory /= 1 if device.type == "cuda" else 2  # bf16, which the estimate assumes, is on cuda only
    values, names = flat(wanted), {change.partition("=")[0].strip() for change in changes}
    given = {name: values[name] for name in names}
    side = median_side(source)
    return recipes.auto_recipe(len(source), side, memory=memory, given=given, weights=weights)


def median_side(source: Source) -> int:
    """Return the median shorter side of up to 64 evenly spaced images."""
    sides = []
    for place in evenly_spaced_indices(len(source), 64).tolist():
        with suppress(Unreadable):
            sides.append(min(source.image(place).shape[1:]))
    if not sides:
        raise ValueError(f"none of {min(64, len(source))} images of {source.name} can be read")
    return int(torch.tensor(sides).median())

"""The images of a run: which they are, whether they are still the same, which cannot be read."""

from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compressive.config import Config, Data, override
from compressive.data.loaders import Batch, Resident, Streaming
from compressive.data.sampler import BatchIndices
from compressive.data.source import Source, require_source, subset
from compressive.data.sources import PYTHON, open_source
from compressive.progress import printable
from compressive.rundir.files import write_text
from compressive.train.online_eval import evenly_spaced_indices

Loader = Resident | Streaming


def from_python(config: Config, source: Source) -> Config:
    """The config of a run on images that a program gave; where they lie is said there, or not."""
    require_source(source)
    if config.data.source != Data().source:
        return config
    return override(config, f"data.source={PYTHON}{source.name}")


def load_source(config: Config, source: Source | None = None) -> Source:
    """The images of a run: those that a program gave, or those of the config's place."""
    if source is None:
        data = config.data
        source = open_source(data.source, data.split, max_pixels=data.max_pixels)
    if 0 < config.data.limit < len(source):
        order = torch.randperm(len(source), generator=torch.Generator().manual_seed(config.seed))
        source = subset(source, order[: config.data.limit].sort().values)
    if len(source) < 2:
        raise ValueError(f"{source.name} has {len(source)} image; there must be 2 or more")
    return source


def some(loader: Loader, index: Int[Tensor, " some"], epoch: int = 0) -> Batch:
    """These images, out of turn."""
    return next(loader.batches(iter([BatchIndices(index, torch.full_like(index, epoch))])))


def color_fingerprint(loader: Loader, count: int) -> Float[Tensor, "some 3"]:
    """Return mean colors of some images, which identify a set; -1 where one cannot be read."""
    # Not their pixels, which another version of a decoder may round differently.
    index = evenly_spaced_indices(count, 16)
    batch = some(loader, index)
    means = batch.images.sum((2, 3)) / (batch.height * batch.width).unsqueeze(1)
    substitute = batch.index.cpu() != index
    return means.cpu().masked_fill(substitute.unsqueeze(1), -1)


def are_others(before: Float[Tensor, "some 3"], now: Float[Tensor, "some 3"]) -> bool:
    """Whether shades are those of other images."""
    both = (before >= 0) & (now >= 0)
    return bool(((before - now).abs() > 2)[both].any())  # of 255; decoders differ by less


def list_unreadable(loader: Loader, path: Path) -> int:
    """Write down which images cannot be read, with those of earlier lists; how many there are."""
    pairs = loader.unreadable
    if not pairs:
        return 0
    now = [printable(f"{origin}: {reason}") for origin, reason in pairs]
    before = path.read_bytes().decode(errors="replace").split("\n") if path.exists() else []
    known = {"", *now}
    lines = [*now, *(line for line in before if line not in known)]
    write_text(path, "".join(f"{line}\n" for line in lines))
    return len(lines)

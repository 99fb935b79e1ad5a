"""Pictures of what an encoder sees: views of images, their nearest neighbors, and a map."""

import json
from dataclasses import replace
from pathlib import Path

import torch
from jaxtyping import Float, Int, UInt8
from safetensors.torch import save as serialize
from torch import Tensor
from torch.nn import functional as F

from compressive.augment.ops import render
from compressive.augment.params import draw_pair
from compressive.config import Config
from compressive.data.loaders import Batch
from compressive.evaluation.context import EvalContext
from compressive.evaluation.features import Features
from compressive.evaluation.tasks.tsne import PERPLEXITY, STEPS, tsne
from compressive.rng import image_keys
from compressive.rundir.files import write_bytes
from compressive.train.online_eval import evenly_spaced_indices
from compressive.train.step import view_pair

FILE = "gallery.safetensors"
SIDE = 96  # pixels at most: larger ones only make the report heavy
ON_CPU = 1000  # points of a map, whose work is quadratic in them: seconds on one core


def gallery(
    exam: EvalContext,
    folder: Path,
    *,
    rows: int = 8,
    pairs: int = 3,
    neighbors: int = 8,
    most: int = 3000,
) -> Path:
    """Write some test images with their views and neighbors, and a map of up to `most` of them.

    All in one file, which is read without torch; pictures are bytes, channels last, and a label
    is -1 where there is none.
    """
    if min(rows, pairs, neighbors) < 1:
        raise ValueError(
            f"rows, pairs and neighbors must be 1 or more, got {rows}, {pairs}, {neighbors}"
        )
    train, test = exam.features("train"), exam.features("test")
    # Sets are often sorted by class: images from all over have many.
    chosen = evenly_spaced_indices(len(test.index), rows).to(exam.device)
    near = nearest(test.feats[chosen], train.feats, min(neighbors, len(train.feats)))
    batches = list(exam.some("test", test.index[chosen].cpu()))
    tensors = {
        "views": torch.cat([_views(exam, batch, pairs) for batch in batches]),
        "query": _crops(exam, "test", test.index[chosen]),
        "neighbors": _crops(exam, "train", train.index[near].flatten()).unflatten(0, near.shape),
        "query_label": test.labels[chosen],
        "neighbor_label": train.labels[near],
    }
    about = {"classes": json.dumps(_classes(exam))}
    some = _some(exam, test, most)
    if len(some.feats) >= 4:
        exam.tell("map", 0, 1)
        tensors["map"] = tsne(F.normalize(some.feats, dim=1))
        tensors["map_label"] = some.labels
        about["map_method"] = (
            f"t-SNE of normalized h, perplexity {min(PERPLEXITY, (len(some.feats) - 1) / 3):.3g}, "
            f"{STEPS} steps from the two main axes, "
            f"{len(some.feats):,} of {len(test.feats):,} test images"
        )
    content = {name: value.cpu().contiguous() for name, value in tensors.items()}
    write_bytes(folder / FILE, serialize(content, about))
    return folder / FILE


def nearest(
    queries: Float[Tensor, "rows feat"], feats: Float[Tensor, "count feat"], k: int
) -> Int[Tensor, "rows k"]:
    """Places of the k vectors at the smallest angles, the closest first."""
    # The queries' own lengths do not change the order.
    cosine = queries @ feats.mT / torch.linalg.vector_norm(feats, dim=1).clamp(min=1e-12)
    return cosine.topk(k).indices


def _views(exam: EvalContext, batch: Batch, pairs: int) -> UInt8[Tensor, "batch view side side 3"]:
    """The central crop, and pairs of views as in pretraining."""
    subject = exam.subject
    settings = (subject.config or Config()).views
    pair = view_pair(replace(settings, size=subject.size, antialias=subject.antialias))
    shown = [_bytes(exam.crop.pixels(batch))]
    for first in range(0, 2 * pairs, 2):
        number = torch.arange(first, first + 2, device=exam.device)
        keys = image_keys(
            torch.cat([batch.index, batch.index]),
            seed=exam.seed,
            epoch=2**32 - 3,  # which no run reaches; its first pair is that of the alignment
            view=number.repeat_interleave(len(batch.index)),
        )
        drawn = draw_pair(keys, pair, batch.height, batch.width)
        both = torch.cat([batch.images, batch.images])
        made = render(both, drawn, subject.size, antialias=subject.antialias)
        shown.extend(_bytes(made).chunk(2))
    return torch.stack(shown, 1)


def _crops(
    exam: EvalContext, split: str, index: Int[Tensor, " some"]
) -> UInt8[Tensor, "some side side 3"]:
    """Images of a split as evaluation sees them; each is read once, however often it is shown."""
    places, again = index.cpu().unique(return_inverse=True)
    found = [_bytes(exam.crop.pixels(batch)) for batch in exam.some(split, places)]
    return torch.cat(found)[again.to(exam.device)]


def _bytes(images: Float[Tensor, "batch 3 h w"]) -> UInt8[Tensor, "batch side side 3"]:
    """Of colors in [0, 1]; large images are shrunk by averages over areas."""
    if images.shape[-1] > SIDE:
        images = F.interpolate(images, (SIDE, SIDE), mode="area")
    return images.clamp(0, 1).mul(255).round().byte().permute(0, 2, 3, 1)


def _classes(exam: EvalContext) -> list[str]:
    """Names of the classes, or their numbers; none without labels."""
    test, train = exam.source("test"), exam.source("train")
    named = max(test.classes or (), train.classes or (), key=len)
    return [*named, *(str(i) for i in range(len(named), exam.classes))]


def _some(exam: EvalContext, found: Features, most: int) -> Features:
    """As many as a map takes, drawn by the seed, in their order."""
    most = most if exam.device.type != "cpu" else min(most, ON_CPU)
    if len(found.feats) <= most:
        return found
    random = torch.Generator().manual_seed(exam.seed)
    drawn = torch.randperm(len(found.feats), generator=random)[:most].sort().values
    return Features(*(part[drawn.to(exam.device)] for part in found))

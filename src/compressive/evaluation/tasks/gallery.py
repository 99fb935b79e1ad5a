"""Gallery for the report: views of test images, nearest neighbors, and a t-SNE map."""

import json
from functools import partial
from pathlib import Path

import torch
from jaxtyping import UInt8
from safetensors.torch import save as serialize
from torch import Tensor
from torch.nn import functional as F

from compressive.augment.ops import render
from compressive.augment.params import draw_pair
from compressive.data.loaders import Batch
from compressive.evaluation.context import EvalContext
from compressive.evaluation.tasks.geometry import evaluation_views
from compressive.evaluation.tasks.tsne import PERPLEXITY, STEPS, tsne
from compressive.evaluation.thumbnails import crop_thumbnails, thumbnails
from compressive.rng import image_keys
from compressive.rundir.files import write_bytes
from compressive.train.online_eval import evenly_spaced_indices

FILE = "gallery.safetensors"
_POINTS_ON_CPU = 1000  # of the map, which is quadratic in them: seconds on one core


def run(context: EvalContext, *, most: int = 3000) -> None:
    """Write the gallery to `options.out`, with up to `most` images on the map."""
    if context.options.out is None:
        raise ValueError("options.out must be a folder to write the gallery to, got None")
    write_gallery(context, context.options.out, most=most)


def write_gallery(
    context: EvalContext,
    folder: Path,
    *,
    rows: int = 8,
    pairs: int = 3,
    neighbors: int = 8,
    most: int = 3000,
) -> Path:
    """Write some test images with their views and neighbors, and a map of up to `most` of them.

    Images are uint8 with channels last, readable without torch. Missing labels are -1.
    """
    if min(rows, pairs, neighbors) < 1:
        got = f"{rows}, {pairs}, {neighbors}"
        raise ValueError(f"rows, pairs and neighbors must be 1 or more, got {got}")
    train, test = context.features("train"), context.features("test")
    # Data sets are often sorted by class: evenly spaced images show many classes.
    chosen = evenly_spaced_indices(len(test.index), rows).to(context.device)
    # Cosine up to the norms of the queries, which do not change the order.
    norms = torch.linalg.vector_norm(train.feats, dim=1).clamp(min=1e-12)
    cosine = test.feats[chosen] @ train.feats.mT / norms
    near = cosine.topk(min(neighbors, len(train.feats))).indices
    batches = list(context.batches_at("test", test.index[chosen].cpu()))
    tensors = {
        "views": torch.cat([_shown_views(context, batch, pairs) for batch in batches]),
        "query": crop_thumbnails(context, "test", test.index[chosen]),
        "neighbors": crop_thumbnails(context, "train", train.index[near].flatten()).unflatten(
            0, near.shape
        ),
        "query_label": test.labels[chosen],
        "neighbor_label": train.labels[near],
    }
    sources = context.source("test"), context.source("train")
    names = max((source.classes or () for source in sources), key=len)
    numbers = (str(i) for i in range(len(names), context.classes))
    about = {"classes": json.dumps([*names, *numbers])}
    most = most if context.device.type != "cpu" else min(most, _POINTS_ON_CPU)
    random = torch.Generator().manual_seed(context.seed)
    drawn = torch.randperm(len(test.feats), generator=random)[:most].sort().values
    if len(drawn) >= 4:
        context.progress("map", 0, 1, "")
        points = F.normalize(test.feats[drawn.to(context.device)], dim=1)
        tensors["map"] = tsne(points, progress=partial(context.progress, "map", unit="steps"))
        tensors["map_label"] = test.labels[drawn.to(context.device)]
        perplexity = min(PERPLEXITY, (len(drawn) - 1) / 3)
        about["map_method"] = (
            f"t-SNE of normalized h, perplexity {perplexity:.3g}, {STEPS} steps from the two main "
            f"axes, {len(drawn):,} of {len(test.feats):,} test images"
        )
    content = {name: value.cpu().contiguous() for name, value in tensors.items()}
    write_bytes(folder / FILE, serialize(content, about))
    return folder / FILE


def _shown_views(
    context: EvalContext, batch: Batch, pairs: int
) -> UInt8[Tensor, "batch view side side 3"]:
    """Return the central crop and pairs of views as in pretraining."""
    model = context.model
    pair = evaluation_views(context)
    shown = [thumbnails(context.crop.pixels(batch))]
    for first in range(0, 2 * pairs, 2):
        number = torch.arange(first, first + 2, device=context.device)
        keys = image_keys(
            torch.cat([batch.index, batch.index]),
            seed=context.seed,
            epoch=2**32 - 3,  # no run reaches it; the first pair is the one of the alignment
            view=number.repeat_interleave(len(batch.index)),
        )
        drawn = draw_pair(keys, pair, batch.height, batch.width)
        both = torch.cat([batch.images, batch.images])
        made = render(both, drawn, model.size, antialias=model.antialias)
        shown.extend(thumbnails(made).chunk(2))
    return torch.stack(shown, 1)

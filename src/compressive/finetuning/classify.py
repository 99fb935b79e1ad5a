"""Compute the logits of a classifier for all images of a source."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from compressive.classifier import Classifier
from compressive.data.source import Source
from compressive.evaluation.embed import embed_source
from compressive.evaluation.frozen_model import from_encoder
from compressive.progress import Display


class Classified(NamedTuple):
    """Logits and labels of the readable images, in the order of the source; -1: no label."""

    logits: Float[Tensor, "count classes"]
    labels: Int[Tensor, " count"]
    index: Int[Tensor, " count"]
    unreadable: list[tuple[str, str]]  # origin, reason


def classify(
    classifier: Classifier,
    source: Source,
    *,
    precision: torch.dtype,
    display: Display,
    title: str,
) -> Classified:
    """Classify the central crop of every image; processes share the work and all get the result."""
    device = classifier.head.weight.device
    classifier.eval().to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    model = from_encoder(classifier.encoder, title)
    found, unreadable = embed_source(model, source, device, display, dtype=precision, title=title)
    with torch.no_grad():
        logits = classifier.head(found.feats)
    return Classified(logits.cpu(), found.labels.cpu(), found.index.cpu(), unreadable)

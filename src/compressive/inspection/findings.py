"""Everything that is found in a scan: duplicates, outliers, clusters, label errors and a map."""

from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from compressive.evaluation.tasks.tsne import tsne
from compressive.inspection.clusters import spherical_kmeans
from compressive.inspection.duplicates import (
    Duplicates,
    find_duplicates,
    leaking,
    representatives,
)
from compressive.inspection.label_errors import VOTERS, LabelCheck, check_labels
from compressive.inspection.scan import Scan
from compressive.inspection.search import nearest
from compressive.progress import Display

OUTLIER_NEIGHBORS = 10  # whose mean distance is the outlier score
_NEIGHBORS = VOTERS + 10  # some neighbors are duplicates, which do not vote
_MAP_POINTS = {"cpu": 1000, "cuda": 3000}  # the map is quadratic in them
_IMAGES_PER_CLUSTER = 50  # at least, so that few images have few clusters


@dataclass(frozen=True, kw_only=True)
class Findings:
    """What was found; arrays have one entry per image of the scan."""

    scan: Scan
    duplicates: Duplicates
    outlier_score: NDArray[np.float64] | None = None  # NaN if unreadable; None: no encoder
    cluster: NDArray[np.int64] | None = None  # -1 if unreadable
    typicality: NDArray[np.float64] | None = None  # cosine with the center of its cluster
    labels: LabelCheck | None = None  # None without labels or encoder
    map_points: NDArray[np.float64] | None = None
    map_images: NDArray[np.int64] | None = None

    @cached_property
    def exact_groups(self) -> list[NDArray[np.int64]]:
        """Images of equal pixels."""
        return self.duplicates.groups("exact")

    @cached_property
    def near_groups(self) -> list[NDArray[np.int64]]:
        """Near duplicates: groups that are not all equal."""
        exact = self.duplicates.exact
        groups = self.duplicates.groups("near")
        return [g for g in groups if exact[g].min() < 0 or len(np.unique(exact[g])) > 1]

    @cached_property
    def leaks(self) -> list[NDArray[np.int64]]:
        """Groups of equal images or near duplicates that are in more than one split."""
        return leaking(self.scan, self.duplicates.groups("near"))

    @cached_property
    def is_leak(self) -> NDArray[np.bool_]:
        """Return which images are in such a group."""
        found = np.zeros(len(self.scan), bool)
        for group in self.leaks:
            found[group] = True
        return found

    @cached_property
    def outliers(self) -> NDArray[np.int64]:
        """Images by outlier score, the highest first."""
        if self.outlier_score is None:
            return np.zeros(0, np.int64)
        places = np.flatnonzero(~np.isnan(self.outlier_score))
        return places[np.argsort(-self.outlier_score[places], kind="stable")]

    @cached_property
    def label_errors(self) -> NDArray[np.int64]:
        """Images with a likely wrong label, the least supported first."""
        if self.labels is None:
            return np.zeros(0, np.int64)
        places = np.flatnonzero(self.labels.is_error)
        return places[np.argsort(self.labels.support[places], kind="stable")]


def find(
    scan: Scan,
    *,
    clusters: int,
    threshold: float,
    device: torch.device,
    show: Display,
    seed: int = 0,
) -> Findings:
    """Search duplicates, and with features also outliers, clusters and label errors."""
    unique, position = representatives(scan)
    look = partial(find_duplicates, scan, unique, position, threshold=threshold, device=device)
    if scan.features is None or not len(unique):
        show.begin("comparing pixels")
        return Findings(scan=scan, duplicates=look(None))
    vectors = F.normalize(scan.features[unique], dim=1)
    step = partial(show.progress, "searching neighbors", unit="images")
    near = nearest(vectors, vectors, _NEIGHBORS, skip_self=True, device=device, progress=step)
    show.begin("comparing pixels")
    duplicates = look(near)
    score = np.full(len(scan), np.nan)
    readable = position >= 0
    if near.cosine.shape[1]:
        apart = 1 - near.cosine[:, :OUTLIER_NEIGHBORS].mean(1)
        score[readable] = apart.double().numpy()[position[readable]]
    show.begin("clustering")
    made = spherical_kmeans(
        vectors.to(device), min(clusters, -(-len(unique) // _IMAGES_PER_CLUSTER)), seed=seed
    )
    cluster, typicality = np.full(len(scan), -1), np.full(len(scan), np.nan)
    cluster[readable] = made.number.cpu().numpy()[position[readable]]
    typicality[readable] = made.cosine.cpu().double().numpy()[position[readable]]
    labels = None
    if (scan.label >= 0).any():
        groups = duplicates.near, unique, position
        labels = check_labels(scan.label, *groups, near, len(scan.classes))
    points, images = _map(vectors, unique, device, seed, show)
    return Findings(
        scan=scan,
        duplicates=duplicates,
        outlier_score=score,
        cluster=cluster,
        typicality=typicality,
        labels=labels,
        map_points=points,
        map_images=images,
    )


def _map(
    vectors: Float[Tensor, "count dim"],
    unique: Int[Tensor, " count"],
    device: torch.device,
    seed: int,
    show: Display,
) -> tuple[NDArray[np.float64] | None, NDArray[np.int64] | None]:
    """Return a t-SNE map of a random sample, and the images of its points."""
    most = _MAP_POINTS["cuda" if device.type == "cuda" else "cpu"]
    random = torch.Generator().manual_seed(seed)
    drawn = torch.randperm(len(vectors), generator=random)[:most].sort().values
    if len(drawn) < 4:
        return None, None
    points = tsne(vectors[drawn].to(device), progress=partial(show.progress, "map", unit="steps"))
    return points.cpu().double().numpy(), unique[drawn].numpy()

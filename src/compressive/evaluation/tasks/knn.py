"""kNN: the weighted vote of the nearest training images by cosine similarity."""

from collections.abc import Sequence

from compressive.evaluation.context import EvalContext
from compressive.metrics import hits
from compressive.train.knn import nearest_neighbors

TEMPERATURE = 0.07


def run(context: EvalContext, *, neighbors: Sequence[int] = (20, 200)) -> None:
    """Record the top-1 accuracy for each number of neighbors."""
    train, test = context.features("train"), context.features("test")
    bank, images = (train.feats, train.labels), context.images("test", test.index)
    for k in neighbors:
        if k > len(train.feats):
            context.skip(f"kNN with k = {k}: there are {len(train.feats)} training images")
            continue
        votes = nearest_neighbors(
            *bank, test.feats, classes=context.classes, neighbors=k, temperature=TEMPERATURE
        )
        right, name = hits(votes, test.labels), context.splits.name
        protocol = context.protocol(bank=len(train.feats), k=k, temperature=TEMPERATURE)
        context.results.add(f"kNN {k}", name, "top-1", right, protocol=protocol, images=images)

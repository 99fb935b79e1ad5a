"""The online probe and kNN match naive loops and sklearn, and pass no gradient to the encoder."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from processes import together
from sklearn.neighbors import KNeighborsClassifier
from tiny import silent, tiny
from torch import Tensor, nn

from compressive.augment.ops import IMAGENET_COLORS, center_crop, normalize
from compressive.data.decode import Unreadable
from compressive.data.loaders import Resident, Streaming
from compressive.data.sampler import BatchIndices
from compressive.data.source import ImageSource
from compressive.train import log
from compressive.train.auto_config import median_side
from compressive.train.knn import nearest_neighbors
from compressive.train.loop import pretrain
from compressive.train.online_eval import (
    Accuracy,
    OnlineProbe,
    _some,
    evenly_spaced_indices,
    features,
    held_out_labels,
    online_accuracy,
)

pytestmark = pytest.mark.usefixtures("one_thread")

SIZE = 8


def bank(count: int, dim: int = 6, classes: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(count, dim), torch.randint(classes, (count,))


# kNN


@pytest.mark.parametrize("neighbors", [1, 5, 1000])
def test_knn_votes_match_a_loop_over_pairs(neighbors: int) -> None:
    """In float64, to 1e-12; with more neighbors than images, all images vote."""
    feats, labels = bank(50)
    feats, queries = feats.double(), torch.randn(20, 6).double()
    found = nearest_neighbors(feats, labels, queries, classes=4, neighbors=neighbors)
    for query, votes in zip(queries, found, strict=True):
        cosines = [
            (sum(a * b for a, b in zip(query, one, strict=True)) / query.norm() / one.norm()).item()
            for one in feats
        ]
        nearest = sorted(range(50), key=lambda i: -cosines[i])[:neighbors]
        expected = [0.0] * 4
        for i in nearest:
            expected[labels[i]] += math.exp((cosines[i] - 1) / 0.07)
        assert votes.tolist() == pytest.approx(expected, rel=1e-12)


def test_knn_votes_match_sklearn() -> None:
    """Compare to KNeighborsClassifier with cosine distance d and weights exp(-d / 0.07)."""
    feats, labels = bank(200)
    feats, queries = feats.double(), torch.randn(1500, 6).double()  # more than one block
    found = nearest_neighbors(feats, labels, queries, classes=4)
    weights: Any = lambda d: np.exp(-d / 0.07)  # noqa: E731
    theirs = KNeighborsClassifier(20, weights=weights, metric="cosine")
    expected = theirs.fit(feats.numpy(), labels.numpy()).predict_proba(queries.numpy())
    shares = found / found.sum(1, keepdim=True)
    torch.testing.assert_close(shares, torch.from_numpy(expected), rtol=1e-9, atol=1e-9)


# Held-out labels


def test_held_out_fraction_matches_the_setting() -> None:
    """Within four standard deviations of a binomial fraction."""
    for share in (0.0, 0.1, 0.5):
        found = held_out_labels(20_000, share, seed=3).double().mean().item()
        assert abs(found - share) <= 4 * math.sqrt(share * (1 - share) / 20_000)


def test_held_out_labels_depend_on_index_and_seed_only() -> None:
    held = held_out_labels(500, 0.3, seed=7)
    assert torch.equal(held, held_out_labels(500, 0.3, seed=7))
    assert torch.equal(held[:100], held_out_labels(100, 0.3, seed=7))
    assert not torch.equal(held, held_out_labels(500, 0.3, seed=8))
    assert (held <= held_out_labels(500, 0.6, seed=7)).all()  # a larger fraction is a superset


# The probe


def test_probe_is_a_linear_classifier_of_standardized_features() -> None:
    """The loss is the cross-entropy over labeled images only, computed here in float64."""
    probe = OnlineProbe(6, 4)
    nn.init.normal_(probe.linear.weight)
    nn.init.normal_(probe.linear.bias)
    feats, labels = bank(30)
    labels[::3] = -1
    loss = probe.loss(feats, labels)
    wide = feats.double()
    standard = (wide - wide.mean(0)) / (wide.var(0, unbiased=False) + 1e-5).sqrt()
    logits = standard @ probe.linear.weight.double().T + probe.linear.bias.double()
    known = labels >= 0
    expected = -logits.log_softmax(1)[known].gather(1, labels[known, None]).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


def test_label_minus_one_is_ignored_by_the_probe() -> None:
    """Gradients come from labeled images only; without any, loss and gradient are 0."""
    feats, labels = bank(30)
    labels[::2] = -1
    grads = []
    for other in (0, 3):
        probe = OnlineProbe(6, 4)
        changed = torch.where(labels < 0, -1, labels)
        probe.loss(feats, changed).backward()
        grads.append(probe.linear.weight.grad)
        changed = torch.where(labels < 0, other, labels)
        probe.zero_grad()
        probe.loss(feats, changed).backward()
        assert not torch.equal(grads[-1], probe.linear.weight.grad)  # pyright: ignore
    assert torch.equal(grads[0], grads[1])  # pyright: ignore
    probe = OnlineProbe(6, 4)
    nothing = probe.loss(feats, torch.full((30,), -1))
    nothing.backward()
    assert nothing == 0
    assert probe.linear.weight.grad is not None
    assert not probe.linear.weight.grad.any()


def probe_gradients(labeled: range, mine: slice) -> Tensor:
    """Return loss and gradients of a part of 12 images, without batch statistics."""
    torch.manual_seed(0)
    feats, probe = torch.randn(12, 6), OnlineProbe(6, 4)
    probe.norm.eval()
    label = torch.tensor([i % 4 if i in labeled else -1 for i in range(12)])
    loss = probe.loss(feats[mine], label[mine])
    loss.backward()
    grads = [p.grad.flatten() for p in probe.parameters() if p.grad is not None]
    return torch.cat([loss.detach().view(1), *grads])


# Of 12 images in three processes: 1, 4 and 3 labels, and one label in one process.
LABELED = range(3, 11), range(5, 6)


def probe_worker(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=3)
    found = [probe_gradients(labeled, slice(4 * rank, 4 * rank + 4)) for labeled in LABELED]
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.distributed
def test_probe_gradients_are_weighted_by_label_count(tmp_path: Path) -> None:
    """Averaged over processes, loss and gradients equal those of one process with all images."""
    together(probe_worker, (tmp_path,), 3)
    each = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(3)]
    for labeled, shares in zip(LABELED, zip(*each, strict=True), strict=True):
        expected = probe_gradients(labeled, slice(12))
        torch.testing.assert_close(torch.stack(shares).mean(0), expected)


def test_probe_passes_no_gradient_to_the_features() -> None:
    feats, labels = bank(12)
    feats.requires_grad_()
    probe = OnlineProbe(6, 4)
    nn.init.normal_(probe.linear.weight)  # zero weights would block any gradient
    (probe.loss(feats, labels) + 0 * feats.sum()).backward()
    assert feats.grad is not None
    assert not feats.grad.any()


def test_probe_starts_at_chance() -> None:
    feats, labels = bank(12)
    assert OnlineProbe(6, 4).loss(feats, labels).item() == pytest.approx(math.log(4))


# Accuracy


class Shades:
    """Labeled images of one gray level each; some are unreadable."""

    name, classes = "shades", ("dark", "bright", "none")

    def __init__(self, labels: list[int], bad: tuple[int, ...] = ()) -> None:
        self.labels, self.bad = torch.tensor(labels), bad

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, i: int) -> Tensor:
        if i in self.bad:
            raise Unreadable("for a test")
        return torch.full((3, SIZE, SIZE), 6 * i, dtype=torch.uint8) + torch.arange(
            SIZE, dtype=torch.uint8
        )

    def origin(self, i: int) -> str:
        return f"shade {i}"


class NoisyInTraining(nn.Module):
    """An encoder with batch norm and dropout, so training mode adds noise."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop = nn.BatchNorm2d(3), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.norm(x).mean((2, 3)) + x[:, :, 0, 0])


def evaluate(
    source: Shades, held: Tensor, *, probe: OnlineProbe, most: int = 100, encoder: Any = None
) -> Accuracy | None:
    with Streaming(source, side=SIZE, device="cpu", workers=2) as loader:
        return online_accuracy(
            encoder or NoisyInTraining(),
            probe,
            loader.batches,
            source.labels,
            held,
            size=SIZE,
            antialias=False,
            channels=IMAGENET_COLORS,
            precision=torch.float32,
            neighbors=3,
            bank=most,
        )


def fitted(source: Shades) -> OnlineProbe:
    """Return a probe with nontrivial statistics and weights."""
    probe = OnlineProbe(3, int(source.labels.max()) + 1)
    nn.init.normal_(probe.linear.weight)
    probe(torch.randn(50, 3))
    return probe


def by_hand(source: Shades, held: Tensor, probe: OnlineProbe) -> Accuracy:
    """Evaluate image by image: read, center-crop, encode, predict.

    Unreadable images are skipped.
    """
    encoder = NoisyInTraining().eval()
    known, asked = [], []
    for i in [i for i in range(len(source)) if source.labels[i] >= 0 and i not in source.bad]:
        view = normalize(center_crop(source.image(i)[None], SIZE))
        (asked if held[i] else known).append((encoder(view)[0], int(source.labels[i])))
    rights = [0, 0]
    for feat, label in asked:
        cosines = sorted(((F.cosine_similarity(feat, f, 0).item(), n) for f, n in known))[-3:]
        votes = [0.0] * probe.linear.out_features
        for cosine, vote in cosines:
            votes[vote] += math.exp(cosine / 0.07)
        rights[1] += votes.index(max(votes)) == label
        mean, var = probe.norm.running_mean, probe.norm.running_var
        assert mean is not None
        assert var is not None
        logits = probe.linear((feat - mean) / (var + 1e-5).sqrt())
        rights[0] += int(logits.argmax()) == label
    return Accuracy(rights[0] / len(asked), rights[1] / len(asked), len(asked))


LABELS = [int(7 * i % 11 > 4) for i in range(36)]


def test_accuracy_matches_a_loop_over_images() -> None:
    source = Shades(LABELS)
    held, probe = held_out_labels(36, 0.4, seed=0), fitted(source)
    found = evaluate(source, held, probe=probe)
    assert found == pytest.approx(by_hand(source, held, probe))
    assert found is not None
    assert 0 < found.neighbors < 1  # neither is trivially right or wrong
    assert 0 < found.probe < 1


@pytest.mark.slow
def test_substitutes_for_unreadable_images_are_not_counted() -> None:
    """Two unreadable images have substitutes of the other label.

    They are held out, visible or unlabeled.
    """
    labels = [*LABELS]
    labels[20] = -1
    source = Shades(labels, bad=(3, 19))
    probe = fitted(source)
    for seed in range(4):
        held = held_out_labels(36, 0.4, seed=seed)
        held[3], held[4] = True, False
        found = evaluate(source, held, probe=probe)
        assert found == pytest.approx(by_hand(source, held, probe))
        assert found is not None
        assert found.count == int((held & (source.labels >= 0)).sum()) - 1 - int(held[19])


@pytest.mark.parametrize("bad", [(3,), tuple(i for i in range(36) if i != 3)])
def test_no_accuracy_without_readable_images(bad: tuple[int, ...]) -> None:
    source, held = Shades(LABELS, bad=bad), torch.arange(36) == 3
    assert evaluate(source, held, probe=fitted(source)) is None


def test_evaluation_leaves_encoder_and_probe_unchanged() -> None:
    """Encoder and probe are evaluated in eval mode and return to their previous mode."""
    source, encoder = Shades(LABELS), NoisyInTraining()
    held, probe = held_out_labels(36, 0.4, seed=0), fitted(source)
    before = [{k: v.clone() for k, v in m.state_dict().items()} for m in (encoder, probe)]
    for training in (True, False):
        encoder.train(training)
        probe.train(training)
        answers = {evaluate(source, held, probe=probe, encoder=encoder) for _ in range(2)}
        assert len(answers) == 1
        assert encoder.training is encoder.drop.training is probe.training is training
        assert probe.norm.training is training
    for old, module in zip(before, (encoder, probe), strict=True):
        assert all(torch.equal(old[k], v) for k, v in module.state_dict().items())


def test_bank_limits_both_parts_and_spans_the_dataset() -> None:
    """Classes are sorted: the first 8 images alone would hold one class."""
    source = Shades([0] * 18 + [1] * 18)
    held = torch.arange(36) % 2 == 0
    found = evaluate(source, held, probe=fitted(source), most=8)
    assert found is not None
    assert found.count == 8
    assert found.neighbors > 0.5


@pytest.mark.parametrize(
    ("count", "most"), [(1, 1), (1, 8), (5, 8), (9, 5), (1000, 64), (2**24 + 4, 8), (10**9, 64)]
)
def test_indices_are_evenly_spaced_from_first_to_last(count: int, most: int) -> None:
    """Cover counts where float32 has only every second integer and rounds past the end."""
    found = evenly_spaced_indices(count, most).tolist()
    number = min(count, most)
    assert len(found) == number
    assert (found[0], found[-1]) == (0, count - 1)
    gaps = [b - a for a, b in pairwise(found)] or [1]
    assert 1 <= min(gaps) <= max(gaps) <= min(gaps) + 1


def test_indices_beyond_float32_precision_are_valid() -> None:
    """Check the kNN bank and the median image size."""
    count = 20_000_004
    assert _some(torch.ones(count, dtype=torch.bool), 8)[-1] == count - 1
    picture = torch.zeros(3, 5, 7, dtype=torch.uint8)
    many = ImageSource(name="many", count=count, read=lambda _: picture, place=str)
    assert median_side(many) == 5


def test_features_ignore_the_canvas_padding() -> None:
    """An image of 6 x 4 pixels in a canvas of 8 gives the features of the image alone."""

    class Small(Shades):
        def image(self, i: int) -> Tensor:
            return super().image(i)[:, :6, :4]

    source, encoder = Small(LABELS), NoisyInTraining()
    loader = Resident(source, side=SIZE, device="cpu")
    places = torch.tensor([5, 0, 30])
    batches = loader.batches([BatchIndices(places, torch.zeros_like(places))])
    feats, index = features(encoder, batches, SIZE, torch.float32)
    assert torch.equal(index, places)
    assert encoder.training
    encoder.eval()
    views = [normalize(center_crop(source.image(int(i))[None], SIZE)) for i in places]
    torch.testing.assert_close(feats, encoder(torch.cat(views)))


def test_evaluation_crops_follow_the_antialias_setting() -> None:
    source, places = Shades(LABELS), torch.tensor([5, 0, 30])
    loader = Resident(source, side=SIZE, device="cpu")
    found = {}
    for antialias in (False, True):
        batches = loader.batches([BatchIndices(places, torch.zeros_like(places))])
        encoder, small = NoisyInTraining().eval(), SIZE // 4
        feats, _ = features(encoder, batches, small, torch.float32, antialias=antialias)
        pixels = torch.stack([source.image(int(i)) for i in places])
        expected = encoder(normalize(center_crop(pixels, small, antialias=antialias)))
        torch.testing.assert_close(feats, expected)
        found[antialias] = feats
    assert not torch.allclose(found[False], found[True], atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("antialias", [False, True])
def test_run_evaluates_with_its_antialias_setting(
    antialias: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def ask(*given: Any, **words: Any) -> Accuracy | None:
        asked.append(words["antialias"])
        return online_accuracy(*given, **words)

    monkeypatch.setattr(log, "online_accuracy", ask)
    pretrain(tiny(f"views.antialias={antialias}"), tmp_path, display=silent())
    assert set(asked) == {antialias}

"""The context: cached features, unreadable images, fingerprints, parts of train."""

from pathlib import Path

import torch
from tiny import noise, tiny
from tiny_context import context_of, pictures, place

from compressive.augment.ops import MEAN, STD, normalize
from compressive.data.splits import stratified
from compressive.evaluation.context import EvalContext
from compressive.evaluation.dataset import open_splits
from compressive.evaluation.frozen_model import FrozenModel
from compressive.evaluation.results import Results
from compressive.methods import build


def test_features_of_images_that_were_shrunk_otherwise_are_made_anew(tmp_path: Path) -> None:
    """A streamed set is known by its names, which do not tell what was done to its images."""
    pictures(tmp_path / "set" / "train", {"a": 3, "b": 3})
    keys = []
    for side in (16, 40):
        context = context_of(tmp_path / "set", side=side)
        context.cache = tmp_path / "cache"
        context.features("train")
        context.close()
        keys.append(len(list((tmp_path / "cache").iterdir())))
        assert f"longer side to {side}," in context.preprocessing()["larger_images"]
    assert keys[1] > keys[0]


def test_an_image_that_cannot_be_read_counts_in_no_task(tmp_path: Path) -> None:
    pictures(tmp_path / "train", {"a": 5, "b": 5})
    pictures(tmp_path / "test", {"a": 3, "b": 3}, seed=50)
    (tmp_path / "test" / "a" / "a51.png").write_bytes(b"no image")
    context = context_of(tmp_path)
    assert context.features("test").index.tolist() == [0, 2, 3, 4, 5]
    seen = [batch.index.tolist() for batch in context.batches("test", 4)]
    assert seen == [[0, 2, 3], [4, 5]]
    assert context.results.skipped == ["1 images of test that cannot be read"]


def test_views_have_the_colors_that_a_network_of_others_wants(tmp_path: Path) -> None:
    pictures(tmp_path / "train", {"a": 5, "b": 5})
    x = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    other = context_of(tmp_path, mean=(0.5, 0.5, 0.5), std=(0.5, 0.4, 0.3))
    expected = (x - 0.5) / torch.tensor([0.5, 0.4, 0.3])[:, None, None]
    torch.testing.assert_close(other.renormalize(normalize(x)), expected, rtol=1e-5, atol=1e-5)
    own = context_of(tmp_path, mean=MEAN, std=STD)
    assert own.renormalize(x) is x


def test_images_have_one_name_wherever_they_lie_and_others_another(tmp_path: Path) -> None:
    """The same files elsewhere, and other pictures under the same names with the same labels."""
    for name in ("here", "there", "other"):
        for split, seed in (("train", 0), ("test", 10)):
            pictures(tmp_path / name / split, {"a": 3, "b": 3}, seed=seed)
    changed = sorted((tmp_path / "other" / "test").rglob("*.png"))[4]
    noise(16, 16, seed=99).save(changed)
    here, there, other = (context_of(tmp_path / name) for name in ("here", "there", "other"))
    assert here.images("test") == there.images("test")
    assert here.fingerprint == there.fingerprint
    assert here.images("train") == other.images("train")
    assert here.images("test") != other.images("test")
    some = torch.tensor([0, 2])
    assert here.images("test", some) == there.images("test", some) != here.images("test")
    for context in (here, there, other):
        context.close()


def test_parts_of_train_are_drawn_by_the_seed(tmp_path: Path) -> None:
    context = context_of(place(tmp_path, {"a": 30, "b": 30}, {"a": 2, "b": 2}))
    context.seed = 5
    kept, held = stratified(context.features("train").labels, 0.1, seed=5)
    assert torch.equal(context.parts[0], kept)
    assert torch.equal(context.parts[1], held)
    assert not torch.equal(held, stratified(context.features("train").labels, 0.1, seed=0).held)
    context.close()


def test_features_of_another_crop_are_made_anew(tmp_path: Path) -> None:
    place(tmp_path / "set", {"a": 3, "b": 3}, {"a": 2, "b": 2})
    found = []
    for share in (1.0, 0.5):
        context = context_of(tmp_path / "set")
        context.cache, context.crop = tmp_path / "cache", context.crop._replace(share=share)
        found.append(context.features("train").feats)
        context.close()
    assert not torch.equal(*found)


def test_features_in_bfloat16_are_not_taken_for_those_in_float32(tmp_path: Path) -> None:
    place(tmp_path / "set", {"a": 3, "b": 3}, {"a": 2, "b": 2})
    splits = open_splits(str(tmp_path / "set"), seed=0)
    model = FrozenModel(name="a", network=build(tiny()).encoder.eval(), size=16)
    found = []
    for bf16 in (False, True):
        context = EvalContext(
            model,
            splits,
            Results("a"),
            device=torch.device("cpu"),
            cache=tmp_path / "c",
            bf16=bf16,
        )
        found.append(context.features("train").feats)
        context.close()
    assert not torch.equal(*found)

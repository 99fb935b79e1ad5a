"""The evaluation context: cached features, unreadable images, fingerprints, parts of train."""

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


def test_stored_image_size_changes_the_feature_cache_key(tmp_path: Path) -> None:
    """A streamed dataset is identified by its file names, which do not record the resizing."""
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


def test_unreadable_image_is_excluded_from_every_task(tmp_path: Path) -> None:
    pictures(tmp_path / "train", {"a": 5, "b": 5})
    pictures(tmp_path / "test", {"a": 3, "b": 3}, seed=50)
    (tmp_path / "test" / "a" / "a51.png").write_bytes(b"no image")
    context = context_of(tmp_path)
    assert context.features("test").index.tolist() == [0, 2, 3, 4, 5]
    seen = [batch.index.tolist() for batch in context.batches("test", 4)]
    assert seen == [[0, 2, 3], [4, 5]]
    (skipped,) = context.results.skipped
    assert skipped.startswith("1 ")
    assert "of test" in skipped


def test_renormalize_uses_the_mean_and_std_of_the_model(tmp_path: Path) -> None:
    pictures(tmp_path / "train", {"a": 5, "b": 5})
    x = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    other = context_of(tmp_path, mean=(0.5, 0.5, 0.5), std=(0.5, 0.4, 0.3))
    expected = (x - 0.5) / torch.tensor([0.5, 0.4, 0.3])[:, None, None]
    torch.testing.assert_close(other.renormalize(normalize(x)), expected, rtol=1e-5, atol=1e-5)
    own = context_of(tmp_path, mean=MEAN, std=STD)
    assert own.renormalize(x) is x


def test_image_fingerprint_depends_on_content_not_location(tmp_path: Path) -> None:
    """Compare the same files in another folder, and other images with the same names and labels."""
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


def test_train_parts_depend_on_the_seed(tmp_path: Path) -> None:
    context = context_of(place(tmp_path, {"a": 30, "b": 30}, {"a": 2, "b": 2}))
    context.seed = 5
    kept, held = stratified(context.features("train").labels, 0.1, seed=5)
    assert torch.equal(context.parts[0], kept)
    assert torch.equal(context.parts[1], held)
    assert not torch.equal(held, stratified(context.features("train").labels, 0.1, seed=0).held)
    context.close()


def test_crop_changes_the_cached_features(tmp_path: Path) -> None:
    place(tmp_path / "set", {"a": 3, "b": 3}, {"a": 2, "b": 2})
    found = []
    for share in (1.0, 0.5):
        context = context_of(tmp_path / "set")
        context.cache, context.crop = tmp_path / "cache", context.crop._replace(share=share)
        found.append(context.features("train").feats)
        context.close()
    assert not torch.equal(*found)


def test_bfloat16_features_are_cached_separately(tmp_path: Path) -> None:
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

"""The stored predictions match the logits, and the stored images are those of the errors."""

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_context import context_of, place

from compressive.evaluation.context import EvalContext, TaskOptions
from compressive.evaluation.predictions import write_predictions
from compressive.evaluation.results_folder import refuse_other_files
from compressive.evaluation.scores import add_test_scores
from compressive.evaluation.thumbnails import crop_thumbnails
from compressive.rundir.predictions_file import predictions_file, read_predictions


def small_context(folder: Path) -> EvalContext:
    return context_of(place(folder, {"a": 2, "b": 2, "c": 2}, {"a": 4, "b": 3, "c": 2}))


def random_logits(count: int) -> torch.Tensor:
    return 3 * torch.randn(count, 3, generator=torch.Generator().manual_seed(0))


def test_predictions_match_the_logits(tmp_path: Path) -> None:
    context, missing = small_context(tmp_path / "data"), list[str]()
    logits = random_logits(9)
    write_predictions(context, "logistic", logits, tmp_path)
    found = read_predictions(tmp_path, missing)["logistic"]
    assert missing == []
    assert found.classes == ["a", "b", "c"]
    np.testing.assert_array_equal(found.label, [0] * 4 + [1] * 3 + [2] * 2)
    np.testing.assert_array_equal(found.predicted, logits.argmax(1))
    np.testing.assert_allclose(found.confidence, logits.softmax(1).amax(1), rtol=1e-6)
    wrong = [i for i in range(9) if found.predicted[i] != found.label[i]]
    assert len(wrong) > 2
    assert found.error.tolist() == sorted(wrong, key=lambda i: -found.confidence[i])
    expected = crop_thumbnails(context, "test", torch.from_numpy(found.error).long())
    np.testing.assert_array_equal(found.error_image, expected)
    context.close()


def test_predictions_without_errors_have_no_images(tmp_path: Path) -> None:
    context = small_context(tmp_path / "data")
    labels = context.features("test").labels
    write_predictions(context, "linear", torch.nn.functional.one_hot(labels, 3).float(), tmp_path)
    found = read_predictions(tmp_path, [])["linear"]
    assert len(found.error) == len(found.error_image) == 0
    context.close()


def test_scores_write_predictions_only_to_a_folder(tmp_path: Path) -> None:
    context, out = small_context(tmp_path / "data"), tmp_path / "out"
    add_test_scores(context, "linear", lambda feats: random_logits(len(feats)), {})
    assert not context.after_results
    context.options = TaskOptions(out)
    add_test_scores(context, "linear", lambda feats: random_logits(len(feats)), {})
    assert not out.exists()
    (write,) = context.after_results
    write()
    found = read_predictions(out, [])["linear"]
    top1 = next(r for r in context.results.records if r.metric == "top-1")
    assert (found.predicted == found.label).mean() == top1.value
    assert (found.dataset, found.images) == (top1.dataset, top1.images)
    context.close()


def test_damaged_predictions_are_listed(tmp_path: Path) -> None:
    context = small_context(tmp_path / "data")
    path = write_predictions(context, "linear", random_logits(9), tmp_path)
    assert path.name == predictions_file("linear")
    path.write_bytes(path.read_bytes()[:-100])
    missing = list[str]()
    assert read_predictions(tmp_path, missing) == {}
    assert len(missing) == 1
    assert path.name in missing[0]
    context.close()


def test_evaluation_resumes_in_a_folder_with_only_predictions(tmp_path: Path) -> None:
    """An interrupted task leaves predictions without results.json; other files are refused."""
    out = tmp_path / "out"
    out.mkdir()
    (out / predictions_file("linear")).write_bytes(b"")
    refuse_other_files(out)
    (out / "photo.png").write_bytes(b"")
    with pytest.raises(ValueError, match="not empty"):
        refuse_other_files(out)

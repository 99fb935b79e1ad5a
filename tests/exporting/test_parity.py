"""The comparison of outputs, and the images that it uses."""

from collections.abc import Sequence
from pathlib import Path

import exportable
import pytest
import torch
from run_files import config_text
from tiny import photos, tiny

from compressive.config import flat
from compressive.exporting import parity
from compressive.exporting.parity import (
    compare_outputs,
    largest_difference,
    loaded_outputs,
    parity_images,
    with_larger_image,
)


def test_difference_is_a_share_of_the_largest_value() -> None:
    expected = torch.tensor([[1.0, -4.0], [2.0, 0.0]])
    assert largest_difference(expected, expected + 0.5) == pytest.approx(0.125)
    assert largest_difference(100 * expected, 100 * (expected + 0.5)) == pytest.approx(0.125)


def test_other_shape_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"\(2, 3\).*\(2, 2\)"):
        largest_difference(torch.ones(2, 2), torch.ones(2, 3))


@pytest.mark.parametrize("wrong", [2e-4, float("nan"), float("inf")])
def test_difference_above_the_tolerance_is_an_error(wrong: float) -> None:
    expected = torch.ones(2, 2)
    found = {"good": expected, "bad": expected.clone()}
    found["bad"][0, 1] += wrong
    with pytest.raises(ValueError, match=r"in bad .*0\.0001"):
        compare_outputs(expected, found, tolerance=1e-4, images="here")


def test_largest_difference_of_all_loaders_is_returned() -> None:
    expected = torch.full((3, 2), 2.0)
    found = {"one": expected + 1e-4, "two": expected}
    result = compare_outputs(expected, found, tolerance=1e-4, images="here")
    assert result.difference == pytest.approx(5e-5, rel=1e-2)
    assert (result.count, result.largest_output, result.images) == (3, 2.0, "here")


def test_images_of_several_sizes_keep_their_order() -> None:
    images = [torch.full((3, side, 2), i, dtype=torch.uint8) for i, side in enumerate([4, 5, 4])]

    def mean(_: object, __: Path, batches: Sequence[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
        assert [len(batch) for batch in batches] == [2, 1]
        return {"here": [batch.float().mean((1, 2, 3))[:, None] for batch in batches]}

    found = loaded_outputs(mean, exportable.model(on="meta"), Path(), images)
    assert found["here"].ravel().tolist() == [0, 1, 2]


def test_error_of_another_library_is_one_line() -> None:
    def fail(*_: object) -> dict[str, list[torch.Tensor]]:
        raise RuntimeError("first\nsecond")

    with pytest.raises(ValueError, match=r"first$"):
        loaded_outputs(fail, exportable.model(on="meta"), Path(), torch.ones(1))


def test_images_are_spread_and_damaged_ones_skipped(tmp_path: Path) -> None:
    folder = photos(tmp_path / "p", 20)
    (folder / "000.png").write_bytes(b"no image")
    found, origin = parity_images(folder, None)
    assert origin == str(folder)
    assert [image.shape[2] for image in found] == [26, 28, 30, 32, 34, 36, 38, 40]


def test_images_of_the_run_are_used_while_they_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    default = str(photos(tmp_path / "default", 2))  # generating the built-in images takes a second
    monkeypatch.setattr(parity, "_DEFAULT", default)
    folder = photos(tmp_path / "p", 2)
    settings = {**flat(tiny())}
    nested: dict[str, dict[str, object]] = {}
    for name, value in (settings | {"data.source": str(folder)}).items():
        section, _, last = name.rpartition(".")
        (nested.setdefault(section, {}) if section else nested)[last] = value  # pyright: ignore[reportArgumentType]
    (tmp_path / "config.json").write_text(config_text(nested))
    assert parity_images("", tmp_path)[1] == str(folder)
    folder.rename(tmp_path / "moved")
    assert parity_images("", tmp_path)[1] == default


def test_given_images_must_exist(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        parity_images(tmp_path / "nowhere", None)


def test_unreadable_images_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(b"no image")
    with pytest.raises(ValueError, match="--images"):
        parity_images(tmp_path, None)


def test_larger_image_is_added_only_if_none_is_larger() -> None:
    small = torch.zeros(3, 5, 7, dtype=torch.uint8)
    *_, large = with_larger_image([small], 16)
    assert max(large.shape[1:]) > 16
    assert len(with_larger_image([small, large], 16)) == 2

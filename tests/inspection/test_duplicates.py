"""Groups of equal and similar images equal the connected components of scipy."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from tiny import silent

from compressive.data.synthetic import pictures
from compressive.inspection.duplicates import (
    _connected,
    find_duplicates,
    leaking,
    representatives,
)
from compressive.inspection.scan import Scan, data_splits, scan


def test_connected_items_have_one_number() -> None:
    random = np.random.default_rng(0)
    for count in (1, 5, 60):
        pairs = random.integers(0, count, (count // 2, 2))
        ours = _connected(pairs, count)
        graph = coo_array((np.ones(len(pairs)), (pairs[:, 0], pairs[:, 1])), (count, count))
        _, theirs = connected_components(graph, directed=False)
        assert len(np.unique(ours)) == len(np.unique(theirs))
        assert len(np.unique(np.stack([ours, theirs]), axis=1).T) == len(np.unique(ours))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 30 images; 0 is also a BMP in test, 1 is mirrored in train, one file is damaged."""
    place = tmp_path_factory.mktemp("images")
    images = pictures(30)[0].transpose(0, 2, 3, 1)
    for split in ("train", "test"):
        (place / split).mkdir()
    for i, image in enumerate(images):
        split = "train" if i < 20 else "test"
        Image.fromarray(image).save(place / split / f"{i:02}.png")
    Image.fromarray(images[0]).save(place / "test" / "copy.bmp")
    Image.fromarray(images[1][:, ::-1].copy()).save(place / "train" / "mirror.png")
    (place / "train" / "broken.jpg").write_bytes(b"\xff\xd8\xff")
    return place


@pytest.fixture(scope="module")
def found(folder: Path) -> Scan:
    return scan(data_splits(str(folder), 10**8), None, torch.device("cpu"), silent())


def test_scan_notes_files_sizes_and_reasons(folder: Path, found: Scan) -> None:
    names = [Path(found.origin(i)).name for i in range(len(found))]
    assert [split.name for split in found.splits] == ["train", "test"]
    for i, name in enumerate(names):
        path = Path(found.origin(i))
        assert found.size[i] == path.stat().st_size
        if name == "broken.jpg":
            assert found.reasons[i]
            assert not found.readable[i]
            continue
        with Image.open(path) as picture:
            assert (found.width[i], found.height[i]) == picture.size
            assert found.kind[i] == picture.format
    assert list(found.reasons) == [names.index("broken.jpg")]


def test_copies_are_grouped_and_leaks_are_found(found: Scan) -> None:
    unique, position = representatives(found)
    made = find_duplicates(found, unique, position, None)
    named = {Path(found.origin(i)).name: i for i in range(len(found))}
    exact = {frozenset(group.tolist()) for group in made.groups("exact")}
    assert exact == {frozenset((named["00.png"], named["copy.bmp"]))}
    near = [set(group.tolist()) for group in made.groups("near")]
    assert any({named["01.png"], named["mirror.png"]} <= group for group in near)
    assert made.near[named["broken.jpg"]] == -1
    assert made.similarity[named["00.png"]] == 1
    leaks = leaking(found, made.groups("exact"))
    assert [set(group.tolist()) for group in leaks] == [{named["00.png"], named["copy.bmp"]}]
    assert not made._replace(exact=np.full(3, -1)).groups("exact")

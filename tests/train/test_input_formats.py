"""Every input format is opened, trained on, resumed bitwise and evaluated; docs/formats.md."""

import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from input_formats import CLASSES, FORMATS, labels, pixels, planted, several
from safetensors.torch import load_file
from tiny import CHANGES, differences, last, silent

import compressive
from compressive.data.several import count_table
from compressive.data.source import NoSplit, Source
from compressive.data.sources import open_source
from compressive.progress import Display
from compressive.rundir.folder import read_config

pytestmark = pytest.mark.usefixtures("one_thread")

PAGE = Path(__file__).parents[2] / "docs" / "formats.md"
# Formats of the table that are not in `FORMATS` because they have other images.
OTHERS = {"builtin", "several sources", "HEIC files", "a Source"}
SMALL = [each for each in CHANGES if not each.startswith("views.size")]


def read(source: Source) -> torch.Tensor:
    return torch.stack([source.image(i) for i in range(len(source))])


@pytest.mark.parametrize("name", FORMATS)
def test_format_gives_the_planted_images_and_labels(name: str, tmp_path: Path) -> None:
    kind = FORMATS[name]
    place = kind.make(tmp_path)
    for split in ("train", "test"):
        if split == "test" and not kind.has_test:
            with pytest.raises(NoSplit):
                open_source(place, split)
            continue
        source, truth = open_source(place, split), planted(split)
        assert torch.equal(read(source), pixels(truth)), split
        if not kind.has_labels:
            assert source.labels is None
            continue
        assert source.labels is not None
        assert source.labels.tolist() == labels(truth).tolist(), split
        assert source.classes == (CLASSES if kind.has_names else ("0", "1", "2"))


class StopAtStep(Display):
    """Ask the run to stop when step 1 is displayed."""

    def __init__(self) -> None:
        super().__init__(quiet=True)

    def progress(
        self, title: str, done: float, total: float, readings: Any = None, *, unit: str = ""
    ) -> None:
        if readings is not None and done == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def trained(place: Any, out: Path, display: Display | None = None, limit: int = 0) -> Any:
    given: dict[str, Any] = {"method": "simclr", "image_size": 16, "display": display or silent()}
    return compressive.pretrain(place, out, settings=[*SMALL, f"data.limit={limit}"], **given)


def check_training(
    place: Any, root: Path, *, is_path: bool, has_labels: bool, limit: int = 0
) -> None:
    """Train, stop and resume, and compare with an uninterrupted run; then evaluate."""
    assert trained(place, root / "whole", limit=limit).step == 2
    assert trained(place, root / "parts", StopAtStep(), limit=limit).step == 1
    assert trained(place, root / "parts", limit=limit).step == 2
    assert differences(last(root / "parts"), last(root / "whole")) == []
    chosen: dict[str, Any] = {"device": "cpu", "display": silent(), "seed": 0}
    chosen |= {"max_images": limit}
    chosen |= {"tasks": "knn" if has_labels else "geometry"}
    if not is_path:
        with pytest.raises(ValueError, match=r"python:.*--data"):
            compressive.evaluate(root / "whole", **chosen)
    own = {} if is_path else {"data": place}
    results, _ = compressive.evaluate(root / "whole", **own, **chosen)
    assert results.records


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Return the encoder trained on class folders; that of every format must be the same."""
    threads, root = torch.get_num_threads(), tmp_path_factory.mktemp("reference")
    torch.set_num_threads(1)
    trained(FORMATS["class folders"].make(root), root / "run")
    torch.set_num_threads(threads)
    return load_file(root / "run" / "encoder.safetensors")


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_format_is_trained_resumed_and_evaluated(
    name: str, tmp_path: Path, reference: dict[str, torch.Tensor]
) -> None:
    kind = FORMATS[name]
    place = kind.make(tmp_path)
    check_training(place, tmp_path, is_path=kind.is_path, has_labels=kind.has_labels)
    assert differences(load_file(tmp_path / "whole" / "encoder.safetensors"), reference) == []


@pytest.mark.slow
def test_several_sources_are_trained_resumed_and_evaluated(tmp_path: Path) -> None:
    check_training(several(tmp_path), tmp_path, is_path=True, has_labels=True)
    stored = read_config(tmp_path / "whole").data.source
    assert stored == f'["{tmp_path}/folder", "{tmp_path}/more.zip"]'


@pytest.mark.slow
def test_source_object_is_trained_resumed_and_evaluated(tmp_path: Path) -> None:
    source = open_source(FORMATS["class folders"].make(tmp_path))
    check_training(source, tmp_path, is_path=False, has_labels=True)


@pytest.mark.slow
def test_builtin_images_are_trained_resumed_and_evaluated(tmp_path: Path) -> None:
    """Features of a hundred of the 8,400 images are enough to show it."""
    check_training("builtin", tmp_path, is_path=True, has_labels=True, limit=100)


def test_table_of_formats_names_exactly_the_tested_ones() -> None:
    rows = re.findall(r"^\| `?([^|`]+?)`? \| .*✓ \| ✓ \| ✓ \| ✓ \|$", PAGE.read_text(), re.M)
    assert set(rows) == FORMATS.keys() | OTHERS
    assert len(rows) == len(set(rows))


def test_counts_of_several_sources_are_shown(tmp_path: Path) -> None:
    source = open_source(several(tmp_path))
    cells = [re.split(r" {2,}", line.strip()) for line in count_table(source)]
    assert cells == [
        ["source", "images", "labeled", "classes"],
        [str(tmp_path / "folder"), "20", "20", "2"],
        [str(tmp_path / "more.zip"), "20", "20", "2"],
        ["all", "40", "40", "4"],
    ]

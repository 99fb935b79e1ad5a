"""Several sources as one: order, merged classes, splits, the table of counts, and resuming."""

import json
import shutil
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import error_line, run
from input_formats import CLASSES, Photos, class_folders, planted, put, several, zip_archive
from tiny import CHANGES, Written, differences, last, noise, photos, silent, tiny

import compressive
from compressive.data.fingerprint import DatasetFingerprint
from compressive.data.several import CombinedSource, count_table, take
from compressive.data.source import NoSplit, fetch_ahead, require_source
from compressive.data.sources import open_source
from compressive.progress import Display
from compressive.rundir.folder import read_config
from compressive.rundir.places import absolute_places, join_places, short_name, split_places
from compressive.train.images import load_source

SMALL = [each for each in CHANGES if not each.startswith("views.size")]


def two(root: Path) -> list[Path]:
    """Return two class folders that share one class."""
    for name, classes in {"a": ("dog", "cat"), "b": ("emu", "cat")}.items():
        for k, label in enumerate(classes):
            put(root / name / label / "0.png", planted()[10 * k].png)
    return [root / "a", root / "b"]


def test_images_come_in_the_order_of_the_sources(tmp_path: Path) -> None:
    places = [photos(tmp_path / "a", 3), class_folders(tmp_path), photos(tmp_path / "b", 2)]
    parts = [open_source(place) for place in places]
    whole = open_source(places)
    assert isinstance(whole, CombinedSource)
    require_source(whole)
    assert len(whole) == 35
    pairs = [(part, i) for part in parts for i in range(len(part))]
    for k, (part, i) in enumerate(pairs):
        assert whole.origin(k) == part.origin(i)
        assert torch.equal(whole.image(k), part.image(i))
    assert whole.labels is not None
    assert whole.labels.tolist() == [-1] * 3 + [i // 10 for i in range(30)] + [-1] * 2
    for i in (-1, 35):
        with pytest.raises(IndexError):
            whole.image(i)


class Remote:
    """A source that remembers which images were announced."""

    labels = classes = None

    def __init__(self, count: int) -> None:
        self.count, self.name, self.announced = count, "remote", list[int]()

    def __len__(self) -> int:
        return self.count

    def image(self, i: int) -> torch.Tensor:
        return torch.full((3, 4, 4), i, dtype=torch.uint8)

    def origin(self, i: int) -> str:
        return f"remote {i}"

    def ahead(self, indices: Sequence[int]) -> None:
        self.announced += indices


def test_parts_learn_which_images_come_soon() -> None:
    first, second = Remote(3), Remote(2)
    fetch_ahead(CombinedSource([first, second]), [4, 0, 2, 3])
    assert first.announced == [0, 2]
    assert second.announced == [1, 0]


def test_classes_are_merged_by_name(tmp_path: Path) -> None:
    whole = open_source(two(tmp_path))
    assert whole.labels is not None
    assert whole.classes is not None
    assert set(whole.classes) == {"dog", "cat", "emu"}
    names = [whole.classes[i] for i in whole.labels]
    assert names == [Path(whole.origin(i)).parent.name for i in range(len(whole))]


def test_labels_that_cannot_be_compared_are_left_out(tmp_path: Path) -> None:
    for name, classes in {"a": ("0", "1"), "b": ("cat", "dog")}.items():
        for label in classes:
            put(tmp_path / name / label / "0.png", planted()[0].png)
    with pytest.warns(UserWarning, match=r"left out.*/a have numbers and those of .*/b names"):
        assert open_source([tmp_path / "a", tmp_path / "b"]).labels is None


def test_test_split_has_the_images_of_sources_that_have_one(tmp_path: Path) -> None:
    places = [zip_archive(tmp_path), photos(tmp_path / "flat", 2)]
    assert len(open_source(places)) == 32
    with pytest.warns(UserWarning, match=r"photos\.zip only; .*flat has no such split"):
        assert len(open_source(places, "test")) == 6
    with pytest.raises(NoSplit):
        open_source([photos(tmp_path / "c", 2), photos(tmp_path / "d", 2)], "test")
    (tmp_path / "test.txt").write_text(f"{tmp_path}/c/000.png")
    for each in planted("test"):  # every source must have the split to train on
        put(tmp_path / "only" / "test" / each.folder, each.png)
    with pytest.raises(NoSplit, match="only"):
        open_source([photos(tmp_path / "c", 2), tmp_path / "only"])


def test_single_shard_is_not_its_own_test_split(tmp_path: Path) -> None:
    zip_archive(tmp_path)
    shutil.copytree(photos(tmp_path / "a", 3), tmp_path / "b")
    shutil.make_archive(str(tmp_path / "my-test"), "zip", tmp_path / "b")
    with pytest.warns(UserWarning, match="my-test.zip has no such split"):
        found = open_source([tmp_path / "photos.zip", tmp_path / "my-test.zip"], "test")
    assert len(found) == 6


def test_fingerprint_covers_every_source(tmp_path: Path) -> None:
    places = two(tmp_path)
    before = DatasetFingerprint(open_source(places)).of()
    noise(8, 8, seed=99).save(places[1] / "emu" / "0.png")
    assert DatasetFingerprint(open_source(places)).of() != before


def test_limit_keeps_the_table(tmp_path: Path) -> None:
    whole = open_source(several(tmp_path))
    index = torch.tensor([0, 5, 19, 20, 39])
    part = take(whole, index)
    assert [part.origin(i) for i in range(5)] == [whole.origin(int(i)) for i in index]
    assert [line.split()[1] for line in count_table(part)] == ["images", "3", "2", "5"]
    assert part.classes == whole.classes
    config = tiny(f"data.source={json.dumps([str(p) for p in several(tmp_path)])}", "data.limit=9")
    assert count_table(load_source(config))[-1].split()[1] == "9"


def test_places_are_one_setting() -> None:
    assert split_places("a") == ["a"]
    assert split_places('["a", "b c"]') == ["a", "b c"]
    assert split_places('["a') == ['["a']  # a folder may be called so
    assert join_places(["a"]) == "a"
    assert split_places(join_places(["a", 'b"', '["c", "d"]'])) == ["a", 'b"', "c", "d"]
    assert short_name('["x/a", "torchvision:B", "c/d.zip", "e", "f"]') == "a+B+d.zip+2"
    assert split_places(absolute_places('["/tmp", "builtin", "gone"]')) == [
        "/tmp",
        "builtin",
        "gone",
    ]


def test_command_takes_several_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    several(tmp_path)
    monkeypatch.chdir(tmp_path)
    options = "--method simclr --image-size 16 " + " ".join(f"--set {each}" for each in SMALL)
    result = run(f"pretrain folder more.zip --out run {options}")
    assert result.exit_code == 0, result.output
    assert "more.zip" in result.stdout
    rows = [line.split() for line in result.stdout.splitlines() if line.split()[0] == "all"]
    assert rows == [["all", "40", "40", "4"]]
    stored = read_config(tmp_path / "run").data.source
    assert split_places(stored) == [str(tmp_path / "folder"), str(tmp_path / "more.zip")]


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_command_evaluates_on_repeated_data(tmp_path: Path) -> None:
    place, more = several(tmp_path)
    compressive.pretrain(tiny(f"data.source={place}"), tmp_path / "run", display=silent())
    words = f"evaluate {tmp_path}/run --data {place} --data {more} --tasks knn --device cpu"
    result = run(f"{words} --out {tmp_path}/results")
    assert result.exit_code == 0, result.output
    about = json.loads((tmp_path / "results" / "results.json").read_text())["about"]
    assert (about["data"], about["train_images"], about["classes"]) == ("folder+more.zip", 40, 4)
    assert "given twice" in error_line(f"{words} --data {place}")


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_moved_sources_resume_and_changed_ones_do_not(tmp_path: Path) -> None:
    places, out, said = several(tmp_path), tmp_path / "run", Written()

    def trained(places: list[Path], display: Display) -> int:
        config = tiny(f"data.source={join_places(map(str, places))}")
        return compressive.pretrain(config, out, display=display).step

    trained(places, silent())
    (tmp_path / "moved").mkdir()
    moved = [Path(shutil.move(place, tmp_path / "moved" / place.name)) for place in places]
    assert trained(moved, said) == 2
    assert any("already finished" in line for line in said.said)
    (moved[0] / "train" / "bee" / "3.png").unlink()
    with pytest.raises(ValueError, match=r"1 file removed \('0:train/bee/3\.png'\)"):
        trained(moved, silent())
    with zipfile.ZipFile(moved[1], "a") as archive:
        archive.writestr("train/cat/99.png", b"")
    planted_again = next(each for each in planted("train") if each.folder == "bee/3.png")
    put(moved[0] / "train" / planted_again.folder, planted_again.png)
    with pytest.raises(ValueError, match=r"1 file changed \('1:more\.zip'\)|has 41"):
        trained(moved, silent())


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
def test_objects_and_folders_are_trained_together(tmp_path: Path) -> None:
    """Evaluating such a run needs --data, because an object cannot be opened by name."""
    fixed: dict[str, Any] = {"method": "simclr", "image_size": 16, "settings": SMALL}
    data = [photos(tmp_path / "a", 4), Photos()]
    for name in ("one", "two"):
        compressive.pretrain(data, tmp_path / name, display=silent(), **fixed)
    assert differences(last(tmp_path / "one"), last(tmp_path / "two")) == []
    with pytest.raises(ValueError, match=r"trained on python:Photos, which is not here.*--data"):
        compressive.evaluate(tmp_path / "one", tasks="knn")
    results, _ = compressive.evaluate(
        tmp_path / "one", data=data, tasks="knn", device="cpu", display=silent()
    )
    assert results.about["classes"] == len(CLASSES)


def test_objects_of_the_same_name_are_different_sources() -> None:
    whole = open_source([Photos("train"), Photos("test")])
    assert len(whole) == len(planted())
    assert [line.split()[1] for line in count_table(whole)] == ["images", "30", "6", "36"]
    one = Photos()
    with pytest.raises(ValueError, match="same object twice"):
        open_source([one, one])


def test_bad_sources_are_one_line(tmp_path: Path) -> None:
    a, b = photos(tmp_path / "a", 3), photos(tmp_path / "b", 3)
    assert "given twice" in error_line(f"pretrain {a} {b} {b}/../a")
    assert "builtin is given twice" in error_line("pretrain builtin builtin")
    assert f"{a}/x is a part of {a}" in error_line(f"pretrain {a} {photos(a / 'x', 2)}")
    assert f"no file or folder {tmp_path}/c" in error_line(f"pretrain {a} {tmp_path}/c")
    (tmp_path / "empty").mkdir()
    line = error_line(f"pretrain {a} {tmp_path}/empty --out {tmp_path}/run")
    assert f"no images in {tmp_path}/empty" in line
    assert not (tmp_path / "run").exists()

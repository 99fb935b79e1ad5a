"""Folders of evaluations on all images and on some of them."""

from pathlib import Path

from compressive.evaluation.results import Results
from compressive.evaluation.results_folder import default_results_folder


def write_results(folder: Path, max_images: int) -> None:
    results = Results("a", set="images")
    results.about["max_images"] = max_images
    results.add("geometry", "images", "uniformity", 1.0, protocol={}, n=1)
    results.write(folder)


def test_first_evaluation_uses_the_folder_of_the_run(tmp_path: Path) -> None:
    for count in (0, 20):
        assert default_results_folder(str(tmp_path), "evaluation", count) == tmp_path / "evaluation"


def test_fewer_images_after_all_images_use_another_folder(tmp_path: Path) -> None:
    write_results(tmp_path / "evaluation", 0)
    found = default_results_folder(str(tmp_path), "evaluation", 20)
    assert found == tmp_path / "evaluation-20"
    assert (tmp_path / "evaluation" / "results.json").is_file()


def test_all_images_after_fewer_images_move_the_earlier_results(tmp_path: Path) -> None:
    write_results(tmp_path / "evaluation", 20)
    assert default_results_folder(str(tmp_path), "evaluation", 20) == tmp_path / "evaluation"
    assert default_results_folder(str(tmp_path), "evaluation", 0) == tmp_path / "evaluation"
    assert not (tmp_path / "evaluation").exists()
    assert (tmp_path / "evaluation-20" / "results.json").is_file()

"""The model card: data, recipe, results with intervals, limitations, license, citation."""

from pathlib import Path

import exportable
import pytest
from run_files import config_text, record, results_text

from compressive.exporting.model_card import model_card
from compressive.exporting.parity import Parity

PARITY = Parity(2.5e-7, 3.0, 1e-4, "photos", 8)


def card(run: Path | None, license_name: str = "", **options: object) -> str:
    from dataclasses import replace

    model = replace(exportable.model(**options), run=run)  # pyright: ignore[reportArgumentType]
    return model_card(
        model,
        PARITY,
        versions={"compressive": "9.8"},
        license_name=license_name,
        preprocessing_difference=0.125,
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    settings = {"method": "c-byol", "recipe": "auto", "data": {"source": "/home/me/birds"}}
    (tmp_path / "config.json").write_text(config_text(settings))
    (tmp_path / "evaluation").mkdir()
    records = [
        record("linear", "birds", "top-1", 0.5, low=0.48, high=0.52),
        record("kNN", "birds", "top-1", 0.25),
    ]
    text = results_text(records, skipped=["transfer: no data"])
    (tmp_path / "evaluation" / "results.json").write_text(text)
    return tmp_path


def test_card_lists_data_recipe_and_all_results_with_intervals(run: Path) -> None:
    text = card(run)
    assert "`birds`" in text
    assert "/home/me" not in text
    assert "| `method` | c-byol |" in text
    assert "| linear | birds | top-1 | 50.0 % | [48.0, 52.0] | 2,400 |" in text
    assert "| kNN | birds | top-1 | 25.0 % |  | 2,400 |" in text
    assert "transfer: no data" in text


def test_card_states_the_differences(run: Path) -> None:
    text = card(run)
    assert "2.5e-07" in text
    assert "1.2e-01" in text
    assert "0.0001" in text


def test_card_cites_the_paper_and_this_software(run: Path) -> None:
    text = card(run)
    assert "Compressive Visual Representations" in text
    assert "version = {9.8}" in text
    assert "## Limitations" in text


def test_license_is_in_the_header_only_if_it_is_given(run: Path) -> None:
    assert 'license: "mit"' in card(run, "mit").partition("\n# ")[0]
    assert "license:" not in card(run).partition("\n# ")[0]
    assert "--license" in card(run)


def test_results_of_other_weights_are_left_out(run: Path) -> None:
    exportable.encoder_file(run)
    path = run / "evaluation" / "results.json"
    path.write_text(path.read_text().replace('"about": {}', '"about": {"weights": "0"}'))
    text = card(run)
    assert "50.0 %" not in text
    assert "other weights" in text


def test_card_without_a_run_says_so() -> None:
    text = card(None)
    assert "not known" in text
    assert "not evaluated" in text


def test_card_of_a_classifier_names_its_task(run: Path) -> None:
    text = card(run, classes=("a", "b"))
    assert "pipeline_tag: image-classification" in text
    assert "Fine-tuned with labels on `birds`" in text

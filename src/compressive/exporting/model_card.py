"""README.md of a Hugging Face folder: data, recipe, results, limitations, license, citation."""

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from compressive.exporting.model import ExportModel
from compressive.exporting.parity import Parity
from compressive.reporting.labels import method_name
from compressive.reporting.tables import number_cell
from compressive.rundir.places import split_places
from compressive.rundir.reader import RunFolder, of_other_weights, read_runs

_SETTINGS = (
    *("recipe", "method", "network.name", "network.width", "network.stem", "network.variant"),
    *("views.size", "train.epochs", "train.steps", "train.batch_size", "optim.name", "optim.lr"),
    *("bottleneck.beta", "seed"),
)
_CITATION = """\
```bibtex
@inproceedings{lee2021compressive,
  title     = {Compressive Visual Representations},
  author    = {Lee, Kuang-Huei and Arnab, Anurag and Guadarrama, Sergio and Canny, John and
               Fischer, Ian},
  booktitle = {Advances in Neural Information Processing Systems},
  volume    = {34},
  year      = {2021}
}
@software{compressive,
  title   = {compressive: self-supervised visual representations with measured information content},
  author  = {{compressive maintainers}},
  version = {VERSION}
}
```
"""


def model_card(
    model: ExportModel,
    parity: Parity,
    *,
    versions: Mapping[str, str],
    license_name: str,
    preprocessing_difference: float,
) -> str:
    """Return the text of the model card."""
    run = _open_run(model.run)
    parts = [
        _front_matter(model, license_name),
        f"# {_title_text(model, run)}\n",
        f"{_summary_text(model)}\n",
        f"## Use\n\n{_use_text(model)}",
        f"## Data\n\n{_data_text(model, run)}\n",
        f"## Recipe\n\n{_recipe_text(run)}\n",
        f"## Results\n\n{_results_text(run)}\n",
        f"## Preprocessing and parity\n\n{_parity_text(model, parity, preprocessing_difference)}\n",
        f"## Limitations\n\n{_limitations_text(model, run)}\n",
        f"## License\n\n{license_name or _NO_LICENSE}\n",
        "## Citation\n\n" + _CITATION.replace("VERSION", versions.get("compressive", "")),
    ]
    return "\n".join(parts)


_NO_LICENSE = (
    "Not stated. Export again with `--license`, or add `license:` at the top of this file. Check "
    "the terms of the training images first."
)


def _front_matter(model: ExportModel, license_name: str) -> str:
    kind = "image-classification" if model.head else "image-feature-extraction"
    lines = ["library_name: timm", f"pipeline_tag: {kind}"]
    lines += [f"license: {json.dumps(license_name)}"] if license_name else []
    return "\n".join(["---", *lines, "tags:", "- timm", "- compressive", "---\n"])


def _open_run(path: Path | None) -> RunFolder | None:
    if path is not None:
        with suppress(ValueError, OSError):
            return read_runs([path])[0]
    return None


def _title_text(model: ExportModel, run: RunFolder | None) -> str:
    method = run.settings.get("method") if run else None
    parts = [model.encoder.settings.name]
    parts += [method_name(method)] if method else []
    parts += [f"classifier of {len(model.classes)} classes"] if model.head else []
    return ", ".join(parts)


def _summary_text(model: ExportModel) -> str:
    encoder = model.encoder
    count = sum(weight.numel() for weight in encoder.parameters()) / 1e6
    what = f"{len(model.classes)} classes" if model.head else f"{model.output_dim} features"
    options = {name: getattr(encoder.settings, name) for name in ("width", "stem", "variant")}
    texts = ", ".join(f"{name} {value}" for name, value in options.items())
    network = f"`{encoder.settings.name}` ({texts}) with {count:.1f} million weights"
    return f"An image encoder: {network}. It maps {encoder.size} x {encoder.size} pixels to {what}."


def _use_text(model: ExportModel) -> str:
    import_line, kind, output = (
        ("AutoModelForImageClassification", "AutoModelForImageClassification", "logits")
        if model.head
        else ("AutoModel", "AutoModel", "pooler_output")
    )
    code = [
        "import timm",
        f"from transformers import AutoImageProcessor, {import_line}",
        "",
        'network = timm.create_model("local-dir:FOLDER", pretrained=True).eval()',
        "",
        f'model = {kind}.from_pretrained("FOLDER").eval()',
        'processor = AutoImageProcessor.from_pretrained("FOLDER")',
        f"outputs = model(**processor(image)).{output}",
    ]
    return "\n".join(["```python", *code, "```\n"])


def _data_text(model: ExportModel, run: RunFolder | None) -> str:
    if run is None or not run.settings:
        return "The training images are not known: the weights were not exported from a run folder."
    source = str(run.settings.get("data.source", "?"))
    limit = run.settings.get("data.limit")
    few = f", limited to {limit:,} images" if isinstance(limit, int) and limit else ""
    how = "Fine-tuned with labels" if model.head else "Pretrained without labels"
    names = " and ".join(f"`{Path(place).name or place}`" for place in split_places(source))
    return f"{how} on {names}{few}."


def _recipe_text(run: RunFolder | None) -> str:
    if run is None or not run.settings:
        return "Not known."
    found = [(name, run.settings[name]) for name in _SETTINGS if name in run.settings]
    rows = [f"| `{name}` | {_cell(value)} |" for name, value in found if value not in ("", None)]
    return "\n".join(["| setting | value |", "|---|---|", *rows])


def _results_text(run: RunFolder | None) -> str:
    if run is None or not run.records:
        return "The encoder was not evaluated."
    if run.path is not None and of_other_weights(run.path, run.evaluated):
        return "The results in the run folder are of other weights, so they are not listed."
    head = [
        "| task | data | metric | value | 95 % interval | images |",
        "|---|---|---|---|---|---|",
    ]
    rows = []
    for record in run.records:
        cell = number_cell(record)
        texts = (record.task, record.dataset, record.metric, cell.text, cell.note)
        rows.append(f"| {' | '.join(map(_cell, texts))} | {record.n:,} |")
    skipped = [f"- skipped: {text}" for text in run.skipped]
    return "\n".join([*head, *rows, *(["", *skipped] if skipped else [])])


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text.replace("\N{NO-BREAK SPACE}", " ").replace("|", "\\|").replace("\n", " ")


def _parity_text(model: ExportModel, parity: Parity, difference: float) -> str:
    how = "with" if model.encoder.antialias else "without"
    own = f"was trained on crops that are resized {how} antialiasing. timm's transform resizes"
    own = f"The encoder {own} with antialiasing before it crops."
    if model.encoder.crop is not None:
        own = "timm's transform follows the preprocessing of the published weights."
    lines = [
        f"The outputs in timm and transformers differ from the original by at most "
        f"{parity.difference:.1e} of the largest output ({parity.count} images, limit "
        f"{parity.tolerance:g}).",
        f"{own} With it, outputs differ by up to {difference:.1e} of the largest output "
        "on these images. `preprocessor_config.json` describes the original preprocessing under "
        "`compressive`.",
    ]
    return "\n".join(lines)


def _limitations_text(model: ExportModel, run: RunFolder | None) -> str:
    lines: Sequence[str] = [
        "- The results above are all that was measured. Other images, tasks and populations need "
        "their own evaluation.",
        "- Self-supervised features reflect the biases of the training images.",
        f"- The network expects {model.encoder.size} pixels. Other sizes were not tested.",
    ]
    unfinished = run.unfinished() if run else ""
    return "\n".join([*lines, *([f"- {unfinished.capitalize()}."] if unfinished else [])])

"""Names and parameters of the corruptions of ImageNet-C, read from parameters.toml."""

import tomllib
from importlib.resources import files
from typing import Any

SeverityRow = tuple[tuple[float, ...], ...]

_FILE: dict[str, Any] = tomllib.loads(
    files("compressive.corruptions").joinpath("parameters.toml").read_text(encoding="utf-8")
)
ALEXNET_ERROR: dict[str, float] = _FILE.pop("alexnet_error")
NAMES = tuple(ALEXNET_ERROR)
EXTRAS = ("speckle_noise", "gaussian_blur", "spatter", "saturate")  # not part of the mean


def _rows(name: str, table: dict[str, Any]) -> SeverityRow:
    """Return the arguments of a corruption for each severity."""
    rows = [row if isinstance(row, list) else [row] for row in table[name]]
    unit = table["elastic_unit"] if name == "elastic_transform" else 1
    return tuple(tuple(unit * value for value in row) for row in rows)


# By the size of the images, in pixels.
TABLES = {
    int(size): {name: _rows(name, table) for name in (*NAMES, *EXTRAS)}
    for size, table in _FILE.items()
}
FROST_SCALES: dict[int, float] = {int(k): table["frost_scale"] for k, table in _FILE.items()}
FOG_MAPS: dict[int, int] = {int(size): table["fog_map"] for size, table in _FILE.items()}

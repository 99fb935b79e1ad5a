"""Write an encoder with fewer bits per weight, and measure how much its features change."""

from pathlib import Path

from compressive.encoder import load, pack
from compressive.exporting.parity import Parity, compare_outputs, parity_images
from compressive.rundir.files import CONFIG, local_path


def write_smaller(place: str | Path, out: Path, *, bits: int) -> Parity:
    """Write a file with 8 or 16 bits per weight; return the largest change of a feature."""
    original = load(place)
    pack(place, out, bits=bits)
    run = local_path(place)
    images, origin = parity_images("", run if (run / CONFIG).is_file() else None)
    inputs = original.preprocess(images)
    found = {"compressive": load(out)(inputs)}
    # How much is too much depends on the use, so any difference is reported.
    return compare_outputs(original(inputs), found, tolerance=float("inf"), images=origin)

"""Read gallery.safetensors: views, nearest neighbors and a map of the embeddings, as arrays."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

_ARRAYS = {  # name: number of axes, kind of dtype
    **{"views": (5, "u"), "query": (4, "u"), "neighbors": (5, "u"), "map": (2, "f")},
    **{"query_label": (1, "i"), "neighbor_label": (2, "i"), "map_label": (1, "i")},
}


class GalleryFile(NamedTuple):
    """Arrays and metadata of a gallery."""

    arrays: Mapping[str, np.ndarray]
    metadata: Mapping[str, str]


def read_gallery(path: Path, missing: list[str]) -> GalleryFile:
    """Return the arrays that have the expected shape, and list the others in `missing`."""
    if not path.is_file():
        missing.append(
            f"{path.name}: missing, so no views, neighbors and map; "
            "`compressive evaluate RUN --tasks gallery` makes it"
        )
        return GalleryFile({}, {})
    try:
        with safe_open(path, framework="numpy") as file:
            names = [name for name in file.keys() if name in _ARRAYS]  # noqa: SIM118
            arrays = {name: file.get_tensor(name) for name in names}
            metadata = dict(file.metadata() or {})
    except (SafetensorError, OSError, TypeError, ValueError):
        missing.append(f"{path.name}: damaged, or still being written")
        return GalleryFile({}, {})
    fits = {n: (a.ndim, a.dtype.kind) == _ARRAYS[n] and a.size > 0 for n, a in arrays.items()}
    if not all(fits.values()):
        odd = ", ".join(name for name in sorted(fits) if not fits[name])
        missing.append(f"{path.name}: {odd} of another shape or kind, left out")
    return GalleryFile({name: array for name, array in arrays.items() if fits[name]}, metadata)

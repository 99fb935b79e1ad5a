"""Small copies of images for a page, as data URLs."""

import base64
import io

from jaxtyping import UInt8
from PIL import Image
from torch import Tensor

from compressive.data.decode import Unreadable, shrink
from compressive.inspection.scan import Scan
from compressive.reporting.gallery import png

_THUMBNAIL_SIDE = 96  # pixels of the longer side
_EXACT = 48  # smaller images are stored without loss


def thumbnail_url(image: UInt8[Tensor, "3 h w"]) -> str:
    """Return a small copy of an image: PNG if it is tiny, else JPEG."""
    pixels = shrink(image, _THUMBNAIL_SIDE).permute(1, 2, 0).contiguous().numpy()
    if max(pixels.shape[:2]) <= _EXACT:
        return png(pixels)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=82)
    return "data:image/jpeg;base64," + base64.b64encode(file.getvalue()).decode()


class Thumbnails:
    """Thumbnails of a scan, each made once."""

    def __init__(self, scan: Scan) -> None:
        self._scan = scan
        self._made: dict[int, str] = {}

    def url(self, i: int) -> str:
        """Return the thumbnail of image i; "" if the file has become unreadable."""
        if i not in self._made:
            try:
                self._made[i] = thumbnail_url(self._scan.image(i))
            except (Unreadable, OSError):
                self._made[i] = ""
        return self._made[i]

"""Prepare images for shards: read, check, resize and encode them."""

import hashlib
import io
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor

from compressive.data.decode import MAX_PIXELS, Unreadable, decode, resize_image
from compressive.data.several import CombinedSource
from compressive.data.source import ImageSource, Source, fetch_ahead, pixels

# Kinds of files that are kept as they are; others are written as PNG.
_KINDS = {"JPEG": "jpg", "MPO": "jpg", "PNG": "png", "WEBP": "webp", "GIF": "gif", "BMP": "bmp"}
_KINDS |= {"TIFF": "tif", "PPM": "ppm", "AVIF": "avif"}


class Prepared(NamedTuple):
    """An encoded image with a digest of its pixels, or the reason why it is unreadable."""

    index: int
    content: bytes = b""
    kind: str = ""
    digest: str = ""
    error: str = ""


def prepare_image(source: Source, i: int, size: int, quality: int) -> Prepared:
    """Return image i, encoded; its own bytes are kept unless it is resized.

    The shorter side becomes `size` if it is longer; 0: keep all. `quality` is that of JPEG; 0: PNG.
    """
    number = i
    if isinstance(source, CombinedSource):
        source, i = source.find(i)
    try:
        found = source.stored(i) if isinstance(source, ImageSource) else pixels(source, i)
        most = source.max_pixels if isinstance(source, ImageSource) else MAX_PIXELS
        image = found if isinstance(found, Tensor) else decode(found, most)
    except Unreadable as error:
        return Prepared(number, error=str(error))
    digest = hashlib.blake2b(f"{tuple(image.shape)}".encode(), digest_size=16)
    digest.update(image.contiguous().numpy().tobytes())
    sides = image.shape[1:]
    if size and min(sides) > size:
        height, width = (max(size, round(n * size / min(sides))) for n in sides)
        content, kind = _encode(resize_image(image, [height, width]), quality)
    elif isinstance(found, bytes) and (kind := _kind(found)):
        content = found
    else:
        content, kind = _encode(image, 0)
    return Prepared(number, content, kind, digest.hexdigest())


def _kind(data: bytes) -> str:
    """Return the extension for encoded bytes, or "" if they must be written in another format."""
    with Image.open(io.BytesIO(data)) as picture:
        return _KINDS.get(picture.format or "", "")


def _encode(image: Tensor, quality: int) -> tuple[bytes, str]:
    file = io.BytesIO()
    picture = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy())
    if quality:
        picture.save(file, "JPEG", quality=quality)
        return file.getvalue(), "jpg"
    picture.save(file, "PNG")
    return file.getvalue(), "png"


def prepare_all(
    source: Source, indices: Sequence[int], size: int, quality: int, workers: int
) -> Iterator[Prepared]:
    """Yield prepared images in order; threads work ahead, with bounded memory."""
    torch.set_num_threads(1)  # resizing: the threads here already use all cores
    ahead = iter(indices)
    waiting: list[Future[Prepared]] = []
    with ThreadPoolExecutor(workers) as pool:
        try:
            while True:
                new = list(islice(ahead, 4 * workers - len(waiting)))
                fetch_ahead(source, new)
                waiting += [pool.submit(prepare_image, source, i, size, quality) for i in new]
                if not waiting:
                    return
                yield waiting.pop(0).result()
        finally:
            for each in waiting:
                each.cancel()

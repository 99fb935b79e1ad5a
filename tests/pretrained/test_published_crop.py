"""The preprocessing of third-party weights equals that of timm and torchvision with Pillow."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import timm.data
import torch
from PIL import Image
from torch import Tensor
from torchvision import transforms

import compressive
from compressive.augment.published_crop import PublishedCrop

pytestmark = pytest.mark.usefixtures("one_thread")

PHOTOS = Path(__file__).parents[3] / "shared" / "data" / "photos"
KERNELS = {
    "bilinear": transforms.InterpolationMode.BILINEAR,
    "bicubic": transforms.InterpolationMode.BICUBIC,
}


def picture(height: int, width: int, seed: int = 0) -> Image.Image:
    """Return an image with large shapes and fine texture."""
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(0, 256, (7, 9, 3), dtype=np.uint8))
    large = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=float)
    return Image.fromarray((large + random.normal(0, 8, large.shape)).clip(0, 255).astype(np.uint8))


def uint8(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def theirs(image: Image.Image, size: int, crop: PublishedCrop) -> Tensor:
    steps = [
        transforms.Resize(int(size / crop.share), KERNELS[crop.interpolation]),
        transforms.CenterCrop(size),
        transforms.ToTensor(),
    ]
    made: Any = transforms.Compose(steps)(image)
    return made


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("share", [0.875, 0.95, 1.0])
@pytest.mark.parametrize("sides", [(90, 131), (64, 64), (40, 33), (200, 57)])
def test_crop_equals_pillows(kernel: str, share: float, sides: tuple[int, int]) -> None:
    crop = PublishedCrop(share, kernel)  # pyright: ignore[reportArgumentType]
    image = picture(*sides)
    padded = torch.full((1, 3, 210, 210), 255, dtype=torch.uint8)  # as a batch holds it
    padded[0, :, : sides[0], : sides[1]] = uint8(image)
    expected, lengths = theirs(image, 48, crop), [torch.tensor([side]) for side in sides]
    found = crop(uint8(image)[None], 48)[0]
    # Pillow 13 resizes the columns of tall images first and rounds between both.
    assert 255 * (found - expected).abs().max() < (3.01 if sides[0] > 2 * sides[1] else 1e-3)
    assert torch.equal(crop(padded, 48, *lengths)[0], found)


def test_squashed_crop_ignores_the_aspect_ratio() -> None:
    image = picture(60, 90)
    expected = transforms.ToTensor()(image.resize((32, 32), Image.Resampling.BICUBIC))
    found = PublishedCrop(1.0, squash=True)(uint8(image)[None], 32)[0]
    assert torch.equal(found, expected)


def features(images: list[Image.Image], place: Path) -> tuple[Tensor, Tensor]:
    """Return features of our encoder and of timm's own pipeline, from weights in a folder."""
    torch.manual_seed(0)
    network = timm.create_model("test_vit", num_classes=0).eval()
    timm.models.save_for_hf(network, str(place))
    config = timm.data.resolve_model_data_config(network)
    transform = timm.data.create_transform(**config, is_training=False)
    encoder = compressive.load(place)
    with torch.no_grad():
        plain = network(torch.stack([transform(image) for image in images]))  # pyright: ignore
        return encoder(encoder.preprocess(images)), plain


def relative_difference(ours: Tensor, plain: Tensor) -> float:
    return ((ours - plain).norm(dim=1) / plain.norm(dim=1)).max().item()


def test_features_equal_those_of_timms_pipeline(tmp_path: Path) -> None:
    """Inputs are equal; only the order of sums in the network may differ."""
    images = [picture(150 + 40 * i, 300 - 30 * i, seed=i) for i in range(4)]
    assert relative_difference(*features(images, tmp_path)) < 1e-5


@pytest.mark.shared
def test_features_of_photographs_equal_those_of_timms_pipeline(tmp_path: Path) -> None:
    paths = sorted(p for p in PHOTOS.rglob("*") if p.suffix.lower() in (".jpg", ".jpeg", ".png"))
    images = [Image.open(path).convert("RGB") for path in paths[::100]]
    assert len(images) > 5
    assert relative_difference(*features(images, tmp_path)) < 1e-5

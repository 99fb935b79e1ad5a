"""A saved encoder gives the same features in compressive and timm, for all kinds of images."""

import io
from pathlib import Path
from typing import Any

import jaxtyping
import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from safetensors.torch import save as serialize
from tiny import noise, silent, tiny
from torch import Tensor, nn

import compressive
from compressive.augment.ops import center_crop, colors, normalize
from compressive.config import Network
from compressive.data.loaders import Resident, open_loader
from compressive.data.sampler import BatchIndices
from compressive.data.source import ImageSource
from compressive.data.sources import open_source
from compressive.encoder import Encoder, load, pack, save
from compressive.evaluation.frozen_model import FrozenModel, open_model
from compressive.networks import backbone, build, feature_dim
from compressive.rundir.files import ENCODER
from compressive.rundir.versions import UnsupportedFormat
from compressive.train.loop import pretrain
from compressive.train.online_eval import features

pytestmark = pytest.mark.usefixtures("one_thread")

SIZE, SIDE = 32, 60
SETTINGS = Network(name="test_resnet")


def trained(settings: Network) -> nn.Module:
    """Return a network with nontrivial batch norms and residual blocks."""
    torch.manual_seed(0)
    network = build(settings, SIZE)
    with torch.no_grad():
        for p in network.parameters():
            p.add_(0.05 * torch.randn_like(p))
        for _ in range(2):
            network(torch.randn(8, 3, SIZE, SIZE))
    return network


def saved(folder: Path, settings: Network) -> nn.Module:
    network = trained(settings)
    save(folder, network, settings, SIZE, SIDE)
    return network.eval()


def images(count: int = 3) -> Tensor:
    return torch.randn(count, 3, SIZE, SIZE)


@pytest.mark.parametrize("name", ["resnet18", "test_vit", "test_convnext", "test_vit_relpos"])
@torch.no_grad()  # attention rounds differently with gradients
def test_timm_loads_the_encoder_with_equal_features(name: str, tmp_path: Path) -> None:
    """Bitwise. test_vit_relpos has buffers that are not stored, which `load` must compute."""
    if not timm.is_model(name):
        pytest.skip(f"timm {timm.__version__} has no {name}")
    network = saved(tmp_path, Network(name=name))
    options: dict[str, Any] = {"img_size": SIZE} if "vit" in name else {}
    theirs = timm.create_model(
        name, num_classes=0, checkpoint_path=str(tmp_path / ENCODER), **options
    ).eval()
    ours = compressive.load(tmp_path)
    x = images()
    assert torch.equal(theirs(x), ours(x))
    assert torch.equal(network(x), ours(x))
    assert ours(x).shape == (3, ours.feature_dim)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        Network(name="resnet18", stem="cifar"),
        Network(name="resnet18", variant="official"),
    ],
    ids=["stem", "variant"],
)
def test_load_restores_networks_that_timm_lacks(settings: Network, tmp_path: Path) -> None:
    """timm rejects the weights rather than compute something else."""
    network = saved(tmp_path, settings)
    ours = load(tmp_path / ENCODER)
    x = images()
    assert torch.equal(network(x), ours(x))
    assert ours.settings == settings
    assert (ours.size, ours.side) == (SIZE, SIDE)
    with pytest.raises(RuntimeError, match=r"conv1\.weight|layer1\.0\.downsample"):
        timm.create_model("resnet18", num_classes=0, checkpoint_path=str(tmp_path / ENCODER))


def test_loaded_encoder_is_frozen_in_eval_mode(tmp_path: Path) -> None:
    saved(tmp_path, Network(name="test_resnet"))
    ours = load(tmp_path)
    assert not ours.training
    assert not any(p.requires_grad for p in ours.parameters())
    x = images()
    assert torch.equal(ours(x), ours(x))


@pytest.mark.slow
def test_run_saves_the_encoder_it_trained(tmp_path: Path) -> None:
    """timm, compressive and the online probe compute the same features of the same files.

    The probe agrees to 1e-5: its images are padded and in channels_last memory, so other
    convolution kernels run and float32 sums have another order.
    """
    config = tiny("method=c-simclr", "train.steps=3", "views.size=24")
    outcome = pretrain(config, tmp_path, display=silent())
    ours = compressive.load(str(outcome.folder))
    place = str(outcome.folder / ENCODER)
    theirs = timm.create_model("test_resnet", num_classes=0, checkpoint_path=place).eval()
    source = open_source(config.data.source)
    paths = [source.origin(i) for i in range(7)]
    prepared = ours.preprocess(paths)
    assert torch.equal(theirs(prepared), ours(prepared))
    loader = Resident(source, side=64, device="cpu")
    batches = loader.batches([BatchIndices(torch.arange(7), torch.zeros(7, dtype=torch.long))])
    watched, _ = features(theirs.to(memory_format=torch.channels_last), batches, 24, torch.float32)
    torch.testing.assert_close(ours(prepared), watched, rtol=1e-5, atol=1e-5)


# Preprocessing


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    folder = tmp_path_factory.mktemp("encoder")
    saved(folder, Network(name="test_resnet"))
    return load(folder)


def test_invalid_input_to_preprocess_is_one_line(encoder: Encoder) -> None:
    with pytest.raises(ValueError, match="no images"):
        encoder.preprocess([])
    array: Any = np.zeros((20, 20, 3), np.uint8)
    jaxtyping.config.update("jaxtyping_disable", True)  # it rejects types first, in tests only
    try:
        with pytest.raises(TypeError, match=r"PIL .*uint8 .*ndarray"):
            encoder.preprocess(array)
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


@pytest.mark.parametrize("sides", [(40, 30), (24, 24), (9, 50), (90, 200)])
def test_path_pil_image_and_tensor_give_the_same_input(
    sides: tuple[int, int], encoder: Encoder, tmp_path: Path
) -> None:
    """PNG is lossless: inputs are bitwise equal, alone or in a batch, even above a side of 60."""
    picture = noise(*sides)
    picture.save(tmp_path / "a.png")
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
    one = encoder.preprocess(picture)
    assert one.shape == (1, 3, SIZE, SIZE)
    for same in (str(tmp_path / "a.png"), tmp_path / "a.png", pixels, pixels[None]):
        assert torch.equal(encoder.preprocess(same), one)
    many = encoder.preprocess([tmp_path / "a.png", noise(31, 47), picture, pixels])
    assert torch.equal(many[[0, 2, 3]], one.expand(3, -1, -1, -1))
    batch = encoder.preprocess(torch.stack([pixels, pixels.flip(2)]))
    assert torch.equal(batch[:1], one)
    assert not torch.equal(batch[:1], batch[1:])


def test_images_are_center_cropped_and_normalized(encoder: Encoder) -> None:
    """A gray image becomes (gray - mean) / std of ImageNet at any size. Only its center is used."""
    gray = torch.full((3, 40, 30), 51, dtype=torch.uint8)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    expected = ((0.2 - mean) / std)[:, None, None].expand(3, SIZE, SIZE)
    torch.testing.assert_close(encoder.preprocess(gray)[0], expected, rtol=1e-5, atol=1e-5)
    marked = gray.clone()
    marked[:, :4], marked[:, -4:] = 255, 255  # outside the central 30 x 30
    assert torch.equal(encoder.preprocess(marked), encoder.preprocess(gray))
    marked[:, 20] = 255
    assert not torch.equal(encoder.preprocess(marked), encoder.preprocess(gray))


@pytest.mark.parametrize("sides", [(480, 600), (600, 480), (64, 500), (40, 34)])
def test_shorter_side_is_resized_to_the_view_size(sides: tuple[int, int]) -> None:
    """As for CIFAR, the shorter side becomes 32 and the longer one is center-cropped."""
    ours = Encoder(nn.Linear(1, 1), Network(), 32, 32)
    picture = smooth(*sides)
    scale = 32 / min(sides)
    size = round(sides[1] * scale), round(sides[0] * scale)
    small = np.asarray(picture.resize(size, Image.Resampling.BICUBIC))
    top, left = ((n - 32) // 2 for n in small.shape[:2])
    small = small[top : top + 32, left : left + 32].copy()
    expected = torch.from_numpy(small).permute(2, 0, 1) / 255
    seen = colors(ours.preprocess(picture))[0]
    assert (seen - expected).abs().max() < 1.5 / 255  # both round to levels
    assert (seen - seen.mean((1, 2), keepdim=True)).abs().mean() > 0.05, (
        "the image must not be flat"
    )


def smooth(height: int, width: int) -> Image.Image:
    """Return a smooth image with waves in all channels."""
    y, x = np.mgrid[:height, :width] / min(height, width)
    waves = [np.sin(5 * x), np.cos(4 * y), np.sin(3 * (x + y))]
    return Image.fromarray((127 + 120 * np.stack(waves, 2)).astype(np.uint8))


def test_antialias_setting_is_stored_with_the_weights(tmp_path: Path) -> None:
    """It is in the file, which may leave its run folder."""
    network = build(SETTINGS, SIZE)
    picture = noise(60, 45)
    for antialias in (False, True):
        save(tmp_path, network, SETTINGS, SIZE, 60, antialias=antialias)
        (tmp_path / ENCODER).rename(tmp_path / "elsewhere.safetensors")
        ours = load(tmp_path / "elsewhere.safetensors")
        assert ours.antialias == antialias
        pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)[None]
        expected = normalize(center_crop(pixels, SIZE, antialias=antialias))
        assert torch.equal(ours.preprocess(picture), expected)
        model = open_model(str(tmp_path / "elsewhere.safetensors"), torch.device("cpu"))
        assert model.crop().antialias == antialias


@pytest.mark.parametrize("size", [32, 48])
@pytest.mark.parametrize("sides", [(60, 45), (45, 60), (300, 200), (30, 400), (20, 25)])
def test_evaluation_inputs_match_preprocess(size: int, sides: tuple[int, int]) -> None:
    """Cover training canvases that were as small as the views."""
    ours = Encoder(nn.Linear(1, 1), Network(), size, size)
    picture = torch.from_numpy(np.array(smooth(*sides))).permute(2, 0, 1)
    source = ImageSource(name="one", count=1, read=lambda _: picture, place=str)
    assert_matches_preprocess(ours, source, 0, side=size)


def test_evaluation_input_of_an_unsampled_long_image_matches_preprocess() -> None:
    """Canvases are as large as the largest of 256 sampled images. Longer images are cropped."""
    ours = Encoder(nn.Linear(1, 1), Network(), 48, 110)
    usual = torch.zeros(3, 60, 80, dtype=torch.uint8)
    long = torch.from_numpy(np.array(smooth(200, 60))).permute(2, 0, 1)
    source = ImageSource(name="a", count=600, read=lambda i: long if i == 1 else usual, place=str)
    assert_matches_preprocess(ours, source, 1, side=110)


def assert_matches_preprocess(ours: Encoder, source: ImageSource, i: int, side: int) -> None:
    model = FrozenModel(name="a", network=ours.network, size=ours.size, side=side)
    fitted, canvas = model.shrink(source)
    with open_loader(fitted, side=canvas, device="cpu") as loader:
        batch = next(loader.batches(iter([BatchIndices(torch.tensor([i]), torch.tensor([0]))])))
    torch.testing.assert_close(model.crop()(batch), ours.preprocess(source.image(i)))


@pytest.mark.parametrize("sides", [(32, 40), (192, 128)])
def test_channels_last_arrays_are_accepted(encoder: Encoder, sides: tuple[int, int]) -> None:
    """This is NumPy's layout. Cover sizes below and above that of training, single and batched."""
    picture = smooth(*sides)
    last = torch.from_numpy(np.array(picture))
    expected = encoder.preprocess(picture)
    assert torch.equal(encoder.preprocess(last), expected)
    assert torch.equal(encoder.preprocess(last[None]), expected)
    with pytest.raises(ValueError, match="uint8"):
        encoder.preprocess(last / 255)


@pytest.mark.parametrize("mode", ["I;16", "I", "L", "RGBA"])
def test_pil_image_matches_its_file(encoder: Encoder, mode: str, tmp_path: Path) -> None:
    values = np.arange(40 * 30).reshape(40, 30)
    picture = {
        "I;16": lambda: Image.fromarray((values * 50).astype(np.uint16)),
        "I": lambda: Image.fromarray((values * 50).astype(np.int32)),
        "L": lambda: Image.fromarray((values % 256).astype(np.uint8)),
        "RGBA": lambda: smooth(40, 30).convert("RGBA"),
    }[mode]()
    assert picture.mode == mode
    path = tmp_path / ("a.tiff" if mode == "I" else "a.png")
    picture.save(path)
    assert torch.equal(encoder.preprocess(picture), encoder.preprocess(path))
    with pytest.raises(ValueError, match="floating-point"):
        encoder.preprocess(Image.fromarray(values.astype(np.float32)))


def test_unprocessed_input_is_rejected(encoder: Encoder, tmp_path: Path) -> None:
    for images in (torch.zeros(2, 3, 32, 32, dtype=torch.uint8), torch.zeros(3, 32, 32)):
        with pytest.raises(ValueError, match=r"encoder\.preprocess.*torch"):
            encoder(images)
    with pytest.raises(ValueError, match=r"folder.*`compressive embed`"):
        encoder.preprocess(tmp_path)


def test_custom_backbone_is_restored_if_passed_to_load(tmp_path: Path) -> None:
    class Own(nn.Module):
        head_hidden_size = 8

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x.mean((2, 3)))

    network = Own()
    save(tmp_path, network, Network(name="test_resnet"), SIZE, 64)
    with pytest.raises(ValueError, match=r"network=\.\.\.\)$"):
        load(tmp_path)
    ours = load(tmp_path, network=Own())
    x = torch.rand(2, 3, SIZE, SIZE)
    assert torch.equal(ours(x), network(x))
    with pytest.raises(ValueError, match=r"Linear.*features"):
        feature_dim(nn.Linear(1, 1))


def test_large_images_are_downscaled_with_antialiasing(encoder: Encoder) -> None:
    """Fine stripes average to gray; picking single pixels would give other stripes."""
    stripes = torch.zeros(3, 480, 480, dtype=torch.uint8)
    stripes[:, :, ::2] = 255
    seen = encoder.preprocess(stripes)[0]
    std = torch.tensor([0.229, 0.224, 0.225])[:, None, None]
    assert ((seen.amax((1, 2), keepdim=True) - seen) * std).max() < 0.02  # of 1, black to white


def test_exif_orientation_and_16_bit_images_are_handled(encoder: Encoder, tmp_path: Path) -> None:
    """As in training: EXIF orientation is applied, and the upper 8 of 16 bits are kept."""
    picture = noise(40, 30)
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 270 degrees
    picture.save(tmp_path / "turned.png", exif=exif)
    upright = encoder.preprocess(picture.transpose(Image.Transpose.ROTATE_270))
    assert torch.equal(encoder.preprocess(tmp_path / "turned.png"), upright)
    with Image.open(tmp_path / "turned.png") as opened:
        assert torch.equal(encoder.preprocess(opened), upright)
    gray = np.random.default_rng(0).integers(0, 256, (40, 30), dtype=np.uint8)
    Image.fromarray(gray.astype(np.uint16) * 257).save(tmp_path / "16.png")
    Image.fromarray(gray).save(tmp_path / "8.png")
    assert torch.equal(*(encoder.preprocess(tmp_path / f"{bits}.png") for bits in (16, 8)))


def test_unreadable_image_is_rejected_by_name(encoder: Encoder, tmp_path: Path) -> None:
    whole = io.BytesIO()
    noise(20, 20).save(whole, "png")
    (tmp_path / "cut.png").write_bytes(whole.getvalue()[:300])
    with pytest.raises(ValueError, match=r"cut\.png .*: \w+"):
        encoder.preprocess(tmp_path / "cut.png")
    with pytest.raises(FileNotFoundError, match=r"none\.png"):
        encoder.preprocess(str(tmp_path / "none.png"))


# Errors of load


def one_line(error: Exception) -> str:
    assert "\n" not in str(error)
    return str(error)


def test_path_without_an_encoder_is_one_line(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(FileNotFoundError) as caught:
            load(place)
        assert one_line(caught.value).startswith(f"no encoder at {place}")


def test_unavailable_device_is_not_reported_as_a_damaged_file() -> None:
    """A file that is reported as damaged might be deleted."""
    for device in ("foo", "cuda:99"):
        with pytest.raises(ValueError, match=f"device {device} "):
            load("cifar10-byol-r18", device)


@pytest.mark.parametrize("damage", ["cut", "text", "empty"])
def test_damaged_file_is_one_line(damage: str, tmp_path: Path) -> None:
    saved(tmp_path, Network(name="test_resnet"))
    path = tmp_path / ENCODER
    whole = path.read_bytes()
    path.write_bytes({"cut": whole[:-100], "text": b"hello, encoder", "empty": b""}[damage])
    with pytest.raises(ValueError, match="damaged") as caught:
        load(tmp_path)
    assert str(path) in one_line(caught.value)


def test_third_party_weights_are_rejected(tmp_path: Path) -> None:
    save_file({"weight": torch.zeros(3)}, tmp_path / "x.safetensors")
    with pytest.raises(ValueError, match=r"x\.safetensors .*network") as caught:
        load(tmp_path / "x.safetensors")
    one_line(caught.value)


@pytest.mark.parametrize("version", [None, "1", "6"])
def test_other_formats_are_rejected_by_number(version: str | None, tmp_path: Path) -> None:
    saved(tmp_path, SETTINGS)
    with safe_open(tmp_path / ENCODER, "pt") as file:
        metadata = {k: v for k, v in file.metadata().items() if k != "format_version"}
    metadata |= {} if version is None else {"format_version": version}
    save_file(load_file(tmp_path / ENCODER), tmp_path / ENCODER, metadata)
    with pytest.raises(UnsupportedFormat, match=rf"format {version or 1}\b") as caught:
        load(tmp_path)
    assert str(tmp_path / ENCODER) in one_line(caught.value)


def test_load_is_a_public_name() -> None:
    assert compressive.Encoder is Encoder
    with pytest.raises(AttributeError, match="'nothing'"):
        compressive.nothing  # noqa: B018  # pyright: ignore


@pytest.mark.parametrize("shape", [(40, 22), (22, 40)])
def test_batch_of_oblong_images_matches_single_images(shape: tuple[int, int]) -> None:
    """One side is above the canvas side of 24, the other below."""
    found = Encoder(backbone("test_resnet").eval(), Network(name="test_resnet"), 16, 24)
    images = torch.randint(0, 256, (2, 3, *shape), dtype=torch.uint8)
    alone = torch.cat([found.preprocess(one) for one in images])
    torch.testing.assert_close(found.preprocess(images), alone, rtol=0, atol=1e-6)


def test_saved_encoder_is_byte_reproducible(tmp_path: Path) -> None:
    """Results identify encoders by checksum, and safetensors orders its metadata at random."""
    settings = Network(name="test_resnet")
    network = build(settings, 16)
    about = {str(i): "x" for i in range(9)}
    assert len({serialize({"a": torch.ones(2)}, about) for _ in range(9)}) > 1  # else needless
    saved, packed = set(), set()
    for _ in range(9):
        saved.add(save(tmp_path, network, settings, 16, 32).read_bytes())
        packed.add(pack(tmp_path, tmp_path / "packed", about).read_bytes())
    assert len(saved) == len(packed) == 1
    with safe_open(tmp_path / "packed", "pt") as file:
        assert file.metadata()["8"] == "x"
        assert set(file.keys()) == network.state_dict().keys()

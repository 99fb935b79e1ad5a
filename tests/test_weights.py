"""Bundled encoders have half the bytes and the same features, and are found by name."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import safetensors
import timm
import torch
from conftest import golden_arrays
from pyarrow import parquet
from safetensors.torch import load_file
from tiny import silent, sorted_photos, tiny
from torch import Tensor, nn
from typer.testing import CliRunner

import compressive
from compressive import weights
from compressive.cli.app import app
from compressive.config import Network
from compressive.data.sources import open_source
from compressive.encoder import load, pack, save
from compressive.evaluation.frozen_model import open_model
from compressive.networks import build
from compressive.rundir.checksum import CHECKSUM_KEY
from compressive.rundir.files import ENCODER
from compressive.train.knn import nearest_neighbors
from compressive.train.loop import pretrain

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
SETTINGS = Network(name="resnet18", stem="cifar")
SIZE = 32
NAME = "small-c-byol"
REAL = "cifar10-byol-r18"
TINY_IMAGENET = "tiny-imagenet-100-c-simclr-r18"
BUNDLED = (REAL, TINY_IMAGENET)
ROOT = Path(__file__).parent.parent
SHARED = ROOT.parent / "shared" / "data"
LAYERS = 18  # in SETTINGS


def trained() -> nn.Module:
    """Return a network with weights of many magnitudes and nontrivial batch norms."""
    torch.manual_seed(0)
    network = build(SETTINGS, SIZE)
    with torch.no_grad():
        for p in network.parameters():
            p.add_(0.02 * torch.randn_like(p))
        for _ in range(2):
            network(torch.randn(8, 3, SIZE, SIZE))
    return network.eval()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an encoder folder as a run writes it."""
    folder = tmp_path_factory.mktemp("whole")
    save(folder, trained(), SETTINGS, SIZE, 40)
    return folder


@pytest.fixture(scope="module")
def packed(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return pack(whole, tmp_path_factory.mktemp("packed") / f"{NAME}.safetensors")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("runs") / "a"
    pretrain(tiny("train.steps=2"), out, display=silent())
    return out


@pytest.fixture
def here(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provide an empty working folder and a package with one encoder."""
    monkeypatch.setattr(weights, "WEIGHTS", tmp_path / "weights")
    pack(run, tmp_path / "weights" / f"{NAME}.safetensors")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def metadata(path: Path) -> dict[str, str]:
    """Return the metadata of a file without the checksum."""
    with safetensors.safe_open(path, "pt") as file:
        return {key: value for key, value in file.metadata().items() if key != CHECKSUM_KEY}


def images(size: int) -> Tensor:
    return torch.randn(4, 3, size, size, generator=torch.Generator().manual_seed(0))


def one_line(caught: pytest.ExceptionInfo[Exception]) -> str:
    assert "\n" not in str(caught.value)
    return str(caught.value)


# float16 files


@pytest.mark.slow
def test_only_kernels_are_rounded_to_float16(whole: Path, packed: Path) -> None:
    before, after = load_file(whole / ENCODER), load_file(packed)
    assert after.keys() == before.keys()
    for name, value in before.items():
        if value.ndim < 2:  # batch norms, their statistics, counters
            assert after[name].dtype == value.dtype
            assert torch.equal(after[name], value)
            continue
        assert after[name].dtype == torch.float16
        exact, half = value.double().numpy(), after[name].double().numpy()
        # Rounding to 11 bits: 2^-11 of the value, or half a step of 2^-24 below 2^-14.
        assert (np.abs(half - exact) <= np.maximum(2**-11 * np.abs(exact), 2**-25)).all()
        assert np.abs(half - exact).max() > 0
    kinds = {value.dtype for value in after.values()}
    assert kinds == {torch.float16, torch.float32, torch.int64}
    assert packed.stat().st_size < 0.51 * (whole / ENCODER).stat().st_size


@pytest.mark.slow
def test_features_match_the_original_up_to_float16_rounding(whole: Path, packed: Path) -> None:
    """Errors add like a random walk: sqrt(18) 2^-11 of the features.

    Each layer's kernel is off by at most 2^-11, independently of the others, and batch norms keep
    the scale.
    """
    ours, original = load(packed), load(whole)
    assert {p.dtype for p in ours.parameters()} == {torch.float32}
    assert (ours.settings, ours.size, ours.side) == (SETTINGS, SIZE, 40)
    found, expected = ours(images(SIZE)), original(images(SIZE))
    assert found.dtype == torch.float32
    error = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < LAYERS**0.5 * 2**-11
    assert error.min() > 0


@pytest.mark.slow
def test_packed_file_keeps_and_extends_the_metadata(whole: Path, tmp_path: Path) -> None:
    about = {"recipe": "c-byol/cifar10-r18-200", "seed": "1", "figures": '{"top-1": 92.1}'}
    path = pack(whole / ENCODER, tmp_path / "a.safetensors", about)
    assert metadata(path) == metadata(whole / ENCODER) | about
    again = pack(path, tmp_path / "b.safetensors", {"seed": "2"})
    assert metadata(again) == metadata(path) | {"seed": "2"}
    once, twice = load_file(path), load_file(again)
    assert all(torch.equal(once[name], twice[name]) for name in once)
    with pytest.raises(ValueError, match="'size'") as caught:
        pack(whole, tmp_path / "c.safetensors", {"size": "64"})
    one_line(caught)


@pytest.mark.slow
def test_timm_loads_a_packed_encoder(run: Path, tmp_path: Path) -> None:
    path = pack(run, tmp_path / "a.safetensors")
    theirs = timm.create_model("test_resnet", num_classes=0, checkpoint_path=str(path)).eval()
    assert torch.equal(theirs(images(16)), load(path)(images(16)))


@pytest.mark.parametrize(
    ("value", "fits"),
    [
        (65504.0, True),
        (65520.0, False),
        (1e30, False),
        (-1e5, False),
        (float("inf"), False),
        (float("nan"), False),
    ],
)
def test_value_outside_float16_is_rejected(value: float, fits: bool, tmp_path: Path) -> None:
    """65504 is the largest float16; 65520 is halfway to the next value and becomes inf."""
    network = build(Network(name="test_resnet"), SIZE)
    with torch.no_grad():
        network.get_parameter("conv1.0.weight")[0, 0, 0, 0] = value
    save(tmp_path, network, Network(name="test_resnet"), SIZE, SIZE)
    target = tmp_path / "a.safetensors"
    if fits:
        assert (load_file(pack(tmp_path, target))["conv1.0.weight"] == value).any()
        return
    with pytest.raises(ValueError, match=r"^conv1\.0\.weight .*float16") as caught:
        pack(tmp_path, target)
    one_line(caught)
    assert not target.exists()


def test_kernel_below_float16_precision_is_rejected(
    tmp_path: Path,
) -> None:
    """Single small values are accepted.

    Before a batch norm a kernel's scale is free, and weight decay shrinks it.
    """
    network = build(Network(name="test_resnet"), SIZE)
    kernel = network.get_parameter("conv1.0.weight")
    with torch.no_grad():
        kernel[0, 0] = 1e-9
    save(tmp_path, network, Network(name="test_resnet"), SIZE, SIZE)
    pack(tmp_path, tmp_path / "a.safetensors")
    with torch.no_grad():
        kernel.copy_(1e-6 * torch.randn_like(kernel))
    save(tmp_path, network, Network(name="test_resnet"), SIZE, SIZE)
    with pytest.raises(ValueError, match=r"\d\.\d+e-06"):
        pack(tmp_path, tmp_path / "a.safetensors")


# Lookup by name


def test_bundled_encoders_are_small() -> None:
    assert weights.names() == BUNDLED
    assert sum(path.stat().st_size for path in weights.WEIGHTS.iterdir() if path.is_file()) < 24e6


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_encoder_is_the_measured_one(name: str) -> None:
    """It is bitwise the file of docs/results, and states its origin and accuracy."""
    path = weights.find(name)
    assert path is not None
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    page = ROOT / "docs" / "results" / "2026-11-18-encoders.md"
    assert f"`{digest}`" in page.read_text()
    ours = load(name)
    assert (ours.feature_dim, ours.size) == (512, 32)
    about = metadata(path)
    assert {
        "trained_by",
        "data",
        "date",
        "device",
        "license",
        "figures",
        "rounding",
    } <= about.keys()
    assert name != REAL or "linear 93.2" in about["figures"]


# The weights of the CIFAR-10 encoder before rounding were not kept, only their accuracies.
@pytest.mark.parametrize(
    ("place", "which"),
    [
        ("builtin", "builtin"),
        pytest.param(str(SHARED / "tiny-imagenet-100"), "own", marks=pytest.mark.shared),
    ],
    ids=["builtin", "own"],
)
def test_features_equal_those_before_rounding_to_8_bits(place: str, which: str) -> None:
    """Compare features of the first 16 test images with those of the weights before rounding."""
    before = golden_arrays("bundled_features")[f"{TINY_IMAGENET} {which}"].float()
    ours, source = load(TINY_IMAGENET), open_source(place, "test")
    found = ours(ours.preprocess([source.image(i) for i in range(16)]))
    cosine = torch.cosine_similarity(found, before)
    assert cosine.min() >= 0.9998
    assert cosine.max() < 1 - 1e-6
    assert ((found - before).norm(dim=1) / before.norm(dim=1)).max() < 0.02


@pytest.mark.shared
def test_bundled_encoder_has_the_expected_knn_accuracy() -> None:
    """Classify 100 test images by kNN among 300 training images.

    The encoder was trained on these without labels. With all 50,000, accuracy is 92.7 %
    (docs/results); with fewer labels it is 89.0 % for this draw. Chance is 10 %, and 2 % of 100
    images is more than float arithmetic changes on any machine.
    """
    draw = torch.Generator().manual_seed(0)
    ours, parts = load(REAL), []
    for split, count in (("train", 300), ("test", 100)):
        source = open_source(str(SHARED / "cifar10"), split)
        assert source.labels is not None
        index = torch.randperm(len(source), generator=draw)[:count]
        feats = [
            ours(ours.preprocess(torch.stack([source.image(int(i)) for i in some])))
            for some in index.split(100)
        ]
        parts.append((torch.cat(feats), source.labels[index]))
    (bank, labels), (queries, right) = parts
    votes = nearest_neighbors(bank, labels, queries, classes=10)
    assert (votes.argmax(1) == right).double().mean() == pytest.approx(0.89, abs=0.02)


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_bundled_encoder_is_found_by_name(run: Path) -> None:
    assert weights.names() == (NAME,)
    path = weights.WEIGHTS / f"{NAME}.safetensors"
    assert weights.find(NAME) == path
    x = images(16)
    assert torch.equal(compressive.load(NAME)(x), load(path)(x))
    assert load(NAME).feature_dim == load(run).feature_dim
    model = open_model(NAME, CPU)
    assert (model.name, model.size, model.config) == (NAME, 16, None)
    assert {p.dtype for p in model.network.parameters()} == {torch.float32}
    # Channels last sums in another order.
    torch.testing.assert_close(model.network(x), load(NAME)(x), rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_local_folder_or_file_takes_precedence(here: Path, whole: Path) -> None:
    save(here / NAME, trained(), SETTINGS, SIZE, 40)
    assert load(NAME).settings == SETTINGS
    (here / NAME / ENCODER).unlink()
    for opened in (lambda: load(NAME), lambda: open_model(NAME, CPU)):
        with pytest.raises(FileNotFoundError, match=f"{NAME}/{ENCODER}"):
            opened()
    (here / NAME).rmdir()
    (here / NAME).write_bytes((whole / ENCODER).read_bytes())
    assert load(NAME).settings == SETTINGS
    (here / NAME).unlink()
    assert load(NAME).settings.name == "test_resnet"


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("place", ["small-c-bylo", f"./{NAME}", f"../weights/{NAME}", ""])
def test_unknown_names_are_rejected(place: str) -> None:
    assert weights.find(place) is None
    with pytest.raises(FileNotFoundError, match=f"no encoder .*: {NAME}$") as caught:
        load(place)
    one_line(caught)


@pytest.mark.usefixtures("here")
def test_path_object_is_not_a_name() -> None:
    with pytest.raises(FileNotFoundError, match=f"no encoder .*{NAME}"):
        load(Path(NAME))


@pytest.mark.usefixtures("here")
def test_unknown_model_error_lists_bundled_encoders() -> None:
    with pytest.raises(
        ValueError,
        match=f"'small-c-bylo'.*timm.*: {NAME}$",
    ) as caught:
        open_model("small-c-bylo", CPU)
    one_line(caught)


def test_errors_do_not_mention_bundled_encoders_if_none_exist(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "WEIGHTS", tmp_path / "none")
    assert weights.names() == ()
    assert weights.find(NAME) is None
    with pytest.raises(FileNotFoundError, match=f"{ENCODER}$"):
        load(NAME)
    with pytest.raises(ValueError, match=r"timm\.list_models|did you mean") as caught:
        open_model(NAME, CPU)
    assert "package contains" not in str(caught.value)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("options", [{"network": "resnet18"}, {"size": 64}])
def test_network_and_size_options_are_rejected(options: dict[str, str | int]) -> None:
    with pytest.raises(ValueError, match=f"--network and --size .* {NAME}") as caught:
        open_model(NAME, CPU, **options)  # pyright: ignore[reportArgumentType]
    one_line(caught)


# On the command line


def test_evaluate_accepts_a_bundled_name(here: Path) -> None:
    words = ["evaluate", NAME, "--data", str(sorted_photos()), "--tasks", "knn", "--device", "cpu"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert f"results: runs/evaluation/{NAME}/results.json" in result.output
    assert (here / "runs" / "evaluation" / NAME / "results.json").is_file()
    result = CliRunner().invoke(app, ["evaluate", NAME, "--device", "cpu"])
    assert result.exit_code == 2
    assert result.output.startswith("error: --data")
    assert NAME in result.output


def test_embed_accepts_a_bundled_name(here: Path) -> None:
    words = ["embed", NAME, str(sorted_photos()), "--device", "cpu"]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    table = parquet.read_table(here / "features.parquet")
    ours = load(NAME)
    expected = ours(ours.preprocess(table["image"].to_pylist()))
    # Batches of another size sum in another order.
    np.testing.assert_allclose(
        np.array(table["features"].to_pylist(), dtype=np.float32), expected, rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("command", ["evaluate", "embed"])
def test_help_mentions_bundled_encoders(command: str) -> None:
    text = " ".join(CliRunner().invoke(app, [command, "--help"]).output.replace("│", " ").split())
    assert "name of an encoder" in text

"""Features are extracted once, in dataset order, and the network does not change."""

from pathlib import Path

import pytest
import torch
from processes import together
from tiny import sorted_photos
from torch import nn

from compressive.augment.ops import MEAN, STD, center_crop, normalize
from compressive.data.loaders import Resident
from compressive.data.source import ImageSource, Source
from compressive.data.sources import open_source
from compressive.evaluation.features import Crop, Features, cached, extract, network_fingerprint
from compressive.networks import backbone

CROP = Crop(16, 1.0, False, MEAN, STD)


def network() -> nn.Module:
    torch.manual_seed(0)
    return backbone("test_resnet").eval()


def extracted(source: Source, net: nn.Module) -> Features:
    with Resident(source, side=16, device="cpu") as loader:
        return extract(net, loader, len(source), CROP, precision=torch.float32, batch_size=7)


def photos(broken: int = -1) -> Source:
    source = open_source(sorted_photos())

    def read(i: int) -> bytes:
        return b"no image" if i == broken else Path(source.origin(i)).read_bytes()

    return ImageSource(
        name="photos",
        count=len(source),
        read=read,
        place=source.origin,
        labels=source.labels,
        classes=source.classes,
    )


def test_features_match_the_network_image_by_image() -> None:
    source, net = photos(), network()
    found = extracted(source, net)
    with torch.no_grad():
        alone = [net(normalize(center_crop(source.image(i)[None], 16))) for i in range(40)]
    # Batch sizes 1 and 7 sum in another order.
    torch.testing.assert_close(found.feats, torch.cat(alone), rtol=1e-4, atol=1e-5)
    assert source.labels is not None
    assert torch.equal(found.labels, source.labels)
    assert torch.equal(found.index, torch.arange(40))


def test_unreadable_image_is_dropped() -> None:
    net = network()
    whole, found = extracted(photos(), net), extracted(photos(broken=12), net)
    others = torch.arange(40) != 12
    assert torch.equal(found.index, whole.index[others])
    torch.testing.assert_close(found.feats, whole.feats[others], rtol=1e-4, atol=1e-5)


def test_network_that_changes_during_evaluation_is_refused() -> None:
    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += 1
            return x.flatten(1)

    with pytest.raises(RuntimeError, match="changed"):
        extracted(photos(), Stateful().eval())


def test_cache_is_used_only_for_the_same_key(tmp_path: Path) -> None:
    calls: list[int] = []

    def make() -> Features:
        calls.append(1)
        return Features(torch.full((2, 3), 1.0 * len(calls)), torch.arange(2), torch.arange(2))

    first = cached(tmp_path, {"weights": "a", "crop": (16, 0.875)}, make)
    again = cached(tmp_path, {"crop": (16, 0.875), "weights": "a"}, make)
    other = cached(tmp_path, {"weights": "b", "crop": (16, 0.875)}, make)
    assert torch.equal(first.feats, again.feats)
    assert not torch.equal(first.feats, other.feats)
    assert len(calls) == 2


@pytest.mark.parametrize("what", ["weight", "statistic"])
def test_network_fingerprint_depends_on_every_bit(what: str) -> None:
    net = network()
    before = network_fingerprint(net)
    assert network_fingerprint(network()) == before
    name, value = next(
        (n, v)
        for n, v in net.state_dict().items()
        if n.endswith("running_var" if what == "statistic" else "weight")
    )
    value.view(-1)[0] = torch.nextafter(value.view(-1)[0], torch.tensor(1e9))
    assert network_fingerprint(net) != before, name


def worker(rank: int, folder: str) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=rank, world_size=3)
    found = extracted(photos(), network())
    torch.save(tuple(found), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.distributed
def test_every_process_gets_all_features(tmp_path: Path) -> None:
    """40 images are not divisible by 3 processes."""
    together(worker, (str(tmp_path),), 3)
    alone = extracted(photos(), network())
    for rank in range(3):
        found = Features(*torch.load(tmp_path / f"{rank}.pt", weights_only=True))
        torch.testing.assert_close(found.feats, alone.feats, rtol=1e-4, atol=1e-5)
        assert torch.equal(found.index, alone.index)
        assert torch.equal(found.labels, alone.labels)


def test_crop_protocol_records_share_and_kernel() -> None:
    for share, antialias, kernel in ((0.875, False, "not antialiased"), (1.0, True, "antialiased")):
        assert Crop(224, share, antialias, MEAN, STD).protocol() == {
            "size": 224,
            "crop": f"central square, {share:g}",
            "resize": f"bicubic, a = -0.5, {kernel}",
        }


def test_damaged_cache_file_is_rebuilt(tmp_path: Path) -> None:
    def make() -> Features:
        return Features(torch.ones(2, 3), torch.arange(2), torch.arange(2))

    cached(tmp_path, {"a": 1}, make)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:60])
    with pytest.warns(UserWarning, match="computed again"):
        assert torch.equal(cached(tmp_path, {"a": 1}, make).feats, torch.ones(2, 3))
    assert path.read_bytes() == whole

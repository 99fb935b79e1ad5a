"""Features are extracted once, in the order of the set, and nothing in the network moves."""

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


def test_features_are_those_of_the_network_image_by_image() -> None:
    source, net = photos(), network()
    found = extracted(source, net)
    with torch.no_grad():
        alone = [net(normalize(center_crop(source.image(i)[None], 16))) for i in range(40)]
    # Batches of 1 and of 7 are summed in another order.
    torch.testing.assert_close(found.feats, torch.cat(alone), rtol=1e-4, atol=1e-5)
    assert source.labels is not None
    assert torch.equal(found.labels, source.labels)
    assert torch.equal(found.index, torch.arange(40))


def test_an_image_that_cannot_be_read_is_left_out() -> None:
    net = network()
    whole, found = extracted(photos(), net), extracted(photos(broken=12), net)
    others = torch.arange(40) != 12
    assert torch.equal(found.index, whole.index[others])
    torch.testing.assert_close(found.feats, whole.feats[others], rtol=1e-4, atol=1e-5)


def test_a_network_that_changes_is_refused() -> None:
    class Restless(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += 1
            return x.flatten(1)

    with pytest.raises(RuntimeError, match="changed while it was evaluated"):
        extracted(photos(), Restless().eval())


def test_the_cache_answers_for_the_same_and_only_the_same(tmp_path: Path) -> None:
    made: list[int] = []

    def make() -> Features:
        made.append(1)
        return Features(torch.full((2, 3), 1.0 * len(made)), torch.arange(2), torch.arange(2))

    first = cached(tmp_path, {"weights": "a", "crop": (16, 0.875)}, make)
    again = cached(tmp_path, {"crop": (16, 0.875), "weights": "a"}, make)
    other = cached(tmp_path, {"weights": "b", "crop": (16, 0.875)}, make)
    assert torch.equal(first.feats, again.feats)
    assert not torch.equal(first.feats, other.feats)
    assert len(made) == 2


@pytest.mark.parametrize("what", ["weight", "statistic"])
def test_the_name_of_a_network_changes_with_its_last_bit(what: str) -> None:
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
def test_processes_share_the_work_and_all_have_the_result(tmp_path: Path) -> None:
    """40 images do not divide by 3."""
    together(worker, (str(tmp_path),), 3)
    alone = extracted(photos(), network())
    for rank in range(3):
        found = Features(*torch.load(tmp_path / f"{rank}.pt", weights_only=True))
        torch.testing.assert_close(found.feats, alone.feats, rtol=1e-4, atol=1e-5)
        assert torch.equal(found.index, alone.index)
        assert torch.equal(found.labels, alone.labels)


def test_a_crop_is_recorded_with_its_share_and_kernel() -> None:
    for share, antialias, words in ((0.875, False, "not antialiased"), (1.0, True, "antialiased")):
        assert Crop(224, share, antialias, MEAN, STD).protocol() == {
            "size": 224,
            "crop": f"central square, {share:g}",
            "resize": f"bicubic, a = -0.5, {words}",
        }


def test_a_damaged_cache_is_made_again(tmp_path: Path) -> None:
    def make() -> Features:
        return Features(torch.ones(2, 3), torch.arange(2), torch.arange(2))

    cached(tmp_path, {"a": 1}, make)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    path.write_bytes(whole[:60])
    with pytest.warns(UserWarning, match="computed again"):
        assert torch.equal(cached(tmp_path, {"a": 1}, make).feats, torch.ones(2, 3))
    assert path.read_bytes() == whole

"""File layouts and origins of robustness sets, and how to find one on disk."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NamedTuple

from compressive.corruptions.parameters import EXTRAS, NAMES
from compressive.data.decode import first_line

SEVERITIES = (1, 2, 3, 4, 5)
# Archives of ImageNet-C; some people unpack each into a folder of its name.
ARCHIVES = ("", "blur/", "digital/", "noise/", "weather/", "extra/")

# Preprocessing: as the test images of the encoder, or the whole shorter side.
CropKind = Literal["resize", "center"]


class Layout(NamedTuple):
    """Folder names and contents of a set, and the project that publishes it."""

    folders: tuple[str, ...]  # possible names of its folder, below the root or as the root
    inside: tuple[str, ...]  # any of these identifies the folder
    layout: str
    origin: str
    images: tuple[int, ...] = ()  # number of images of a complete set, per cell
    crop: CropKind = "resize"


def _by_wnid(name: str, project: str, images: int) -> Layout:
    files, origin = f"{name}/<wnid>/*.jpg", f"{name}.tar of hendrycks/{project}"
    return Layout((name,), ("n????????",), files, origin, (images,))


def _v2(variant: str, *more: str) -> Layout:
    short = f"imagenetv2-{variant}"
    folder, origin = f"{short}-format-val", f"{short}.tar.gz of modestyachts/ImageNetV2"
    files = f"{folder}/<0 ... 999>/*.jpeg"
    return Layout((folder, short, *more), ("0",), files, origin, (10_000,))


def _corrupted(folder: str, images: int, archives: str) -> Layout:
    inside = tuple(f"{above}{name}" for name in NAMES + EXTRAS for above in ARCHIVES)
    files = f"{folder}/<corruption>/<1 ... 5>/<wnid>/*.JPEG"
    origin = f"{archives} of hendrycks/robustness"
    return Layout((folder,), inside, files, origin, (images,), "center")


def _corrupted_cifar(folder: str) -> Layout:
    files = f"{folder}/<corruption>.npy and {folder}/labels.npy"
    origin = f"{folder}.tar of hendrycks/robustness"
    return Layout((folder,), ("labels.npy",), files, origin, (10_000,), "center")


_VIDEOS = "imagenet_vid_ytbb_robust"

SHIFTS: dict[str, Layout] = {
    "imagenet-a": _by_wnid("imagenet-a", "natural-adv-examples", 7_500),
    "imagenet-r": _by_wnid("imagenet-r", "imagenet-r", 30_000),
    "imagenet-v2": _v2("matched-frequency", "imagenet-v2", "imagenetv2"),
    "imagenet-v2-threshold0.7": _v2("threshold0.7"),
    "imagenet-v2-top-images": _v2("top-images"),
    "objectnet": Layout(
        ("objectnet-1.0", "objectnet"),
        ("mappings",),
        "objectnet-1.0/images/<folder>/*.png and objectnet-1.0/mappings/",
        "objectnet-1.0.zip of the ObjectNet project, its password on the download page",
        (18_574, 18_514),  # the release; the beta
    ),
    "imagenet-vid-robust": Layout(
        (f"{_VIDEOS}/imagenet-vid-robust", "imagenet-vid-robust"),
        ("metadata/pmsets.json",),
        "imagenet-vid-robust/val/<video>/*.JPEG with metadata/ and misc/ beside val/",
        f"{_VIDEOS}.tar.gz of modestyachts' natural perturbations",
        (22_179,),
    ),
    "ytbb-robust": Layout(
        (f"{_VIDEOS}/ytbb-robust", "ytbb-robust"),
        ("ytbb_videos",),
        "ytbb-robust/ytbb_videos/<video>_<ms>/frame-<n>.jpg with ytbb-robust_metadata/ beside "
        "ytbb_videos/ (anchor_labels.json, pmk_labels.json, ytbb_robustness_test_anchors_full.csv)",
        f"{_VIDEOS}.tar.gz of modestyachts' natural perturbations; metadata in imagenet-testbed",
    ),
    "imagenet-c": _corrupted("imagenet-c", 50_000, "blur, digital, noise, weather, extra .tar"),
    "tiny-imagenet-c": _corrupted("Tiny-ImageNet-C", 10_000, "Tiny-ImageNet-C.tar"),
    "cifar10-c": _corrupted_cifar("CIFAR-10-C"),
    "cifar100-c": _corrupted_cifar("CIFAR-100-C"),
}


@contextmanager
def whole(what: str) -> Iterator[None]:
    """Convert any error of a third-party reader to a ValueError of one line."""
    try:
        yield
    except (ValueError, OSError, ImportError, MemoryError):
        raise
    except Exception as error:
        reason = f"{type(error).__name__} {first_line(error)}"
        raise ValueError(f"{what} is damaged or has another format: {reason}") from error


def find_folder(name: str, root: str | Path) -> Path:
    """Return the folder of a set: below the root, ignoring case, or the root itself."""
    root, known = Path(root).expanduser(), SHIFTS[name]
    own = {folder.lower() for folder in known.folders}
    others = {f.lower() for layout in SHIFTS.values() for f in layout.folders} - own
    below = sorted(root.iterdir()) if root.is_dir() else []
    named = [path for path in below if path.name.lower() in own]
    itself = [] if root.resolve().name.lower() in others else [root]
    for base in (*(root / folder for folder in known.folders), *named, *itself):
        if any(any(base.glob(pattern)) for pattern in known.inside):
            return base
    raise FileNotFoundError(f"no {name} in {root}: {expected(name)}")


def expected(name: str) -> str:
    """Describe the layout of a missing set and the origin of its files."""
    return f"expected {SHIFTS[name].layout}; the files are {SHIFTS[name].origin}"

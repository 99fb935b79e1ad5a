"""Resolve a source of weights: what the user names, as a loaded backbone with its preprocessing."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import torch
from torch import Tensor, nn

from compressive import networks, weights
from compressive.augment.ops import MEAN, STD
from compressive.augment.published_crop import PublishedCrop
from compressive.config import Network
from compressive.encoder import load
from compressive.platforms.shapes_only import allocate, shapes_only
from compressive.pretrained import timm_weights
from compressive.pretrained.inference import SUPPORTED, Guess, guesses
from compressive.pretrained.state_dict import (
    FoundBackbone,
    TensorsByName,
    check_finite,
    find_backbone,
    mismatch,
    read_tensors,
    unknown_inside,
    unknown_outside,
)
from compressive.pretrained.timm_weights import Preprocessing
from compressive.pretrained.torchvision_names import torchvision_preprocessing, torchvision_to_timm
from compressive.rundir.files import ENCODER, local_path


class ResolvedWeights(NamedTuple):
    """A loaded backbone without heads, the network it is, and its preprocessing."""

    network: Network
    backbone: nn.Module
    found: str  # what was found, in words
    size: int
    side: int = 0  # training shrank longer images to it; 0: unknown
    antialias: bool = True
    mean: tuple[float, ...] = MEAN
    std: tuple[float, ...] = STD
    crop: PublishedCrop | None = None  # the evaluation crop of third-party weights


def resolve(place: str | Path, network: str = "", size: int = 0) -> ResolvedWeights:
    """Load weights from a run, a file, a folder of timm, a name or an `hf-hub:` id.

    `network` is the timm model name of third-party weights, if it cannot be inferred. Its tag, if
    it has one, chooses the preprocessing. `size` is the input side; 0: as trained. Every weight of
    the network must be in the source. Classifiers and other heads are left out.
    """
    found = _resolve(str(place), network, size)
    check_finite(found.backbone.state_dict().items(), place)
    if network and (name := network.partition(".")[0]) != found.network.name:
        raise ValueError(f"{place} has the weights of {found.network.name}, not of {name}")
    return found


def _resolve(place: str, network: str, size: int) -> ResolvedWeights:
    if place.startswith(weights.HUB):
        return _from_timm(place, size)
    path = local_path(place)
    if path.is_dir():
        return _from_folder(path, size)
    if path.is_file():
        return _from_file(path, network, size)
    if weights.find(place) is not None:
        return _own(place, size)
    weights.require_path(place)
    try:
        return _from_timm(place, size)
    except ValueError as error:
        hint = weights.hint()
        raise ValueError(f"no folder or file {place!r} here, and {error}{hint}") from None


def is_third_party(place: str | Path) -> bool:
    """Return whether these weights were not written by this package."""
    if str(place).startswith(weights.HUB):
        return True
    path = local_path(place)
    if path.is_dir():
        return not (path / ENCODER).exists() and timm_weights.is_published(path)
    if path.is_file():
        return path.suffix != ".safetensors" or not _is_own_file(path)
    return weights.find(str(place)) is None


def _from_folder(path: Path, size: int) -> ResolvedWeights:
    if not is_third_party(path):
        return _own(str(path), size)
    folder = timm_weights.read_folder(path)
    state, _ = read_tensors(folder.weights)
    guess = _named(state, folder.name, path)
    return _load(state, [guess], path, size, folder.preprocessing)


def _from_file(path: Path, network: str, size: int) -> ResolvedWeights:
    if path.suffix == ".safetensors" and _is_own_file(path):
        return _own(str(path), size)
    state, inside = read_tensors(path)
    renamed = torchvision_to_timm(state)
    state, known = renamed or state, None
    if network:
        networks.require_known(network.partition(".")[0])
        options: list[Guess] = [_named(state, network.partition(".")[0], path)]
        known = timm_weights.preprocessing_of(network)
    else:
        options = list(guesses(state, path))
        if renamed and options:
            known = torchvision_preprocessing(options[0].network.name)
    return _load(state, options, path, size, known, inside)


def _from_timm(name: str, size: int) -> ResolvedWeights:
    plain, module, known = timm_weights.from_timm(name, size)
    settings = Network(name=plain)
    size = size or known.size
    with shapes_only():
        planned = networks.build(settings, size)
    if not networks.fits(planned, module.state_dict()):
        state = {key: value.detach() for key, value in module.state_dict().items()}
        module = _fitted(settings, size, FoundBackbone(state, ""), name)
    return _with_preprocessing(settings, module, f"{plain} from {name}", size, known)


def _own(place: str, size: int) -> ResolvedWeights:
    own = load(place)
    module = own.network
    if size and size != own.size:
        state = {key: value.detach() for key, value in module.state_dict().items()}
        module = _fitted(own.settings, size, FoundBackbone(state, ""), place)
    words = f"{own.settings.name} from {place}"
    views = {"side": own.side, "antialias": own.antialias, "mean": own.mean, "std": own.std}
    return ResolvedWeights(own.settings, module, words, size or own.size, **views)


def _load(
    state: TensorsByName,
    options: list[Guess],
    place: Path,
    size: int,
    known: Preprocessing | None,
    inside: str = "",
) -> ResolvedWeights:
    """Load the first network that the weights fit; raise ValueError if there is none."""
    if not options:
        raise ValueError(
            f"{place} matches none of {SUPPORTED}; name its timm network with --network NAME "
            "(pretrain: --backbone NAME)"
        )
    problem: ValueError | None = None
    for guess in options:
        kind = known or _usual(guess)
        side = size or guess.size or kind.size
        try:
            module = _fitted(guess.network, side, guess.found, place)
        except ValueError as error:
            problem = problem or error
            continue
        if odd := unknown_outside(state, guess.found.prefix):
            raise ValueError(
                f"{place} has weights that belong neither to {guess.network.name} nor to a known "
                f"head: {len(odd)}, first {odd[0]}; save only the network's state_dict"
            )
        where = ".".join(filter(None, [inside, guess.found.prefix.rstrip(".")]))
        words = f"{guess.network.name} in {where or 'the state_dict'} of {place}"
        return _with_preprocessing(guess.network, module, words, side, kind)
    assert problem is not None
    raise problem


def _usual(guess: Guess) -> Preprocessing:
    known = timm_weights.preprocessing_of(guess.tagged)
    if guess.network.stem == "cifar":
        return known._replace(size=32, crop=PublishedCrop(1.0))
    return known


def _with_preprocessing(
    settings: Network, module: nn.Module, words: str, size: int, known: Preprocessing
) -> ResolvedWeights:
    views = {"mean": known.mean, "std": known.std, "crop": known.crop}
    return ResolvedWeights(settings, module, words, size, **views)


def _named(state: TensorsByName, name: str, place: Path) -> Guess:
    """Return the guess for a network that the user or a config.json names."""
    for guess in guesses(state, place):
        if guess.network.name == name:
            return guess
    with shapes_only():
        wanted = list(networks.backbone(name).state_dict())
    found = find_backbone(state, wanted[0], wanted[1:3]) or FoundBackbone(dict(state), "")
    return Guess(Network(name=name), found)


def _fitted(settings: Network, size: int, found: FoundBackbone, place: object) -> nn.Module:
    """Build the network with these weights; raise ValueError if they do not fit."""
    with shapes_only():
        planned = networks.build(settings, size)
    wanted = planned.state_dict()
    state = _in_timm_names(found.state, planned)
    cause = mismatch(wanted, state)
    if not cause and (odd := unknown_inside(state, wanted)):
        cause = f"weights that it does not have: {len(odd)}, first {odd[0]}"
    if cause:
        raise ValueError(f"{place} does not have the weights of {settings.name}: {cause}")
    counters = {n: torch.zeros(()) for n in wanted if n not in state}  # num_batches_tracked
    not_stored = dict(planned.named_buffers()).keys() - wanted.keys()
    module = networks.build(settings, size) if not_stored else allocate(planned)
    module.load_state_dict({n: state.get(n, counters.get(n)) for n in wanted})
    return module


def _in_timm_names(state: dict[str, Tensor], planned: nn.Module) -> dict[str, Tensor]:
    """Convert names and position embeddings with timm's own filter, if its network has one."""
    module = sys.modules[type(planned).__module__]
    convert: Callable[..., Any] | None = getattr(module, "checkpoint_filter_fn", None)
    if convert is None:
        return state
    try:
        return dict(convert(dict(state), planned))
    except (KeyError, RuntimeError, ValueError, AssertionError, AttributeError, TypeError):
        return state  # of another network: `mismatch` says what is missing


def _is_own_file(path: Path) -> bool:
    """Return whether a safetensors file has the metadata of an encoder or a classifier."""
    path.open("rb").close()  # safetensors reports every error as "No such file"
    try:
        with safetensors.safe_open(path, "pt") as file:
            return "network" in (file.metadata() or {})
    except safetensors.SafetensorError as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}") from None

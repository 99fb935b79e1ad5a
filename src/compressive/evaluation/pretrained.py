"""Load third-party networks: timm models by name, and weights in timm's or torchvision's format."""

import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies

import timm
import timm.data
import torch
from huggingface_hub import constants
from torch import Tensor, nn

from compressive.networks import RESNETS, require_known
from compressive.rundir.tensors_file import read_safetensors

_PATIENCE = 2.0  # seconds
_INSIDE = ("state_dict", "model")  # keys of the weights in files of training scripts
_BEFORE = ("module.", "backbone.", "encoder.", "network.")  # prefixes of their names


class Published(NamedTuple):
    """A network without its classifier, and its preprocessing."""

    name: str
    network: nn.Module
    size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]


def pretrained(name: str, size: int = 0) -> Published:
    """Load a timm network; timm downloads its weights if necessary."""
    require_known(name.partition(".")[0])
    options, is_online = _sized(name, size), _is_online()
    try:
        with _offline(not is_online):
            network: Any = timm.create_model(name, pretrained=True, num_classes=0, **options)
    except Exception as error:  # timm passes on errors of the network, the disk and servers
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        reason = reason if is_online else "no network access"
        raise ValueError(
            f"timm has no local weights of {name} and could not download them ({reason}); give a "
            f"file of weights and --network {name}"
        ) from None
    return _published(name, network)


def _is_online() -> bool:
    """Return whether the server of timm's weights answers within two seconds, or is unknown."""
    if getproxies():  # the server is not reached directly
        return True
    address = urlsplit(constants.ENDPOINT)
    port = address.port or (80 if address.scheme == "http" else 443)
    answers: list[bool] = []

    def connect() -> None:
        with suppress(OSError):
            socket.create_connection((address.hostname or "", port), timeout=_PATIENCE).close()
            answers.append(True)

    # In a thread: looking up a name may take longer than the timeout.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    return bool(answers)


@contextmanager
def _offline(wanted: bool) -> Iterator[None]:
    """Use only downloaded weights: without network access the hub retries for a minute."""
    before = constants.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = before or wanted
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before


def with_weights(state: Mapping[str, Tensor], name: str = "", size: int = 0) -> Published:
    """Build the network of these weights; without a name, find it among the ResNets.

    torchvision's ResNets have the weight names of timm's. A classifier in the file is ignored.
    """
    cause = "the file is empty"
    for one in (name,) if name else RESNETS:
        require_known(one)
        options = _sized(one, size)
        with torch.device("meta"):
            wanted = timm.create_model(one, num_classes=0, **options).state_dict()
        cause = _misfit(wanted, state)
        if not cause:
            network = timm.create_model(one, num_classes=0, **options)
            # Old files lack num_batches_tracked, which evaluation does not read.
            network.load_state_dict({k: state[k] for k in wanted if k in state}, strict=False)
            return _published(one, network)
    if name:
        raise ValueError(f"the weights are not those of timm's {name}: {cause}")
    raise ValueError(
        f"the weights match none of {', '.join(RESNETS)}; name their network with --network NAME"
    )


def _misfit(wanted: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> str:
    """Describe a weight that does not fit, or return "".

    Deeper ResNets have all weights of shallow ones.
    """
    classifiers = ("fc.", "head.", "classifier.", "last_linear.")
    for key, value in wanted.items():
        if key not in state and not key.endswith("num_batches_tracked"):
            return f"{key} is missing"
        if key in state and state[key].shape != value.shape:
            return f"{key} has another shape"
    others = [key for key in state if key not in wanted and not key.startswith(classifiers)]
    return f"{others[0]} does not exist in that network" if others else ""


def _sized(name: str, size: int) -> dict[str, Any]:
    """Return the options of a network with a fixed input size."""
    with torch.device("meta"):
        known: Any = timm.create_model(name, num_classes=0)
    fixed = known.pretrained_cfg.get("fixed_input_size")
    return {"img_size": size} if fixed and size else {}


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read tensors by name; no code in the file is executed."""
    path.open("rb").close()  # raise permission errors with their own message
    if path.suffix == ".safetensors":
        found: Any = read_safetensors(path)[1]
    else:
        try:
            found = torch.load(path, map_location="cpu", weights_only=True)
        except Exception as error:  # torch.load raises errors of pickle and of the content
            raise ValueError(
                f"{path} contains more than weights, or is damaged ({type(error).__name__}); save "
                "only the network's state_dict"
            ) from None
    for key in _INSIDE:
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    if not isinstance(found, dict) or not all(isinstance(v, Tensor) for v in found.values()):
        raise ValueError(f"{path} contains no state_dict; save only the network's state_dict")
    for start in _BEFORE:
        if found and all(name.startswith(start) for name in found):
            found = {name.removeprefix(start): value for name, value in found.items()}
    return found


def _published(name: str, network: nn.Module) -> Published:
    known: Any = timm.data.resolve_model_data_config(network)
    return Published(name, network, known["input_size"][-1], known["mean"], known["std"])

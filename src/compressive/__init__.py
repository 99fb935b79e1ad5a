"""Measure and control how much information a visual representation keeps."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from compressive import metrics, objectives, optim
    from compressive.distributions.uniform import HypersphericalUniform
    from compressive.distributions.vmf import VonMisesFisher
    from compressive.encoder import Encoder
    from compressive.evaluation.embed import embed
    from compressive.evaluation.frozen_model import load_encoder as load
    from compressive.evaluation.runs import compare_runs as compare
    from compressive.evaluation.runs import report_runs as report
    from compressive.evaluation.suite import evaluate
    from compressive.exporting.export import export
    from compressive.finetuning.predict import predict
    from compressive.finetuning.run import finetune
    from compressive.inspection.neighbors import neighbors
    from compressive.inspection.run import inspect
    from compressive.tensorflow_checkpoint.convert import convert
    from compressive.train.callbacks import Callback
    from compressive.train.start import pretrain

__all__ = ["Callback", "Encoder", "HypersphericalUniform", "VonMisesFisher", "compare", "convert"]
__all__ += ["embed", "evaluate", "export", "finetune", "inspect", "load", "metrics", "neighbors"]
__all__ += ["objectives", "optim", "predict", "pretrain", "report"]
_PLACES = {  # public name -> module and name there
    "Callback": ("train.callbacks", "Callback"),
    "Encoder": ("encoder", "Encoder"),
    "HypersphericalUniform": ("distributions.uniform", "HypersphericalUniform"),
    "VonMisesFisher": ("distributions.vmf", "VonMisesFisher"),
    "compare": ("evaluation.runs", "compare_runs"),
    "convert": ("tensorflow_checkpoint.convert", "convert"),
    "embed": ("evaluation.embed", "embed"),
    "evaluate": ("evaluation.suite", "evaluate"),
    "export": ("exporting.export", "export"),
    "finetune": ("finetuning.run", "finetune"),
    "inspect": ("inspection.run", "inspect"),
    "load": ("evaluation.frozen_model", "load_encoder"),
    "neighbors": ("inspection.neighbors", "neighbors"),
    "predict": ("finetuning.predict", "predict"),
    "pretrain": ("train.start", "pretrain"),
    "report": ("evaluation.runs", "report_runs"),
}


def __getattr__(name: str) -> object:
    """Import public names lazily: torch and timm take seconds."""
    if name in _PLACES:
        module, inside = _PLACES[name]
        return getattr(import_module(f"{__name__}.{module}"), inside)
    if name in __all__:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__

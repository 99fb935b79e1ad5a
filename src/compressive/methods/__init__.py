"""Methods: modules that turn views into a `Step`; each is built by the file named in `METHODS`."""

from collections.abc import Callable
from importlib import import_module

from compressive.config import Config, method_info
from compressive.methods.bootstrap import Bootstrap as Bootstrap
from compressive.methods.contrastive import Contrastive as Contrastive
from compressive.methods.step import Embeddings as Embeddings
from compressive.methods.step import Method as Method
from compressive.methods.step import Step as Step

__all__ = ["Bootstrap", "Builder", "Contrastive", "Embeddings", "Method", "Step", "build"]

Builder = Callable[[Config], Method]


def build(config: Config, *, biased_variance: bool = False) -> Method:
    """Build the method that a config describes; its weights come from torch's generator.

    `biased_variance` gives batch norms TensorFlow's running variance (notation.md, row 16).
    """
    module = import_module(f"{__name__}.{method_info(config).module}")
    return module.build(config, biased_variance=biased_variance)

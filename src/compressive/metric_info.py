"""Direction, scale and description of every metric. Imports no torch."""

from typing import Literal, NamedTuple

ONE_SEED = "one seed per method does not support a claim about the methods"


class MetricInfo(NamedTuple):
    """How tables show a metric; the default is a number without a preferred direction."""

    better: Literal["higher", "lower", ""] = ""
    accuracy: bool = False  # a fraction of correct predictions, shown in percent
    times_100: bool = False  # shown times 100, as in the paper
    description: str = ""


_ACCURACIES = "top-1", "top-5", "mean per class", "top-1 masked", "pm0", "pm10", "frames"
_NEUTRAL = "residual", "reducible_residual", "positive_cosine", "alignment", "uniformity"
_NLL = "negative log-likelihood of the correct class, in nats"
_BRIER = "Brier score: squared distance of the probabilities to the correct class, 0 to 2"
_ECE = "expected calibration error: difference of confidence and accuracy, 0 to 1"
_MCE = "mean corruption error, relative to AlexNet"
_RANKME = (
    "effective number of dimensions of the features h, by the entropy of their singular values; "
    "the rank in a run's summary is of the projections r"
)
_RELATIVE = (
    "distance (1 - cosine) between the features of an image and of its color-changed version, "
    "in percent of the mean distance between two images"
)
METRIC_INFO = {
    **dict.fromkeys(_ACCURACIES, MetricInfo("higher", accuracy=True, times_100=True)),
    **dict.fromkeys((*_NEUTRAL, "effective rank"), MetricInfo()),
    "predictive": MetricInfo("higher"),
    "nll": MetricInfo("lower", description=_NLL),
    "brier": MetricInfo("lower", times_100=True, description=_BRIER),
    "ece": MetricInfo("lower", times_100=True, description=_ECE),
    "mce": MetricInfo("lower", description=_MCE),
    "lipschitz": MetricInfo("lower"),
    "lipschitz_squared_kl": MetricInfo("lower"),
    "relative_distance": MetricInfo("lower", description=_RELATIVE),
    "RankMe": MetricInfo(description=_RANKME),
}

ACCURACIES = tuple(name for name, info in METRIC_INFO.items() if info.accuracy)
PERCENT = tuple(name for name, info in METRIC_INFO.items() if info.times_100)
HIGHER = tuple(name for name, info in METRIC_INFO.items() if info.better == "higher")
LOWER = tuple(name for name, info in METRIC_INFO.items() if info.better == "lower")
DESCRIPTIONS = {name: info.description for name, info in METRIC_INFO.items() if info.description}

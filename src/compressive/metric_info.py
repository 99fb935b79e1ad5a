"""Facts about metrics: which are accuracies, shown as percentages, better when higher or lower."""

ACCURACIES = ("top-1", "top-5", "mean per class", "top-1 masked", "pm0", "pm10", "frames")

PERCENT = (*ACCURACIES, "ece", "brier")  # shown times 100, as in the paper

# Metrics with a preferred direction; all others have none.
HIGHER = (*ACCURACIES, "predictive")

LOWER = ("nll", "brier", "ece", "mce", "lipschitz", "lipschitz_squared_kl")

DESCRIPTIONS = {  # of metrics whose names do not explain them
    "nll": "negative log-likelihood of the true class, in nats",
    "brier": "Brier score, squared distance from the probabilities to the true class, 0 to 2",
    "ece": "expected calibration error, mean gap between confidence and accuracy, 0 to 1",
    "mce": "mean corruption error relative to AlexNet",
    "RankMe": "effective dimension of the features h, from the entropy of their singular values; "
    "unlike the rank in a run's summary, which is of the projections r",
}

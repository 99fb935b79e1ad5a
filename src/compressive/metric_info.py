"""Facts about metrics: which are accuracies, shown as percentages, better when higher or lower."""

ACCURACIES = ("top-1", "top-5", "mean per class", "top-1 masked", "pm0", "pm10", "frames")

# Of these more or less is better; of all others neither.
PERCENT = (*ACCURACIES, "ece", "brier")  # shown times 100, as the paper has them

HIGHER = (*ACCURACIES, "predictive")

LOWER = ("nll", "brier", "ece", "mce", "lipschitz", "lipschitz_squared_kl")

DESCRIPTIONS = {  # words for what a metric does not say by its name
    "nll": "negative log-likelihood of the right class, in nats",
    "brier": "Brier score, the squared distance from the probabilities to the right class, 0 to 2",
    "ece": "expected calibration error, how far confidence lies from accuracy, 0 to 1",
    "mce": "mean corruption error, of AlexNet's",
    "RankMe": "how many dimensions the features h fill, by the entropy of their singular values; "
    "not the rank in a run's summary, which is of the projections r",
}

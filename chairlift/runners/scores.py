"""What is made of a classifier's logits."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

Scores = npt.NDArray[np.float64]


def probabilities(logits: npt.ArrayLike, activation: str | None = None) -> Scores:
    """By one of the ACTIVATIONS; without any, of one label its sigmoid, of several their softmax."""
    values = np.asarray(logits, dtype=np.float64)
    return ACTIVATIONS[activation or ("sigmoid" if values.size == 1 else "softmax")](values)


def sigmoid(values: Scores) -> Scores:
    """Without overflow for any number."""
    small = np.exp(-np.abs(values))
    result: Scores = np.where(values >= 0, 1, small) / (1 + small)
    return result


def softmax(values: Scores) -> Scores:
    """Without overflow for any numbers."""
    raised: Scores = np.exp(values - values.max())
    result: Scores = raised / raised.sum()
    return result


def first_logits(values: Sequence[npt.ArrayLike]) -> Scores:
    """The score of each pair, as a reranker gives it."""
    return np.array([np.asarray(value, dtype=np.float64).ravel()[0] for value in values])


def pair_scores(values: Sequence[npt.ArrayLike], activation: str | None) -> Scores:
    """What is made of each pair's: by one of the ACTIVATIONS; without any its sigmoid."""
    return ACTIVATIONS[activation or "sigmoid"](first_logits(values))


ACTIVATIONS: dict[str, Callable[[Scores], Scores]] = {
    "sigmoid": sigmoid,
    "softmax": softmax,
    "none": lambda logits: logits,
}

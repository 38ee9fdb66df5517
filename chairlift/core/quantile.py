"""What nearly all values of late stay below."""

# The share, and how far one value moves the estimate, relative to it.
_SHARE, _STEP = 0.95, 0.05
# What it grows from.
_LEAST = 1e-5


class HighQuantile:
    """Follows the 95th percentile of positive values, by stochastic approximation (Robbins and Monro 1951)."""

    def __init__(self) -> None:
        self.value = 0.0

    def observe(self, value: float) -> None:
        """Take in a value."""
        if value > self.value:
            self.value = max(self.value * (1 + _STEP * _SHARE), _LEAST)
        else:
            self.value *= 1 - _STEP * (1 - _SHARE)

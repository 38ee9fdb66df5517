"""How long a step will take, learned from how long steps took."""

from collections.abc import Sequence
from math import inf, sqrt
from typing import NamedTuple

# Of the first guess: what a step costs by itself, a token, a KV token read, and a pair of query and key, in tokens.
# Features are measured in these, so that all coefficients are of one size. Only the proportions count: the first step
# seen sets the scale. A model of 135M parameters on two cores has 10 : 1 : 2e-3 : 6e-4. Larger models, and GPUs, have
# a larger first and smaller last ones, for which this guess errs towards dear prompts: that means small chunks for a
# few steps, while the opposite means a stall.
_SHAPE = (32.0, 1.0, 1e-3, 2e-4)
_FIRST_SECONDS_PER_TOKEN = 1e-4
# Variances of the first guess relative to its square: of the speed as a whole, and of each coefficient.
_COMMON, _OWN = 1.0, 9.0
# What may change from one step to the next: all of it by 2% (the machine's speed), and each coefficient by 0.3%. The
# third is as far as the doubt of a coefficient grows, however long no step has told anything of it.
_COMMON_DRIFT, _OWN_DRIFT, _MOST_DOUBT = 0.02**2, 0.003**2, 1.0
# Deviations from the prediction, in standard deviations: clipped beyond the first, not counted beyond the second.
_CLIP, _OUTLIER = 2.5, 6.0
# So many surprises on the same side in a row are no hiccup but a change of speed, perhaps by as much again.
_COMPANY, _CHANGE = 3, 1.0
# Bounds of the measurement's relative standard deviation, and how fast it is learned.
_LEAST_NOISE, _MOST_NOISE, _NOISE_RATE = 0.03, 0.3, 0.05
# How fast it is learned what steps read of the weights.
_READ_RATE = 0.1
# A forward pass that seems to take less or more than this many seconds was not timed.
_SHORTEST, _LONGEST = 1e-7, 1e4


def _dot(left: list[float], right: Sequence[float]) -> float:
    return left[0] * right[0] + left[1] * right[1] + left[2] * right[2] + left[3] * right[3]


class Coefficients(NamedTuple):
    """Seconds for a step, for each token computed, each KV token read, and each pair of a query and a key."""

    step: float
    token: float
    kv_token: float
    pair: float


class ExpertReads(NamedTuple):
    """A mixture of experts: the share of its weights that lies in them, and each one's chance that a token takes it."""

    share: float
    chance: float

    def read(self, tokens: float) -> float:
        """Return the share of all weights that a step of so many tokens reads, if these choose by themselves."""
        unread: float = self.share * (1.0 - self.chance) ** tokens
        return 1.0 - unread


class CostModel:
    """Step seconds = a + b * tokens + c * kv_tokens + d * pairs, with a, b, c, d >= 0, fitted as steps come in.

    Where there are `experts` a step costs the share of a that it reads of the weights: one token chooses an eighth of
    OLMoE's experts, 16 tokens seven eighths.

    `kv_tokens` is the sum of the context lengths attended to, once a step's tokens are written: how much of the KV
    cache is read. `pairs` is the sum, over the step's tokens, of the context each one sees: how much arithmetic
    attention does. For decodes the two are equal, and `pairs` may be left out. For a chunk of a prompt they are not:
    128 tokens after 1,000 others read 1,128 KV tokens, but make 136,000 pairs, which may cost as much as 80 tokens
    more. Either feature alone is wrong by a factor of four, for the chunks or for the decodes.

    The fit is recursive least squares as a Kalman filter (Kalman 1960), which tells the drift of the machine's speed,
    shared by all coefficients, from that of each one: so a slow-down seen in decodes also holds for prompts, and a
    coefficient that a step says little of hardly moves. Surprises are clipped (Huber 1964), single large ones left
    out. A coefficient that would turn negative is held at zero, and the others adjusted as if it were known (Simon and
    Chia 2002).

    `coefficients` are the present fit, in seconds; that of a step is for steps that read as much as the last ones did.
    `shape` is the first guess's proportions, and `doubt` the variance of each of its terms, relative to its square.
    """

    def __init__(
        self,
        shape: tuple[float, float, float, float] = _SHAPE,
        doubt: float = _OWN,
        experts: ExpertReads | None = None,
    ) -> None:
        self.num_observed = 0
        self._experts = experts
        # What the last steps read of the weights.
        self._read = 1.0
        self._shape = shape
        self._doubt = doubt
        self._noise = 0.1
        self._surprises = 0
        self._guess(_FIRST_SECONDS_PER_TOKEN)

    def predict(self, tokens: float, kv_tokens: float, pairs: float | None = None) -> float:
        """Return the seconds that a step of this size will take; `pairs` is that of decodes if not given."""
        return _dot(self._theta, self._features(tokens, kv_tokens, pairs))

    def tokens_within(
        self, seconds: float, tokens: int, kv_tokens: int, pairs: int | None = None, computed: int = 0
    ) -> int | None:
        """Return how many tokens of one more prompt a step has time for, or None if any number.

        The step already holds `tokens`, `kv_tokens` and `pairs`; the prompt has `computed` tokens in the KV cache.
        """
        _, b, c, d = self.coefficients
        spare = seconds - self.predict(tokens, kv_tokens, pairs) - c * computed - self._unread(tokens)
        if spare < 0:
            return 0
        # n tokens make n * computed + n (n + 1) / 2 pairs, so this is the root of a quadratic (in its stable form).
        linear = b + c + d * (computed + 0.5)
        divisor = linear + sqrt(linear * linear + 2 * d * spare)
        found = 2 * spare / divisor if divisor > 0 else inf
        return int(found) if found < 1e15 else None

    def of_all_weights(self) -> Coefficients:
        """Return the coefficients, that of a step for steps that read all weights."""
        return self.coefficients._replace(step=self._theta[0] * self._shape[0])

    def more_for(self, tokens: float) -> float:
        """Return the seconds of the weights that a step of so many tokens reads more with one token more."""
        return 0.0 if self._experts is None else self._unread(tokens) * self._experts.chance

    def _unread(self, tokens: float) -> float:
        """The seconds of the weights that a step of so many tokens leaves alone, and that a prompt would read."""
        return 0.0 if self._experts is None else self._theta[0] * self._shape[0] * (1.0 - self._experts.read(tokens))

    def observe(self, seconds: float, tokens: float, kv_tokens: float, pairs: float | None = None) -> None:
        """Take in what a step took. A step that was not timed (no seconds, or absurdly many) is passed over."""
        if not _SHORTEST <= seconds <= _LONGEST:
            return
        x = self._features(tokens, kv_tokens, pairs)
        if not self.num_observed:
            self._guess(seconds / sum(x))
        self.num_observed += 1
        if self._experts is not None:
            self._read += _READ_RATE * (self._experts.read(tokens) - self._read)
        predicted = _dot(self._theta, x)
        self._drift(predicted / sum(x))
        along = [_dot(row, x) for row in self._variance]
        spread = sqrt(max(_dot(along, x), 0.0) + (self._noise * predicted) ** 2)
        surprise = (seconds - predicted) / spread
        self._note(surprise, seconds / predicted - 1 if predicted > 0 else 0.0)
        if abs(surprise) <= _OUTLIER:
            clipped = min(max(surprise, -_CLIP), _CLIP)
            self._correct([p / spread for p in along], clipped)
            error = min(abs(clipped * spread / predicted), _MOST_NOISE)
            self._noise += _NOISE_RATE * (max(error, _LEAST_NOISE) - self._noise)

    def _features(self, tokens: float, kv_tokens: float, pairs: float | None) -> tuple[float, float, float, float]:
        a, b, c, d = self._shape
        if self._experts is not None:
            a *= self._experts.read(tokens)
        return a, b * tokens, c * kv_tokens, d * (kv_tokens if pairs is None else pairs)

    def _guess(self, level: float) -> None:
        """Start from the first guess's proportions; `level` in seconds a token."""
        self._theta = [level] * 4
        self._tell()
        self._variance = [[level * level * (_COMMON + self._doubt * (i == j)) for j in range(4)] for i in range(4)]

    def _drift(self, level: float) -> None:
        """Allow for change since the last step. `level`, in seconds a token, moves a coefficient that is at zero."""
        theta = self._theta
        for i, row in enumerate(self._variance):
            scale = _COMMON_DRIFT * theta[i]
            for j in range(4):
                row[j] += scale * theta[j]
            own = max(theta[i], 0.1 * level) ** 2
            row[i] += max(min(_OWN_DRIFT * own, _MOST_DOUBT * own - row[i]), 0.0)

    def _note(self, surprise: float, deviation: float) -> None:
        """Count surprises in a row on the same side; enough of them put the speed as a whole in doubt.

        In as much doubt as the last one, relative to the prediction, deviates: else a machine that turned a hundred
        times slower would look like a series of outliers for long.
        """
        if abs(surprise) <= _CLIP:
            self._surprises = 0
            return
        side = 1 if surprise > 0 else -1
        self._surprises = self._surprises + side if self._surprises * side > 0 else side
        if abs(self._surprises) >= _COMPANY:
            self._surprises = 0
            theta, change = self._theta, max(_CHANGE, deviation * deviation)
            for i, row in enumerate(self._variance):
                for j in range(4):
                    row[j] += change * theta[i] * theta[j]

    def _correct(self, gain: list[float], surprise: float) -> None:
        """Move the fit; `gain` and `surprise` are in standard deviations of the prediction."""
        theta, variance = self._theta, self._variance
        for i, row in enumerate(variance):
            theta[i] += gain[i] * surprise
            for j in range(4):
                row[j] -= gain[i] * gain[j]
            row[i] = max(row[i], 1e-12 * theta[i] * theta[i])
        for i in range(4):
            if theta[i] < 0:
                share = theta[i] / variance[i][i]
                for j in range(4):
                    theta[j] -= share * variance[i][j]
        for i in range(4):
            theta[i] = max(theta[i], 0.0)
        self._tell()

    def _tell(self) -> None:
        """Set the coefficients to the present fit."""
        found = Coefficients(*(value * unit for value, unit in zip(self._theta, self._shape, strict=True)))
        self.coefficients = found if self._experts is None else found._replace(step=found.step * self._read)

"""What `LLM.generate`, `embed`, `classify` and `score` return, in the shape that vLLM's users know."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Logprob:
    """A token's log-probability, its rank in the vocabulary (1 is the likeliest), and its text."""

    logprob: float
    rank: int
    decoded_token: str


@dataclass(slots=True)
class RequestMetrics:
    """Moments in a request's life, in seconds on the machine's monotonic clock; None if it never came to that."""

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One sample. `logprobs` has a dict for each token, the chosen token's entry first; None if not asked for.

    `finish_reason` is "stop", "length", "abort", "error" or "invalid"; `stop_reason` the stop string or stop token id,
    or the error's text.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    cumulative_logprob: float | None = None


@dataclass(slots=True)
class BeamSearchSequence:
    """A continuation that was found, with its log-probability; it ended by itself ("stop") or not ("length")."""

    tokens: list[int]
    cum_logprob: float
    text: str = ""
    finish_reason: str | None = None


@dataclass(slots=True)
class BeamSearchOutput:
    """What `LLM.beam_search` returns of a prompt: the best first."""

    sequences: list[BeamSearchSequence]


@dataclass(slots=True)
class EmbeddingOutput:
    """A text's vector."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """How many numbers the vector has."""
        return len(self.embedding)


@dataclass(slots=True)
class ClassificationOutput:
    """The probability of each label, in the model's order of them; `label` is that of the largest."""

    probs: list[float]
    label: str

    @property
    def num_classes(self) -> int:
        """How many labels there are."""
        return len(self.probs)


@dataclass(slots=True)
class ScoringOutput:
    """How well two texts go together."""

    score: float


@dataclass(slots=True)
class EmbeddingRequestOutput:
    """What `LLM.embed` returns of a text."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass(slots=True)
class ClassificationRequestOutput:
    """What `LLM.classify` returns of a text."""

    request_id: str
    outputs: ClassificationOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass(slots=True)
class ScoringRequestOutput:
    """What `LLM.score` returns of two texts; the tokens are those of both, as the model reads them."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    finished: bool = True


@dataclass(slots=True)
class RequestOutput:
    """One prompt and its samples. `prompt` is None when token ids were given.

    `prompt_logprobs` starts with None, since nothing precedes the first token.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    finished: bool = False

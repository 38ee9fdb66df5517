"""What the front and a model's worker say to each other, encoded as msgpack."""

import msgspec

from chairlift.core.cost import Coefficients
from chairlift.core.finished import FinishReason
from chairlift.core.sequences.budget import LatencyBudget
from chairlift.core.sequences.live_settings import LiveSettings
from chairlift.core.sequences.request import Request
from chairlift.core.sequences.standing import Standing
from chairlift.core.sequences.step import TokenLogprob
from chairlift.engine.worker_messages import LoadFailed, Shutdown
from chairlift.runners.sequences import SequenceInfo


class SequenceUpdate(msgspec.Struct, array_like=True):
    """What one step gave one request. Times in seconds of CLOCK_MONOTONIC, which all processes of a machine share.

    A request that holds its updates has two: of the first step that gave a token, and of all others, at its end.
    `detail` is the stop token's id when `finish_reason` is stop, or the error's text. `num_cached_tokens` and
    `first_scheduled` are those of when the request first ran.
    """

    id: str
    token_ids: list[int]
    finish_reason: FinishReason | None = None
    detail: int | str | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    num_cached_tokens: int = 0
    first_scheduled: float = 0.0


class CostStats(msgspec.Struct, array_like=True):
    """The last step as the cost model foresaw it and as it was, in seconds, and how many tokens the target allowed."""

    predicted: float
    seconds: float
    budget: int
    coefficients: Coefficients

    @classmethod
    def of(cls, budget: LatencyBudget) -> "CostStats":
        """Describe a budget after a step."""
        return cls(budget.predicted, budget.seconds, budget.tokens, budget.model.coefficients)


class EngineStats(msgspec.Struct, array_like=True):
    """The engine after a step. Counters only grow (since the worker started); the rest are the present moment's.

    `cost` is there if there is a target for the time between tokens, and the cost model's `coefficients` once they
    are known, from steps in which requests wait or many run; of a model with experts `all_weights` are those of steps
    that read all of them. `running` and `waiting` count live requests; background ones have counts of their own.
    `kv_blocks_cached` are blocks that nobody holds, and whose content is still known. The step was over at
    `step_ended`, a moment of CLOCK_MONOTONIC. So many requests were `added`, whatever became of them.
    """

    step_requests: int = 0
    step_tokens: int = 0
    step_seconds: float = 0.0
    running: int = 0
    waiting: int = 0
    waiting_reason: str | None = None
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    prefix_queried_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    cost: CostStats | None = None
    background_running: int = 0
    background_waiting: int = 0
    coefficients: Coefficients | None = None
    kv_blocks_cached: int = 0
    step_ended: float = 0.0
    all_weights: Coefficients | None = None
    added: int = 0


class Add(msgspec.Struct, tag=True):
    """Front to worker: serve this request."""

    request: Request


class Abort(msgspec.Struct, tag=True):
    """Front to worker: forget these requests; no answer comes."""

    request_ids: list[str]


class CloseQueue(msgspec.Struct, tag=True):
    """Front to worker: nobody else will come, so a static batch may leave with empty slots."""


class Explain(msgspec.Struct, tag=True):
    """Front to worker: say where these requests are; the answer is `Explained`."""

    request_ids: list[str]


class Retune(msgspec.Struct, tag=True):
    """Front to worker: go by these settings from the next step on."""

    settings: LiveSettings


class TurnGiven(msgspec.Struct, tag=True):
    """Front to worker: the machine is this model's until `TurnOver`."""


class TurnAsked(msgspec.Struct, tag=True):
    """Front to worker: others wait, with `live` requests or not, for the machine; give it back after this step."""

    live: bool


SequencesToWorker = Add | Abort | CloseQueue | Explain | Retune | Shutdown | TurnGiven | TurnAsked


class Ready(msgspec.Struct, tag=True):
    """Worker to front: loaded and warmed up."""

    info: SequenceInfo


class StepOutput(msgspec.Struct, tag=True, omit_defaults=True):
    """Worker to front: all that one step gave, in one message, who took a slot in it, and who gave one up."""

    updates: list[SequenceUpdate]
    stats: EngineStats
    preempted: list[str] = []
    started: list[str] = []


class Explained(msgspec.Struct, tag=True):
    """Worker to front: where those requests are that are here."""

    standings: list[Standing]


class TurnWanted(msgspec.Struct, tag=True):
    """Worker to front: there is a step to run, maybe for `background` requests only."""

    background: bool


class TurnOver(msgspec.Struct, tag=True):
    """Worker to front: the machine is free. `again` wants the next turn as well, maybe for `background` requests only.

    `seconds` is what the steps took.
    The rest of the turn was spent on messages, for which nobody pays: the front may have been busy with others'.
    """

    again: bool
    seconds: float
    background: bool = False


SequencesToFront = Ready | LoadFailed | StepOutput | Explained | TurnWanted | TurnOver

"""What every route needs: the model's client, tokenizer, limits and metrics; and the way in for requests."""

import os
import time
from collections.abc import Callable, Sequence
from typing import Literal, Protocol

from chairlift.config.server import ServerConfig
from chairlift.core.sequences.request import Request
from chairlift.core.sequences.sampling import SamplingParams
from chairlift.engine.sequences.client import Stream
from chairlift.engine.sequences.fan_out import fan_out
from chairlift.engine.sequences.messages import EngineStats
from chairlift.errors import InvalidRequest, Unavailable
from chairlift.runners.sequences import SequenceInfo
from chairlift.server.http.api_errors import ApiError
from chairlift.server.http.endpoint import Terms
from chairlift.server.metrics.sequences import SequenceMetrics
from chairlift.server.openai.body_types import CommonBody
from chairlift.server.openai.samples import Sample
from chairlift.text.output import TextStream
from chairlift.text.tokenizer import Tokenizer


class SequenceClientView(Protocol):
    """The part of SequenceClient that the routes use."""

    info: SequenceInfo | None
    stats: EngineStats
    on_step: Callable[[EngineStats], None] | None

    @property
    def restarts(self) -> int:
        """How many workers have died and been replaced."""

    @property
    def failure(self) -> str | None:
        """Why the model can't be loaded, if it can't."""

    @property
    def state(self) -> str:
        """One of loading, ready, restarting, draining, failed."""

    @property
    def ready(self) -> bool:
        """Whether a request would be taken in now."""

    def submit(self, *requests: Request) -> list[Stream]:
        """Queue requests, all or none."""


class SequenceService:
    """One language model and its front. `seats` sequences may run at once."""

    task: Literal["generate"] = "generate"

    def __init__(
        self,
        client: SequenceClientView,
        tokenizer: Tokenizer,
        model: str,
        config: ServerConfig,
        version: str = "1",
        seats: int = 64,
    ) -> None:
        self.client = client
        self.tokenizer = tokenizer
        self.name = model
        self.version = version
        self.seats = seats
        self.config = config
        self.created = int(time.time())
        self.metrics = SequenceMetrics(model, client)
        client.on_step = self.metrics.on_step

    def check(self, body: CommonBody) -> None:
        """Refuse samples beyond the limit."""
        if body.n is not None and body.n > self.config.max_n:
            raise InvalidRequest(f"n is {body.n}, above this server's limit of {self.config.max_n} (max_n)", "n")

    @property
    def ready(self) -> bool:
        """Whether a request would be taken in now."""
        return self.client.ready

    @property
    def state(self) -> str:
        """One of loading, ready, restarting, draining, failed."""
        return self.client.state

    @property
    def failure(self) -> str | None:
        """Why the model is not ready, if something went wrong."""
        return self.client.failure

    @property
    def max_model_len(self) -> int | None:
        """Tokens of prompt and answer together; None before the model is loaded."""
        return self.client.info.max_model_len if self.client.info is not None else None

    def submit(
        self,
        request_id: str,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        body: CommonBody,
        terms: Terms,
        *,
        continues: bool,
        discard: bool = False,
    ) -> list[Sample]:
        """Admit `params.n` sequences for each prompt, all or none; those not done by the deadline raise it.

        `continues` says that an answer continues its prompt's text; `discard` drops what is generated. Raises
        InvalidRequest, QueueFull or Unavailable.
        """
        info = self.client.info
        if info is None or not self.client.ready:
            failure = f": {self.client.failure}" if self.client.failure else ""
            raise Unavailable(f"the model is {self.client.state}{failure}")
        count, limit = len(prompts) * params.n, self.config.max_waiting
        if count > limit:
            message = f"{len(prompts)} prompts with n={params.n} are {count} sequences, more than the queue of {limit}"
            raise InvalidRequest(f"{message} holds (max_waiting)", "n" if params.n > 1 else "prompt")
        requests: list[Request] = []
        for index, prompt in enumerate(prompts):
            name = request_id if len(prompts) == 1 else f"{request_id}-{index}"
            requests += self._fan_out(name, prompt, params, body, terms, info)
        streams = self.client.submit(*requests)
        samples = [
            Sample(index, stream, self._text(stream.request, continues), self.metrics, discard)
            for index, stream in enumerate(streams)
        ]
        if terms.timeout is not None:
            for sample in samples:
                sample.expire_after(terms.timeout)
        return samples

    def _text(self, request: Request, continues: bool) -> TextStream:
        return TextStream(self.tokenizer, request.params, request.prompt_ids if continues else ())

    def _fan_out(
        self, name: str, prompt: list[int], params: SamplingParams, body: CommonBody, terms: Terms, info: SequenceInfo
    ) -> list[Request]:
        try:
            return fan_out(
                name,
                prompt,
                params,
                info=info,
                eos_ids=self.tokenizer.eos_ids,
                arrival=time.monotonic(),
                priority=terms.priority if body.priority is None else body.priority,
                cache_salt=body.cache_salt or "",
                use_prefix_cache=body.cache_prompt is not False,
                background=terms.background,
                # Stop strings are found here, so the tokens have to come as they are made.
                hold_updates=not body.stream and not params.stop_strings,
            )
        except InvalidRequest as error:
            if len(prompt) + (params.max_tokens or 1) > info.max_model_len:
                raise ApiError(400, str(error), error.param, "context_length_exceeded") from None
            raise


def new_id(prefix: str) -> str:
    """A request id that nobody can guess."""
    return f"{prefix}-{os.urandom(12).hex()}"

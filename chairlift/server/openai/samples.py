"""One HTTP request's sequences: admitted together, read together, cancelled together."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence

import msgspec

from chairlift.core.finished import FinishReason
from chairlift.core.sequences.request import TokenLogprob
from chairlift.engine.sequences.client import Stream
from chairlift.engine.sequences.messages import SequenceUpdate
from chairlift.errors import ChairliftError, DeadlineExceeded
from chairlift.server.metrics.sequences import SequenceMetrics
from chairlift.server.openai.body_types import PromptTokensDetails, Usage
from chairlift.text.output import TextStream


class Piece(msgspec.Struct):
    """What one step added to one sample. `start` is the number of tokens that the sample had before."""

    sample: "Sample"
    text: str
    start: int
    first: bool
    logprobs: list[TokenLogprob]
    finish_reason: str | None


class Sample:
    """One sequence on its way to the client: tokens in, text out, and its times measured."""

    def __init__(
        self, index: int, stream: Stream, text: TextStream, metrics: SequenceMetrics, discard: bool = False
    ) -> None:
        self.index = index
        self.stream = stream
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.num_cached_tokens = 0
        self.prompt_logprobs: list[TokenLogprob] = []
        self._text = text
        self._metrics = metrics
        self._discard = discard
        self._last = 0.0
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens generated for the client so far."""
        return 0 if self._discard else self._text.num_tokens

    @property
    def offsets(self) -> list[int]:
        """Where in the generated text each token starts; kept when logprobs were asked for."""
        return self._text.offsets or []

    @property
    def prompt_ids(self) -> list[int]:
        """The prompt's tokens."""
        return self.stream.request.prompt_ids

    def expire_after(self, seconds: float) -> None:
        """End with DeadlineExceeded if it has not ended by then."""
        error = DeadlineExceeded(f"it was not done within {seconds * 1000:g} ms")
        self._timer = asyncio.get_running_loop().call_later(seconds, self.stream.give_up, error)

    def take(self, update: SequenceUpdate) -> Piece | None:
        """Take in a step's tokens; None if the sample had ended before them."""
        if self.finish_reason is not None:
            return None
        first, start = self._last == 0.0, self._text.num_tokens
        self._measure(update, first)
        stop_token = update.detail if isinstance(update.detail, int) else None
        delta = self._text.push(update.token_ids, update.finish_reason, stop_token)
        self._metrics.generation_tokens += delta.num_tokens
        if delta.finish_reason is not None:
            self.finish_reason = delta.finish_reason.value
            self.stop_reason = delta.stop_reason
            if delta.stopped:
                self.stream.cancel()
            self.close(delta.finish_reason)
        if self._discard:
            return Piece(self, "", 0, first, [], self.finish_reason)
        logprobs = (update.logprobs or [])[: delta.num_tokens]
        return Piece(self, delta.text, start, first, logprobs, self.finish_reason)

    def close(self, reason: FinishReason) -> None:
        """Count the end, once; what still runs is cancelled."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self.stream.cancel()
        self._metrics.finished[reason.value] += 1
        if reason in (FinishReason.STOP, FinishReason.LENGTH) and not self.stream.request.background:
            self._metrics.end_to_end.observe(self._last - self.stream.request.arrival)

    def _measure(self, update: SequenceUpdate, first: bool) -> None:
        """Take the times; those of background requests, which nobody waits for, would hide all others."""
        now, metrics, request = time.monotonic(), self._metrics, self.stream.request
        before, self._last = self._last, now
        if first:
            self.num_cached_tokens = update.num_cached_tokens
            self.prompt_logprobs = update.prompt_logprobs or []
            metrics.prompt_tokens += len(self.prompt_ids)
        if request.background:
            return
        if first:
            metrics.time_to_first_token.observe(now - request.arrival)
            metrics.queue_time.observe(max(update.first_scheduled - request.arrival, 0.0))
        elif count := len(update.token_ids):
            metrics.inter_token.observe((now - before) / count, count)


async def pieces(samples: Sequence[Sample]) -> AsyncGenerator[list[Piece], None]:
    """What the samples get, a list for each step. Ends early, samples unfinished, if they were cancelled."""
    try:
        async with contextlib.aclosing(_merge([sample.stream for sample in samples])) as groups:
            async for group in groups:
                yield [piece for index, update in group if (piece := samples[index].take(update)) is not None]
    except ChairliftError:
        close_all(samples, FinishReason.ERROR)
        raise
    finally:
        close_all(samples)


def close_all(samples: Sequence[Sample], reason: FinishReason = FinishReason.ABORT) -> None:
    """End what has not ended."""
    for sample in samples:
        sample.close(reason)


async def _merge(streams: Sequence[Stream]) -> AsyncGenerator[list[tuple[int, SequenceUpdate]], None]:
    """Updates of many streams, those of one step together."""
    if len(streams) == 1:
        async for update in streams[0]:
            yield [(0, update)]
        return
    arrived: list[tuple[int, SequenceUpdate]] = []
    wake = asyncio.Event()

    async def pump(index: int, stream: Stream) -> None:
        try:
            async for update in stream:
                arrived.append((index, update))
                wake.set()
        finally:
            wake.set()

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        while True:
            # All pumps that a step woke run before this does, so their updates leave together.
            await wake.wait()
            wake.clear()
            if arrived:
                group, arrived[:] = arrived[:], []
                yield group
            for task in [task for task in tasks if task.done()]:
                tasks.remove(task)
                task.result()
            if not tasks and not arrived:
                return
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def usage(samples: Sequence[Sample], n: int) -> Usage:
    """Token counts; samples come in order, `n` for each prompt."""
    read = sum(len(sample.prompt_ids) for sample in samples[::n])
    written = sum(sample.num_tokens for sample in samples)
    cached = sum(sample.num_cached_tokens for sample in samples[::n])
    return Usage(read, written, read + written, PromptTokensDetails(cached))

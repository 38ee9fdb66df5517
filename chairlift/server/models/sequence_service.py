"""The service in front of a language model: prompts go in, samples come out, and each gives its text in pieces."""

import asyncio
import hashlib
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import msgspec

from chairlift import __version__
from chairlift.config.sequences import SequenceConfig
from chairlift.config.server import ServerConfig
from chairlift.core.finished import FinishReason
from chairlift.core.sequences.request import Request, Unservable, fan_out, possible_words
from chairlift.core.sequences.sampling_params import SamplingParams, check_stop
from chairlift.core.sequences.step import TokenLogprob
from chairlift.engine.sequences.client import AtOnce, Stream
from chairlift.engine.sequences.messages import SequenceUpdate
from chairlift.engine.sequences.updates import Updates
from chairlift.errors import ChairliftError, DeadlineExceeded, InvalidRequest, QueueFull, Unavailable
from chairlift.runners.sequences import SequenceInfo
from chairlift.server.http.api_errors import PromptTooLong
from chairlift.server.http.exchange import Terms, off_loop
from chairlift.server.metrics.sequences import SequenceMetrics
from chairlift.server.models.request_log import EndedRequest, RefusedRequest, RequestLog, refused_at_once
from chairlift.server.models.request_size import count_sequences
from chairlift.server.models.sequence_client_view import SequenceClientView
from chairlift.server.models.settings_history import SettingsHistory
from chairlift.text.detokenize import TextStream, stop_automaton
from chairlift.text.model_dialect import ModelDialect
from chairlift.text.stop import StopAutomaton
from chairlift.text.tokenizer import ChatPrompt, Tokenizer

if TYPE_CHECKING:
    from chairlift.server.models.request_spans import RequestSpans
    from chairlift.server.models.trace_notes import TraceNotes


# Bytes of what came for a stream that its client may leave unread, about: a model must not fill the memory for it.
_MOST_UNREAD = 2**24

# What hears of each sequence that ends.
AtEnd = Callable[[Request, Terms, EndedRequest], None]


class SequenceOptions(NamedTuple):
    """What a request wants beside tokens and terms.

    `continues` says that an answer continues its prompt's text, `streams` that its tokens are wanted as they come;
    `discard` drops what is generated. Only requests of one `cache_salt` share prefixes, with `use_prefix_cache`.
    All that is generated follows the `grammar`, of text/structured.py. Special tokens among `shown` are text. None of
    the `bad_word_ids` is generated.
    """

    continues: bool
    streams: bool
    discard: bool = False
    cache_salt: str = ""
    use_prefix_cache: bool = True
    grammar: str | None = None
    shown: frozenset[int] = frozenset()
    bad_word_ids: Sequence[list[int]] = ()


class SequenceService:
    """One language model and its front. At most `slots` sequences run at once; it writes replies in `model_dialect`.

    `sampling_defaults` hold for requests that say nothing else. One without a tokenizer serves nobody. Who records what
    comes is among the `recorders`, who wants spans of what ends `spans`.
    """

    task: Literal["generate"] = "generate"

    def __init__(
        self,
        client: SequenceClientView,
        tokenizer: Tokenizer | None,
        model: str,
        config: ServerConfig,
        version: str = "1",
        slots: int = 64,
        model_dialect: ModelDialect | None = None,
        sampling_defaults: Mapping[str, Any] = {},
    ) -> None:
        self.client = client
        self.model_dialect = model_dialect or ModelDialect()
        self.sampling_defaults = sampling_defaults
        self._tokenizer = tokenizer
        self.name = model
        self.version = version
        self.slots = slots
        self.config = config
        self.created = int(time.time())
        self.log: RequestLog[Sample] = RequestLog()
        self.former: SettingsHistory[SequenceConfig] = SettingsHistory()
        self.recorders: list[TraceNotes] = []
        self.spans: RequestSpans | None = None
        self.metrics = SequenceMetrics(model if version == "1" else f"{model}:{version}", client)
        client.on_step = self.metrics.on_step

    def check(self, n: int | None, stop: str | list[str] | None = None, best_of: int | None = None) -> None:
        """Refuse samples and stop strings beyond the limits."""
        config = self.config
        for name, value in (("n", n), ("best_of", best_of)):
            if value is not None and value > config.max_n:
                raise InvalidRequest(f"{name} is {value}, above this server's limit of {config.max_n} (max_n)", name)
        try:
            check_stop(stop, config.max_stop_strings, config.max_stop_chars, config.max_stop_chars_total)
        except ValueError as error:
            raise InvalidRequest(str(error), "stop") from None

    def check_load(self, terms: Terms) -> None:
        """Refuse what would be too late whatever its prompt is, before that is looked at. Raises QueueFull."""
        if terms.background:
            return
        try:
            self.client.check_load(terms.priority)
        except QueueFull:
            self.log.refuse(RefusedRequest(terms.owner, time.monotonic(), terms.priority, False, timeout=terms.timeout))
            raise

    def retune(self, config: SequenceConfig) -> None:
        """Go by other settings, as far as they may change while the model runs."""
        self.former.note(self.client.config, time.monotonic())
        self.client.retune(config)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises Unavailable if it could not be read."""
        if self._tokenizer is None:
            raise self._unavailable()
        return self._tokenizer

    def _unavailable(self) -> Unavailable:
        failure = f": {self.client.failure}" if self.client.failure else ""
        return Unavailable(f"the model is {self.client.state}{failure}")

    @property
    def fingerprint(self) -> str:
        """The same for answers that may be compared: of one release, model, type of numbers and kind of kernels."""
        about = [__version__, self.name, self.version, self.client.info]
        return "fp_" + hashlib.sha256(msgspec.json.encode(about)).hexdigest()[:12]

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

    def encode(self, texts: Sequence[str], parse_special: bool, add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of prompts, in which special tokens are found with `parse_special` only.

        Raises ApiError, before it tokenizes, if one is too long whatever its tokens are.
        """
        self.check_length(texts)
        return self.tokenizer.encode_batch(texts, add_special_tokens, parse_special)

    def encode_chat(self, prompt: ChatPrompt) -> list[int]:
        """Token ids of a rendered chat. Raises as `encode`."""
        self.check_length([prompt.text])
        return self.tokenizer.encode_chat(prompt)

    def check_length(self, texts: Sequence[str]) -> None:
        """Raise ApiError for a text that is too long whatever its tokens are."""
        limit = self.max_model_len
        if limit is not None:
            # A character has at most four bytes, and a token at least one: short texts need no look.
            suspects = [text for text in texts if 4 * len(text) >= limit]
            least = max(map(self.tokenizer.lengths.least_tokens, suspects), default=0)
            if least >= limit:
                raise PromptTooLong(least, limit)

    async def bad_word_ids(self, params: SamplingParams) -> list[list[int]]:
        """The `bad_words` as tokens, for `SequenceOptions`; those that this model can't generate are left out."""
        words, info = params.bad_words or [], self.client.info
        if info is None:
            raise self._unavailable()
        tokenizer, vocab_size = self.tokenizer, info.vocab_size
        # Each is tokenized twice.
        size = 2 * sum(map(len, words))
        return await off_loop(size, lambda: possible_words(tokenizer.word_ids(words), vocab_size))

    def submit(
        self,
        request_id: str,
        prompts: Sequence[list[int]],
        params: SamplingParams,
        terms: Terms,
        options: SequenceOptions,
    ) -> "list[Sample]":
        """Admit `params.n` sequences for each prompt, all or none; those not done by the deadline raise it.

        Raises InvalidRequest, QueueFull or Unavailable, and ApiError for what the tenant may not have.
        """
        info = self.client.info
        if info is None or not self.client.ready:
            raise self._unavailable()
        max_waiting, read = self.config.max_waiting, sum(map(len, prompts))
        count = count_sequences(prompts, params, options.grammar or "", options.bad_word_ids, max_waiting)
        terms = terms.checked(read, count)
        options = options._replace(cache_salt=terms.salted(options.cache_salt))
        requests: list[Request] = []
        for index, prompt in enumerate(prompts):
            name = request_id if len(prompts) == 1 else f"{request_id}-{index}"
            requests += self._fan_out(name, prompt, params, terms, options, info)
        # Answers of a tenant, to like requests, are of like length.
        kind = "completion" if options.continues else "chat"
        group = options.cache_salt, kind, requests[0].max_tokens.bit_length()
        at_end = self._at_end(request_id, params, requests, terms)
        try:
            streams = self.client.submit(*requests, group=group, timeout=terms.timeout)
        except QueueFull:
            for request in requests:
                self.log.refuse(RefusedRequest.of(request, terms.owner, terms.timeout))
                if at_end is not None:
                    at_end(request, terms, refused_at_once(request))
            raise
        terms.spend(read)
        automaton = stop_automaton(params)
        samples = []
        for index, stream in enumerate(streams):
            text = self._text(stream.request, options, automaton)
            samples.append(Sample(index, stream, text, self.metrics, terms, self.log, options.discard, at_end))
        if terms.timeout is not None:
            for sample in samples:
                sample.expire_after(terms.timeout)
        return samples

    def _at_end(
        self, request_id: str, params: SamplingParams, requests: Sequence[Request], terms: Terms
    ) -> AtEnd | None:
        """What is told of each of a request's sequences when it ends; None where nobody listens."""
        recorders, span = tuple(self.recorders), None
        if self.spans is not None:
            span = self.spans.sequences(self.name, request_id, params, requests, terms)
        if not recorders:
            return span

        def tell(request: Request, terms: Terms, ended: EndedRequest) -> None:
            for recorder in recorders:
                recorder.sequence(self.name, request, terms, ended)
            if span is not None:
                span(request, terms, ended)

        return tell

    def _text(self, request: Request, options: SequenceOptions, automaton: StopAutomaton | None) -> TextStream:
        before = request.prompt_ids if options.continues else ()
        return TextStream(self.tokenizer.vocabulary, request.params, before, automaton, options.shown)

    def _fan_out(
        self,
        name: str,
        prompt: list[int],
        params: SamplingParams,
        terms: Terms,
        options: SequenceOptions,
        info: SequenceInfo,
    ) -> list[Request]:
        try:
            return fan_out(
                name,
                prompt,
                params,
                model=info,
                eos_ids=self.tokenizer.eos_ids,
                arrival=time.monotonic(),
                priority=terms.priority,
                cache_salt=options.cache_salt,
                use_prefix_cache=options.use_prefix_cache,
                background=terms.background,
                # Stop strings are found here, so the tokens have to come as they are made.
                hold_updates=not options.streams and not params.stop_strings,
                grammar=options.grammar,
                bad_word_ids=options.bad_word_ids,
            )
        except Unservable as error:
            too_long = len(prompt) + (params.max_tokens or 1) > info.max_model_len
            raise InvalidRequest(str(error), error.field, "context_length_exceeded" if too_long else None) from None


class Piece(msgspec.Struct):
    """What one step added to one sample, which had `start` tokens before, and for the client has `num_tokens` now."""

    sample: "Sample"
    text: str
    start: int
    first: bool
    logprobs: list[TokenLogprob]
    finish_reason: str | None
    num_tokens: int


class Sample:
    """One sequence on its way to the client: tokens in, text out, and its times measured."""

    def __init__(
        self,
        index: int,
        stream: Stream,
        text: TextStream,
        metrics: SequenceMetrics,
        terms: Terms,
        log: "RequestLog[Sample]",
        discard: bool = False,
        at_end: AtEnd | None = None,
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
        self._terms = terms
        self._at_end = at_end
        self._last = 0.0
        # Times of background requests, which nobody waits for, would hide all others.
        self._live = not stream.request.background
        self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self.owner, self.timeout = terms.owner, terms.timeout
        # Its request counts among those that the tenant has at once, and until it ends so does each further sequence.
        self._place = terms.tenant if self._live and index else None
        if self._place is not None:
            self._place.add_sequence()
        self._log = log
        log.begin(self.owner, stream.request.id, self)

    @property
    def arrival(self) -> float:
        """When its request came, in seconds of CLOCK_MONOTONIC."""
        return self.stream.request.arrival

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
        now = time.monotonic()
        if first:
            self._begin(update, now)
        elif self._live and (count := len(update.token_ids)):
            self._metrics.inter_token.observe((now - self._last) / count, count)
        self._last = now
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
            return Piece(self, "", 0, first, [], self.finish_reason, 0)
        logprobs = update.logprobs[: delta.num_tokens] if update.logprobs else []
        return Piece(self, delta.text, start, first, logprobs, self.finish_reason, self._text.num_tokens)

    def take_text(self, update: SequenceUpdate) -> str | None:
        """As `take` of an update after the first and before the end, where only the text is wanted; else None."""
        text = self._text
        if self.finish_reason is not None or not text.is_plain or self._discard or self._last == 0.0:
            return None
        now, count = time.monotonic(), len(update.token_ids)
        if self._live and count:
            self._metrics.inter_token.observe((now - self._last) / count, count)
        self._last = now
        self._metrics.generation_tokens += count
        return text.push_plain(update.token_ids)

    def close(self, reason: FinishReason) -> None:
        """Count the end, once; what still runs is cancelled."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        self.stream.cancel()
        self._metrics.finished[reason.value] += 1
        self._terms.spend(self._text.num_tokens)
        if self._place is not None:
            self._place.leave()
        del self._log.live[self.owner][self.stream.request.id]
        ended = self._as_ended(reason)
        self._log.keep(self.owner, ended)
        if self._at_end is not None:
            self._at_end(self.stream.request, self._terms, ended)
        if reason in (FinishReason.STOP, FinishReason.LENGTH) and self._live:
            self._metrics.end_to_end.observe(self._last - self.stream.request.arrival)

    def _as_ended(self, reason: FinishReason) -> EndedRequest:
        """What is kept of it."""
        stream, request, began = self.stream, self.stream.request, self.stream.beginning
        at = stream.ended or time.monotonic()
        ended = EndedRequest(
            id=request.id,
            ended=at,
            finish_reason=reason.value,
            background=request.background,
            priority=request.priority,
            total_s=at - request.arrival,
            queued_s=at - request.arrival,
            prompt_tokens=len(request.prompt_ids),
            tokens=self._text.num_tokens,
            preemptions=stream.preemptions,
            max_tokens=request.max_tokens if request.may_stop else None,
            hold_updates=request.hold_updates,
            timeout=self.timeout,
        )
        if began is not None:
            ended.queued_s = max(began.scheduled - request.arrival, 0.0)
            ended.prefill_s = began.first_token - began.scheduled
            ended.decode_s = at - began.first_token
            ended.cached_tokens = began.num_cached_tokens
            ended.waits = began.waits
            if stream.steps > 0:
                ended.steps, ended.mean_batch = stream.steps, stream.rows / stream.steps
        return ended

    def _begin(self, update: SequenceUpdate, now: float) -> None:
        """Take in what comes with the first tokens, and how long they took."""
        self.num_cached_tokens = update.num_cached_tokens
        self.prompt_logprobs = update.prompt_logprobs or []
        metrics, arrival = self._metrics, self.stream.request.arrival
        metrics.prompt_tokens += len(self.prompt_ids)
        if self._live:
            metrics.time_to_first_token.observe(now - arrival)
            metrics.queue_time.observe(max(update.first_scheduled - arrival, 0.0))


async def pieces(
    samples: Sequence[Sample], at_once: AtOnce | None = None, streams: bool = False
) -> AsyncGenerator[list[Piece], None]:
    """What the samples get, a list for each step. Ends early, samples unfinished, if they were cancelled.

    `at_once`, as `Updates` has it, may take some of it before. Where a client `streams` it and leaves too much unread,
    it gets no more: QueueFull.
    """
    most = _MOST_UNREAD if streams else None
    try:
        async for group in Updates([sample.stream for sample in samples], at_once, most):
            yield [piece for index, update in group if (piece := samples[index].take(update)) is not None]
    except ChairliftError as error:
        close_all(samples, _reason_of(error))
        raise
    finally:
        close_all(samples)


def _reason_of(error: ChairliftError) -> FinishReason:
    kinds = {QueueFull: FinishReason.SHED, InvalidRequest: FinishReason.INVALID, DeadlineExceeded: FinishReason.LATE}
    return next((reason for kind, reason in kinds.items() if isinstance(error, kind)), FinishReason.ERROR)


def close_all(samples: Sequence[Sample], reason: FinishReason = FinishReason.ABORT) -> None:
    """End what has not ended."""
    for sample in samples:
        sample.close(reason)

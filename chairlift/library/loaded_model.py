"""A model in this process that generates: its engine, the requests of its prompts, and what becomes of them."""

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from chairlift.config.other_names import hint
from chairlift.config.sequences import SequenceConfig
from chairlift.core.finished import FinishReason
from chairlift.core.sequences.request import Request, Unservable, fan_out, possible_words
from chairlift.core.sequences.sampling_params import SamplingParams
from chairlift.core.sequences.step import TokenLogprob
from chairlift.engine.sequences.engine import Engine
from chairlift.engine.sequences.messages import SequenceUpdate
from chairlift.errors import InvalidRequest
from chairlift.library.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from chairlift.runners.check_model import check_model
from chairlift.runners.uncollected import nothing_collected
from chairlift.text.detokenize import TextStream, stop_automaton
from chairlift.text.sampling_defaults import sampling_defaults
from chairlift.text.structured import grammar_of
from chairlift.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | dict[str, Any]

# Only a server gives its model a name, refuses requests that would be late, has background ones, sees traffic by which
# to turn settings, or has a worker that might hang.
_OF_SERVERS = ("model", "revision", "served_model_name", "target_ttft_ms", "background_step_ms", "auto")
_OF_WORKERS = ("heartbeat_timeout_s", "step_timeout_s", "tool_dialect")


class LoadedModel:
    """Settings, tokenizer and engine of one model. All but `open_output` belongs to the thread that made it.

    Raises TypeError for a setting that there is not, UnsupportedModel or ConfigError.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        known = [name for name in SequenceConfig.__struct_fields__ if name not in (*_OF_SERVERS, *_OF_WORKERS)]
        if unknown := sorted(settings.keys() - set(known)):
            named = ", ".join(name + hint(name, known, repr) for name in unknown)
            raise TypeError(f"unknown setting {named}: LLM takes {', '.join(known)}")
        self.config = SequenceConfig(model=model, **settings)
        check_model(self.config)
        # Only now, since torch takes seconds.
        with nothing_collected():
            from chairlift.runners.decoder.runner import DecoderRunner

        self.tokenizer = Tokenizer.from_folder(model)
        told = sampling_defaults(Path(model)) if self.config.generation_config == "auto" else {}
        self.default_params = SamplingParams(**told)
        self._runner = DecoderRunner(self.config)
        self.engine = Engine(self.config, self._runner)
        self._serial = itertools.count(1)

    def open_output(
        self,
        prompt: Prompt,
        params: SamplingParams,
        priority: int = 0,
        request_id: str | None = None,
        compiles: bool = True,
        streams: bool = False,
    ) -> "OpenOutput":
        """Make the requests of a prompt, which the engine is yet to be given. From any thread.

        With `compiles` a grammar is compiled here and now; unless somebody `streams`, nothing waits for single tokens.
        Raises InvalidRequest.
        """
        text, ids = self.tokens(prompt)
        name = str(next(self._serial))
        bad_words = self.tokenizer.word_ids(params.bad_words or ())
        wanted = params.structured_outputs
        grammar = None if wanted is None else grammar_of(wanted)
        try:
            held = None if grammar is None or not compiles else self._runner.grammars.compile(grammar)
            requests = fan_out(
                name,
                ids,
                params,
                model=self.engine.info,
                eos_ids=self.tokenizer.eos_ids,
                arrival=time.monotonic(),
                priority=priority,
                hold_updates=not streams and not params.stop_strings,
                grammar=grammar,
                bad_word_ids=possible_words(bad_words, self.engine.info.vocab_size),
            )
        except Unservable as error:
            raise InvalidRequest(str(error), error.field) from None
        except ValueError as error:
            raise InvalidRequest(f"structured_outputs: {error}", "structured_outputs") from None
        return OpenOutput(self.tokenizer, request_id or name, text, requests, held)

    def tokens(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The text of a prompt, if it has any, and its tokens. Raises InvalidRequest."""
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        if isinstance(prompt, dict):
            text, ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
            if prompt.keys() - {"prompt", "prompt_token_ids"} or (text is None and ids is None):
                raise InvalidRequest(
                    f"a prompt dict holds 'prompt' or 'prompt_token_ids', not {sorted(prompt)}", "prompt"
                )
            return text, self.tokenizer.encode(text or "") if ids is None else list(ids)
        return None, list(prompt)


class OpenOutput:
    """One prompt on its way to a RequestOutput."""

    def __init__(
        self, tokenizer: Tokenizer, request_id: str, prompt: str | None, requests: list[Request], grammar: object
    ) -> None:
        first = requests[0]
        # Held, so that it need not be compiled again.
        self._grammar = grammar
        self.requests = requests
        samples = [CompletionOutput(i) for i in range(len(requests))]
        self.output = RequestOutput(request_id, prompt, first.prompt_ids, samples, RequestMetrics(first.arrival))
        self._tokenizer = tokenizer
        automaton = stop_automaton(first.params)
        self._streams = [TextStream(tokenizer.vocabulary, each.params, each.prompt_ids, automaton) for each in requests]
        self._unfinished = len(requests)

    def take(self, index: int, update: SequenceUpdate) -> bool:
        """Add a step's tokens to a sample; True once the sample is complete."""
        now, sample, metrics = time.monotonic(), self.output.outputs[index], self.output.metrics
        if sample.finish_reason is not None:
            return False  # the engine hears of a stop string a step late
        if metrics.first_scheduled is None:
            metrics.first_scheduled = update.first_scheduled
            self.output.num_cached_tokens = update.num_cached_tokens
        if metrics.first_token is None and update.token_ids:
            metrics.first_token = now
        stop_token = update.detail if isinstance(update.detail, int) else None
        delta = self._streams[index].push(update.token_ids, update.finish_reason, stop_token)
        sample.text += delta.text
        sample.token_ids += update.token_ids[: delta.num_tokens]
        self._take_logprobs(sample, update, delta.num_tokens)
        if delta.finish_reason is None:
            return False
        failed = delta.finish_reason in (FinishReason.ERROR, FinishReason.INVALID)
        self._end(sample, delta.finish_reason, update.detail if failed else delta.stop_reason)
        return True

    def abort(self) -> None:
        """End all samples that have not ended."""
        for index, sample in enumerate(self.output.outputs):
            if sample.finish_reason is None:
                sample.text += self._streams[index].push([], FinishReason.ABORT).text
                self._end(sample, FinishReason.ABORT, None)

    def as_now(self) -> RequestOutput:
        """A copy of the output, which does not grow."""
        samples = [
            replace(
                each,
                token_ids=each.token_ids.copy(),
                logprobs=None if each.logprobs is None else each.logprobs.copy(),
            )
            for each in self.output.outputs
        ]
        return replace(self.output, outputs=samples, metrics=replace(self.output.metrics))

    def _end(self, sample: CompletionOutput, reason: FinishReason, stop_reason: int | str | None) -> None:
        sample.finish_reason, sample.stop_reason = reason.value, stop_reason
        self._unfinished -= 1
        if not self._unfinished:
            self.output.finished, self.output.metrics.finished = True, time.monotonic()

    def _take_logprobs(self, sample: CompletionOutput, update: SequenceUpdate, num_tokens: int) -> None:
        if update.prompt_logprobs is not None and self.output.prompt_logprobs is None:
            self.output.prompt_logprobs = [None, *map(self._logprobs, update.prompt_logprobs)]
        if update.logprobs is not None:
            counted = update.logprobs[:num_tokens]
            sample.logprobs = (sample.logprobs or []) + [self._logprobs(entry) for entry in counted]
            sample.cumulative_logprob = (sample.cumulative_logprob or 0.0) + sum(e.logprob for e in counted)

    def _logprobs(self, entry: TokenLogprob) -> dict[int, Logprob]:
        """The chosen token's entry, then the likeliest others by rank."""
        text = self._tokenizer.token_text
        found = {entry.token_id: Logprob(entry.logprob, entry.rank, text(entry.token_id))}
        for rank, (token, logprob) in enumerate(entry.top, start=1):
            found.setdefault(token, Logprob(logprob, rank, text(token)))
        return found

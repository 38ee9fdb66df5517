"""The library: the same engine as the server's, in the calling process."""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from chairlift.beam_search import BeamSearchParams, beam_search
from chairlift.config.sequences import SequenceConfig
from chairlift.core.finished import FinishReason
from chairlift.core.sequences.request import Request, TokenLogprob, Unservable, fan_out
from chairlift.core.sequences.sampling import SamplingParams
from chairlift.engine.sequences.engine import Engine
from chairlift.engine.sequences.messages import SequenceUpdate
from chairlift.errors import InvalidRequest, RequestFailed
from chairlift.folders.kind import is_encoder
from chairlift.outputs import (
    BeamSearchOutput,
    ClassificationRequestOutput,
    CompletionOutput,
    EmbeddingRequestOutput,
    Logprob,
    RequestMetrics,
    RequestOutput,
    ScoringRequestOutput,
)
from chairlift.runners.check_model import check_model
from chairlift.text.encoding import Cut
from chairlift.text.output import TextStream, stop_automaton
from chairlift.text.structured import grammar_of
from chairlift.text.tokenizer import Tokenizer
from chairlift.text_model import TextModel

Prompt = str | Sequence[int] | dict[str, Any]


class LLM:
    """A model in this process: `LLM("path/to/folder").generate(["Hello"], SamplingParams(max_tokens=32))`.

    Takes the fields of `SequenceConfig` by keyword: dtype, strategy, batch_size, max_wait_ms, max_num_seqs,
    max_num_batched_tokens, max_model_len, block_size, kv_cache_gb, enable_prefix_caching, seed and so on. Raises
    UnsupportedModel or ConfigError, naming what is wrong, if the model can't be loaded so. Not thread-safe.

    An encoder's folder, or with `kind="encoder"` a decoder's, is for `embed`, `classify` and `score`, and takes the
    settings that `TextModel` names.
    """

    def __init__(self, model: str | Path, **settings: Any) -> None:
        self._texts: TextModel | None = None
        if settings.get("kind") == "encoder" or (Path(model).is_dir() and is_encoder(Path(model))):
            self._texts = TextModel(str(model), **{name: each for name, each in settings.items() if name != "kind"})
            return
        # Only a server gives its model a name, refuses requests that would be late, has background ones, or a worker
        # that might hang.
        served = ("model", "served_model_name", "target_ttft_ms", "background_step_ms")
        others = (*served, "heartbeat_timeout_s", "step_timeout_s", "tool_dialect")
        known = [name for name in SequenceConfig.__struct_fields__ if name not in others]
        if unknown := settings.keys() - set(known):
            raise TypeError(f"unknown setting {', '.join(sorted(unknown))}: LLM takes {', '.join(known)}")
        self.config = SequenceConfig(model=str(model), **settings)
        check_model(self.config)
        # Only now, since torch takes seconds.
        from chairlift.runners.decoder.runner import DecoderRunner

        self.tokenizer = Tokenizer.from_folder(self.config.model)
        self._runner = DecoderRunner(self.config)
        self.engine = Engine(self.config, self._runner)
        # All requests of a call wait before its first step, so no batch need wait for more.
        self.engine.close_queue()
        self._serial = 0

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts: strings, lists of token ids, or {"prompt_token_ids": [...]} / {"prompt": "..."}.

        One SamplingParams serves all, or give one each; likewise `priority`. Results come in the prompts' order. Raises
        InvalidRequest before anything runs if any prompt can't be served; a request that fails while it runs has
        finish_reason "error" and leaves the others alone.
        """
        if self._texts is not None:
            raise InvalidRequest(f"{self._texts.config.model} generates nothing: its task is {self._texts.info.task}")
        wanted = _as_prompts(prompts)
        params = _one_each(sampling_params or SamplingParams(), len(wanted), SamplingParams, "sampling_params")
        priorities = _one_each(priority, len(wanted), int, "priority")
        jobs = [self._job(*each) for each in zip(wanted, params, priorities, strict=True)]
        return self._run(jobs, use_tqdm)

    def chat(
        self,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: dict[str, Any] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, through the model's chat template.

        What looks like a special token in a message is text; in the prompts of `generate` it is one.
        """
        if self._texts is not None:
            return self.generate([])
        several: list[Any] = [messages] if messages and isinstance(messages[0], dict) else messages
        prompts: list[Prompt] = []
        for one in several:
            prompt = self.tokenizer.render_chat(one, add_generation_prompt, chat_template_kwargs)
            prompts.append({"prompt": prompt.text, "prompt_token_ids": self.tokenizer.encode_chat(prompt)})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, *, use_tqdm: bool = False
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of each prompt, as wholes. Raises as `generate`."""
        if self._texts is not None:
            self.generate([])
        wanted = [self._tokens(prompt)[1] for prompt in _as_prompts(prompts)]
        for ids in wanted:
            # All that will be asked for, before anything is.
            self._job(ids, SamplingParams(max_tokens=params.max_tokens), 0)

        def generate(asked: list[list[int]], one: SamplingParams) -> list[RequestOutput]:
            outputs = self.generate(asked, one, use_tqdm=use_tqdm)
            for output in outputs:
                (sample,) = output.outputs
                if sample.finish_reason == "error":
                    raise RequestFailed(str(sample.stop_reason))
            return outputs

        return beam_search(wanted, params, self.tokenizer.eos_ids, generate, self.tokenizer.decode)

    def embed(
        self, prompts: str | Sequence[str], *, truncate_prompt_tokens: int | None = None, use_tqdm: bool = True
    ) -> list[EmbeddingRequestOutput]:
        """A vector of each text. What is too long is an error, or is cut to so many tokens (-1: what the model takes).

        Raises InvalidRequest, also where the model does something else; so do `classify` and `score`.
        """
        return self._text_model.embed(_as_texts(prompts), _cut(truncate_prompt_tokens), use_tqdm)

    def classify(
        self, prompts: str | Sequence[str], *, truncate_prompt_tokens: int | None = None, use_tqdm: bool = True
    ) -> list[ClassificationRequestOutput]:
        """The probabilities of each text's labels."""
        return self._text_model.classify(_as_texts(prompts), _cut(truncate_prompt_tokens), use_tqdm)

    def score(
        self,
        text_1: str | Sequence[str],
        text_2: str | Sequence[str],
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
    ) -> list[ScoringRequestOutput]:
        """How well texts go together, pair by pair, or one text with each of many: 1 is the best."""
        first, second = _as_texts(text_1), _as_texts(text_2)
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            problem = f"text_1 must be one text, or as many as text_2: got {len(first)} and {len(second)}"
            raise InvalidRequest(problem, "text_1")
        pairs = list(zip(first, second, strict=True))
        return self._text_model.score(pairs, _cut(truncate_prompt_tokens), use_tqdm)

    @property
    def _text_model(self) -> TextModel:
        if self._texts is None:
            raise InvalidRequest(f"{self.config.model} writes texts; LLM(..., kind='encoder') has it embed them")
        return self._texts

    def close(self) -> None:
        """Release the model's memory."""
        if self._texts is not None:
            self._texts.close()
        else:
            self.engine.close()

    def _job(self, prompt: Prompt, params: SamplingParams, priority: int) -> "_Job":
        text, ids = self._tokens(prompt)
        self._serial += 1
        wanted = params.structured_outputs
        grammar = None if wanted is None else grammar_of(wanted)
        try:
            # What is wrong with a grammar is said before anything runs.
            held = None if grammar is None else self._runner.grammars.compile(grammar)
            requests = fan_out(
                f"{self._serial}",
                ids,
                params,
                model=self.engine.info,
                eos_ids=self.tokenizer.eos_ids,
                arrival=time.monotonic(),
                priority=priority,
                grammar=grammar,
                bad_word_ids=self.tokenizer.word_ids(params.bad_words or ()),
            )
        except Unservable as error:
            raise InvalidRequest(str(error), error.field) from None
        except ValueError as error:
            raise InvalidRequest(f"structured_outputs: {error}", "structured_outputs") from None
        return _Job(self.tokenizer, text, requests, held)

    def _tokens(self, prompt: Prompt) -> tuple[str | None, list[int]]:
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

    def _run(self, jobs: "list[_Job]", use_tqdm: bool) -> list[RequestOutput]:
        routes: dict[str, tuple[_Job, int]] = {}
        for job in jobs:
            for index, request in enumerate(job.requests):
                self.engine.add(request)
                routes[request.id] = job, index
        bar = tqdm(total=len(jobs), desc="requests", disable=not use_tqdm, dynamic_ncols=True)
        made, began = 0, time.perf_counter()
        try:
            while routes:
                output = self.engine.step()
                if output is None:
                    raise RuntimeError(f"{len(routes)} requests wait, but none of them can run")
                for update in output.updates:
                    made += len(update.token_ids)
                    job, index = routes[update.id]
                    if job.take(index, update):
                        del routes[update.id]
                        if update.finish_reason is None:
                            self.engine.abort([update.id])
                        bar.update(job.output.finished)
                if use_tqdm:
                    bar.set_postfix_str(f"{made / (time.perf_counter() - began):.0f} tok/s", refresh=False)
        finally:
            self.engine.abort(routes)
            bar.close()
        return [job.output for job in jobs]


class _Job:
    """One prompt on its way to a RequestOutput."""

    def __init__(self, tokenizer: Tokenizer, prompt: str | None, requests: list[Request], grammar: object) -> None:
        first = requests[0]
        # Held, so that it need not be compiled again.
        self._grammar = grammar
        self.requests = requests
        self.output = RequestOutput(
            first.id.split("-")[0],
            prompt,
            first.prompt_ids,
            [CompletionOutput(i) for i in range(len(requests))],
            RequestMetrics(first.arrival),
        )
        self._tokenizer = tokenizer
        automaton = stop_automaton(first.params)
        self._streams = [TextStream(tokenizer, each.params, each.prompt_ids, automaton) for each in requests]
        self._unfinished = len(requests)

    def take(self, index: int, update: SequenceUpdate) -> bool:
        """Add a step's tokens to a sample; True once the sample is complete."""
        now, sample, metrics = time.monotonic(), self.output.outputs[index], self.output.metrics
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
        sample.finish_reason = delta.finish_reason.value
        failed = delta.finish_reason in (FinishReason.ERROR, FinishReason.INVALID)
        sample.stop_reason = update.detail if failed else delta.stop_reason
        self._unfinished -= 1
        if not self._unfinished:
            self.output.finished, metrics.finished = True, now
        return True

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


def _as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Tell one prompt from several: a list of numbers is one prompt."""
    if isinstance(prompts, str | dict):
        return [prompts]
    listed: list[Any] = list(prompts)
    return [listed] if listed and isinstance(listed[0], int) else listed


def _as_texts(texts: str | Sequence[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else list(texts)


def _cut(tokens: int | None) -> Cut | None:
    if tokens is None:
        return None
    if tokens < 1 and tokens != -1:
        raise InvalidRequest(f"truncate_prompt_tokens must be -1 or at least 1, got {tokens}", "truncate_prompt_tokens")
    return Cut(None if tokens == -1 else tokens)


def _one_each(value: Any, count: int, kind: type, name: str) -> Iterable[Any]:
    if isinstance(value, kind):
        return [value] * count
    values = list(value)
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} entries for {count} prompts")
    return values

"""The library: the same engine as the server's, in the calling process."""

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from chairlift.core.sequences.sampling_params import SamplingParams
from chairlift.errors import InvalidRequest, RequestFailed
from chairlift.folders.kind import is_encoder
from chairlift.hub.resolve import located
from chairlift.library.beam_search import BeamSearchParams, beam_search
from chairlift.library.loaded_model import LoadedModel, OpenOutput, Prompt
from chairlift.library.outputs import (
    BeamSearchOutput,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from chairlift.library.text_model import TextModel
from chairlift.text.encoding import Cut


class LLM:
    """A model in this process: `LLM("path/to/folder").generate(["Hello"], SamplingParams(max_tokens=32))`.

    `model` is a Hugging Face folder, or a name of the Hub, of which `revision` is a branch, tag or commit.
    Takes the fields of `SequenceConfig` by keyword: dtype, strategy, batch_size, max_wait_ms, max_num_seqs,
    max_num_batched_tokens, max_model_len, block_size, kv_cache_gb, enable_prefix_caching, seed and so on. Raises
    UnsupportedModel or ConfigError, naming what is wrong, if the model can't be loaded so. Not thread-safe.

    An encoder's folder, or with `kind="encoder"` a decoder's, is for `embed`, `classify` and `score`, and takes the
    settings that `TextModel` names.
    """

    def __init__(self, model: str | Path, *, revision: str | None = None, **settings: Any) -> None:
        self._texts: TextModel | None = None
        folder = located(str(model), revision)
        if settings.get("kind") == "encoder" or is_encoder(Path(folder)):
            self._texts = TextModel(folder, **{name: each for name, each in settings.items() if name != "kind"})
            return
        self._sequences = found = LoadedModel(folder, **settings)
        self.config, self.tokenizer, self.engine = found.config, found.tokenizer, found.engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: int | Sequence[int] = 0,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts: strings, lists of token ids, or {"prompt_token_ids": [...]} / {"prompt": "..."}.

        One SamplingParams serves all, or give one each; without any it is the model's default. Likewise `priority`.
        Results come in the prompts' order. Raises InvalidRequest before anything runs if any prompt can't be served; a
        request that fails while it runs has finish_reason "error" and leaves the others alone.
        """
        make = self.sequences.open_output
        wanted = _as_prompts(prompts)
        params = _one_each(
            sampling_params or self.get_default_sampling_params(), len(wanted), SamplingParams, "sampling_params"
        )
        priorities = _one_each(priority, len(wanted), int, "priority")
        return self._run([make(*each) for each in zip(wanted, params, priorities, strict=True)], use_tqdm)

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
        model = self.sequences
        several: list[Any] = [messages] if messages and isinstance(messages[0], dict) else messages
        prompts: list[Prompt] = []
        for one in several:
            prompt = model.tokenizer.render_chat(one, add_generation_prompt, chat_template_kwargs)
            prompts.append({"prompt": prompt.text, "prompt_token_ids": model.tokenizer.encode_chat(prompt)})
        return self.generate(prompts, sampling_params, use_tqdm=use_tqdm)

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json says of sampling, unless `generation_config` is "none"."""
        return self.sequences.default_params

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, *, use_tqdm: bool = False
    ) -> list[BeamSearchOutput]:
        """The likeliest continuations of each prompt, as wholes. Raises as `generate`."""
        wanted = [self.sequences.tokens(prompt)[1] for prompt in _as_prompts(prompts)]
        for ids in wanted:
            # All that will be asked for, before anything is.
            self.sequences.open_output(ids, SamplingParams(max_tokens=params.max_tokens))

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
    def generates(self) -> bool:
        """Whether the model writes texts; if not, it embeds, classifies or compares them."""
        return self._texts is None

    @property
    def sequences(self) -> LoadedModel:
        """The model that writes. Raises InvalidRequest if this is none."""
        if self._texts is not None:
            raise InvalidRequest(f"{self._texts.config.model} generates nothing: its task is {self._texts.info.task}")
        return self._sequences

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

    def _run(self, outputs: list[OpenOutput], use_tqdm: bool) -> list[RequestOutput]:
        # All requests of a call wait before its first step, so no batch need wait for more.
        self.engine.close_queue()
        routes: dict[str, tuple[OpenOutput, int]] = {}
        bar = tqdm(total=len(outputs), desc="requests", disable=not use_tqdm, dynamic_ncols=True)
        made, began = 0, time.perf_counter()
        try:
            for one in outputs:
                for index, request in enumerate(one.requests):
                    routes[request.id] = one, index
                    self.engine.add(request)
            while routes:
                stepped = self.engine.step()
                if stepped is None:
                    raise RuntimeError(f"{len(routes)} requests wait, but none of them can run")
                for update in stepped.updates:
                    made += len(update.token_ids)
                    one, index = routes[update.id]
                    if one.take(index, update):
                        del routes[update.id]
                        if update.finish_reason is None:
                            self.engine.abort([update.id])
                        bar.update(one.output.finished)
                if use_tqdm:
                    bar.set_postfix_str(f"{made / (time.perf_counter() - began):.0f} tok/s", refresh=False)
        finally:
            self.engine.abort(routes)
            bar.close()
        return [one.output for one in outputs]


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

"""POST /v1/completions."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from chairlift.bodies import decode
from chairlift.core.sequences.sampling_params import SamplingParams
from chairlift.core.sequences.step import TokenLogprob
from chairlift.errors import InvalidRequest
from chairlift.server.http.exchange import encode_line, in_turn, new_id, off_loop, read_body, terms_of
from chairlift.server.models.registry import models_of
from chairlift.server.models.sequence_service import Piece, Sample, SequenceService
from chairlift.server.openai.answer_form import answer_grammar
from chairlift.server.openai.answers import SequenceAnswer, id_name
from chairlift.server.openai.body_types import (
    CompletionBody,
    check_supported,
    has_form,
    limit_of,
    options_of,
    sampling_params,
)
from chairlift.text.detokenize import TextStream
from chairlift.text.tokenizer import Tokenizer

_DEFAULT_MAX_TOKENS = 16
# So many characters are tokenized in about the time in which one token is made text.
_TOKEN_CHARS = 4
# Of events.
_TEXT, _LOGPROBS, _NO_LOGPROBS, _NO_END = b'"text":', b',"logprobs":', b"null", b',"finish_reason":null}'
_decoder = msgspec.json.Decoder(CompletionBody)


async def completions(request: Request) -> Response:
    """Complete one prompt or several."""
    raw = await read_body(request)
    body = decode(raw, _decoder)
    service = models_of(request).language_model(body.model, request.scope["path"])
    service.check(body.n, body.stop, body.best_of)
    check_supported(body)
    terms = terms_of(request.scope, body.priority)
    service.check_load(terms)
    params = _params(body, service.sampling_defaults)
    async with in_turn(request, len(raw)):
        prompts = await _prompts(service, body)
    request_id = new_id("cmpl")
    nothing_wanted = limit_of(body)[1] == 0
    grammar = await answer_grammar(body, len(raw)) if has_form(body) else None
    options = options_of(body, continues=True, discard=nothing_wanted, grammar=grammar)
    if params.bad_words:
        options = options._replace(bad_word_ids=await service.bad_word_ids(params))
    samples = service.submit(request_id, prompts, params, terms, options)
    return await CompletionAnswer(service, body, params, prompts, samples, request_id).respond(request)


def _params(body: CompletionBody, defaults: Mapping[str, Any]) -> SamplingParams:
    name, max_tokens = limit_of(body)
    if max_tokens is None:
        max_tokens = _DEFAULT_MAX_TOKENS
    if max_tokens == 0:
        if not body.echo:
            raise InvalidRequest(f"{name} may be 0 only with echo", name)
        max_tokens = 1  # the least that a sequence can run; what it generates is dropped
    wanted = [each for each in (body.prompt_logprobs, body.logprobs if body.echo else None) if each is not None]
    more: dict[str, Any] = {"prompt_logprobs": max(wanted, default=None)}
    logprobs = body.logprobs
    if body.best_of is not None:
        more["n"] = body.best_of
        # By which they are compared.
        logprobs = logprobs or 0
    return sampling_params(body, defaults, max_tokens, logprobs, **more)


async def _prompts(service: SequenceService, body: CompletionBody) -> list[list[int]]:
    """All forms of `prompt` as lists of token ids."""
    prompt: list[Any] = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    kinds = {type(part) for part in prompt}
    if body.suffix and kinds != {str}:
        raise InvalidRequest("suffix needs a prompt of text", "suffix")
    if kinds == {int}:
        return [cast(list[int], prompt)]
    limit = service.config.max_prompts_per_request
    if len(prompt) > limit:
        message = f"prompt holds {len(prompt)} prompts, above this server's limit of {limit} (max_prompts_per_request)"
        raise InvalidRequest(message, "prompt")
    if kinds == {list}:
        return cast(list[list[int]], prompt)
    if kinds != {str}:
        wanted = "a string, a list of strings, a list of token ids, or a list of lists of token ids"
        raise InvalidRequest(f"prompt must be {wanted}, not {'empty' if not kinds else 'a mixture'}", "prompt")
    texts = cast(list[str], prompt)
    parse, add, suffix = bool(body.parse_special), body.add_special_tokens is not False, body.suffix
    if suffix:
        from chairlift.text.fill_in import fill_in_ids

        service.check_length([*texts, suffix])
        size = sum(map(len, texts)) + len(suffix) * len(texts)
        return await off_loop(size, lambda: [fill_in_ids(service.tokenizer, text, suffix, parse) for text in texts])
    return await off_loop(sum(map(len, texts)), lambda: service.encode(texts, parse, add))


class _Echo:
    """A prompt as text, the client's own where it sent one, and where in it each token starts."""

    def __init__(self, tokenizer: Tokenizer, prompt: str | None, ids: list[int], body: CompletionBody) -> None:
        stream = TextStream(
            tokenizer.vocabulary, SamplingParams(logprobs=0, skip_special_tokens=body.skip_special_tokens is not False)
        )
        self.text = stream.push(ids).text
        self.offsets = stream.offsets or []
        if prompt is not None and prompt != self.text:
            self.text = prompt
            self.offsets = tokenizer.starts(prompt, bool(body.parse_special), body.add_special_tokens is not False)


class LegacyLogprobs(msgspec.Struct):
    """The shape of completions: four lists of equal length. A prompt's first token has no logprob."""

    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] = []
    text_offset: list[int] = []

    def add(self, name_of: Callable[[int], str], entry: TokenLogprob, count: int, offset: int) -> None:
        """Append a token, with `count` of the likeliest alternatives and itself."""
        name = name_of(entry.token_id)
        top = {name_of(token_id): logprob for token_id, logprob in entry.top[:count]}
        self._append(name, entry.logprob, {**top, name: entry.logprob}, offset)

    def add_first(self, name: str) -> None:
        """Append the prompt's first token, which nothing precedes."""
        self._append(name, None, None, 0)

    def _append(self, name: str, logprob: float | None, top: dict[str, float] | None, offset: int) -> None:
        self.tokens.append(name)
        self.token_logprobs.append(logprob)
        self.top_logprobs.append(top)
        self.text_offset.append(offset)


def token_name(tokenizer: Tokenizer, token_id: int) -> str:
    """A token as completions name it; part of a character is written as `bytes:\\xe2\\x82`, so no two look alike."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class CompletionAnswer(SequenceAnswer):
    """A text for each sample, after its prompt if that is asked for."""

    def __init__(
        self,
        service: SequenceService,
        body: CompletionBody,
        params: SamplingParams,
        prompts: list[list[int]],
        samples: Sequence[Sample],
        request_id: str,
    ) -> None:
        super().__init__("text_completion", "text_completion", service, body, params, samples, request_id)
        self._body, self._prompts = body, prompts
        self._scores = [0.0] * len(samples) if body.best_of is not None else None
        self._echoes: dict[int, _Echo] = {}
        self._logprobs = [LegacyLogprobs() for _ in samples] if body.logprobs is not None else None

    def text(self, piece: Piece) -> str:
        """The prompt comes with the first piece."""
        if not self._body.echo or not piece.first:
            return piece.text
        return self._echo(piece.sample).text + piece.text

    def echo_size(self, group: list[Piece]) -> int:
        """The prompts of samples that begin: they are made text again, and may be tokenized once more."""
        return sum(self._prompt_size(piece.sample) for piece in group if piece.first) if self._body.echo else 0

    def keep_logprobs(self, piece: Piece) -> None:
        """Add them to the four lists, and to what samples are compared by."""
        if self._scores is not None:
            self._scores[piece.sample.index] += sum(entry.logprob for entry in piece.logprobs)
        if self._logprobs is not None:
            self._add_logprobs(self._logprobs[piece.sample.index], piece)

    def content(self, sample: Sample, text: str) -> dict[str, Any]:
        """The text and its log-probabilities."""
        logprobs = self._logprobs[sample.index] if self._logprobs is not None else None
        return {"text": text, "logprobs": logprobs} | self.prompt_logprobs(sample)

    def shown(self) -> Sequence[Sample]:
        """Of each prompt's samples the likeliest, by the mean of their tokens' log-probabilities."""
        scores = self._scores
        if scores is None:
            return self.samples
        made, shown = self.samples, 1 if self._body.n is None else self._body.n
        best: list[Sample] = []
        for start in range(0, len(made), self.n):
            group = made[start : start + self.n]
            best += sorted(group, key=lambda each: -scores[each.index] / max(each.num_tokens, 1))[:shown]
        return best

    def _name(self, token_id: int) -> str:
        return token_name(self.tokenizer, token_id) if not self.names_are_ids else id_name(token_id)

    def event(self, piece: Piece) -> bytes:
        """A piece as an event; nothing if it has nothing to say."""
        text = self.text(piece)
        if self._logprobs is None:
            if not text and piece.finish_reason is None:
                return b""
            logprobs = _NO_LOGPROBS
        else:
            entries = LegacyLogprobs()
            self._add_logprobs(entries, piece)
            logprobs = encode_line(entries)
        if piece.finish_reason is None:
            end = _NO_END
        else:
            ending = {"finish_reason": piece.finish_reason, "stop_reason": piece.sample.stop_reason}
            end = b"," + encode_line(ending)[1:]
        rest = (_TEXT, encode_line(text), _LOGPROBS, logprobs, end)
        return self.events.event(piece.sample.index, rest, self.samples, piece.num_tokens)

    def around_text(self) -> tuple[bytes, bytes] | None:
        """There is more with log-probabilities."""
        return None if self._logprobs is not None else self.events.around(_TEXT, _LOGPROBS + _NO_LOGPROBS + _NO_END)

    def _echo(self, sample: Sample) -> _Echo:
        """The sample's prompt, made when it is first asked for: by then it is known to fit the model."""
        index = sample.index // self.n
        if index not in self._echoes:
            self._echoes[index] = _Echo(self.tokenizer, self._given(index), self._prompts[index], self._body)
        return self._echoes[index]

    def _given(self, index: int) -> str | None:
        """A prompt as it was sent, if that was text."""
        given = self._body.prompt if isinstance(self._body.prompt, str) else self._body.prompt[index]
        return given if isinstance(given, str) else None

    def _prompt_size(self, sample: Sample) -> int:
        return _TOKEN_CHARS * len(sample.prompt_ids) + len(self._given(sample.index // self.n) or "")

    def _add_logprobs(self, target: LegacyLogprobs, piece: Piece) -> None:
        sample, base, count = piece.sample, 0, self._body.logprobs or 0
        if self._body.echo:
            echo = self._echo(sample)
            base = len(echo.text)
            if piece.first:
                target.add_first(self._name(sample.prompt_ids[0]))
                for entry, offset in zip(sample.prompt_logprobs, echo.offsets[1:], strict=False):
                    target.add(self._name, entry, count, offset)
        for entry, offset in zip(piece.logprobs, sample.offsets[piece.start :], strict=False):
            target.add(self._name, entry, count, base + offset)

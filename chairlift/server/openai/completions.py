"""POST /v1/completions."""

import time
from collections.abc import Sequence
from typing import Any, cast

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from chairlift.bodies import decode
from chairlift.config.server import ServerConfig
from chairlift.core.sequences.sampling import SamplingParams
from chairlift.errors import InvalidRequest
from chairlift.server.http.endpoint import terms_of
from chairlift.server.http.off_loop import off_loop
from chairlift.server.http.read_body import read_body
from chairlift.server.models.registry import Models
from chairlift.server.models.sequence_service import SequenceService, new_id
from chairlift.server.openai.body_types import CompletionBody, check_supported, sampling_params
from chairlift.server.openai.logprob_shapes import LegacyLogprobs, token_name
from chairlift.server.openai.samples import Piece, Sample, usage
from chairlift.server.openai.streaming import Events, EventStream, collect, encode, encode_line, render
from chairlift.text.output import TextStream
from chairlift.text.tokenizer import Tokenizer

_DEFAULT_MAX_TOKENS = 16
_decoder = msgspec.json.Decoder(CompletionBody)


async def completions(request: Request) -> Response:
    """Complete one prompt or several."""
    config: ServerConfig = request.app.state.config
    body = decode(await read_body(request, config.max_body_bytes, config.body_timeout_s), _decoder)
    models: Models = request.app.state.models
    service = models.llm(body.model, request.url.path)
    service.check(body)
    check_supported(body)
    terms = terms_of(request.scope)
    params = _params(body)
    prompts = await _prompts(service, body.prompt)
    request_id = new_id("cmpl")
    nothing_wanted = body.max_tokens == 0
    samples = service.submit(request_id, prompts, params, body, terms, continues=True, discard=nothing_wanted)
    answer = _CompletionAnswer(service, body, params, prompts, samples, request_id)
    if body.stream:
        return EventStream(request_id, samples, render(samples, answer.events, answer.event))
    if not await collect(request, samples, answer.keep):
        return Response(status_code=499)
    return Response(answer.whole(), headers={"X-Request-Id": request_id}, media_type="application/json")


def _params(body: CompletionBody) -> SamplingParams:
    max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    if max_tokens == 0:
        if not body.echo:
            raise InvalidRequest("max_tokens may be 0 only with echo", "max_tokens")
        max_tokens = 1  # the least that a sequence can run; what it generates is dropped
    return sampling_params(body, max_tokens, body.logprobs, body.logprobs if body.echo else None)


async def _prompts(service: SequenceService, prompt: str | list[Any]) -> list[list[int]]:
    """All forms of `prompt` as lists of token ids."""
    if isinstance(prompt, str):
        prompt = [prompt]
    kinds = {type(part) for part in prompt}
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
    return await off_loop(sum(map(len, texts)), lambda: service.tokenizer.encode_batch(texts))


class _Echo:
    """A prompt as text, and where in it each token starts."""

    def __init__(self, tokenizer: Tokenizer, prompt: str | None, ids: list[int]) -> None:
        stream = TextStream(tokenizer, SamplingParams(logprobs=0))
        text = stream.push(ids).text
        self.text = text if prompt is None else prompt
        self.offsets = stream.offsets or []


class _CompletionAnswer:
    """Puts pieces together, as events or as one document."""

    def __init__(
        self,
        service: SequenceService,
        body: CompletionBody,
        params: SamplingParams,
        prompts: list[list[int]],
        samples: Sequence[Sample],
        request_id: str,
    ) -> None:
        created = int(time.time())
        self.events = Events(
            request_id,
            "text_completion",
            created,
            service.name,
            params.n,
            body.stream_options if body.stream else None,
        )
        self._about = {"id": request_id, "object": "text_completion", "created": created, "model": service.name}
        self._tokenizer = service.tokenizer
        self._samples = samples
        self._n = params.n
        self._body, self._prompts = body, prompts
        self._echoes: dict[int, _Echo] = {}
        self._logprobs = [LegacyLogprobs() for _ in samples] if body.logprobs is not None else None
        self._texts: list[list[str]] = [[] for _ in samples]

    def keep(self, piece: Piece) -> None:
        """Store a piece for the document."""
        index = piece.sample.index
        self._texts[index].append(self._text(piece))
        if self._logprobs is not None:
            self._add_logprobs(self._logprobs[index], piece)

    def whole(self) -> bytes:
        """The document."""
        choices = [
            {
                "index": sample.index,
                "text": "".join(self._texts[sample.index]),
                "logprobs": self._logprobs[sample.index] if self._logprobs is not None else None,
                "finish_reason": sample.finish_reason,
                "stop_reason": sample.stop_reason,
            }
            for sample in self._samples
        ]
        return encode(self._about | {"choices": choices, "usage": usage(self._samples, self._n)})

    def event(self, piece: Piece) -> bytes:
        """A piece as an event; nothing if it has nothing to say."""
        text = self._text(piece)
        if self._logprobs is None:
            if not text and piece.finish_reason is None:
                return b""
            logprobs = b"null"
        else:
            entries = LegacyLogprobs()
            self._add_logprobs(entries, piece)
            logprobs = encode_line(entries)
        if piece.finish_reason is None:
            end = b',"finish_reason":null}'
        else:
            ending = {"finish_reason": piece.finish_reason, "stop_reason": piece.sample.stop_reason}
            end = b"," + encode_line(ending)[1:]
        rest = b"".join((b'"text":', encode_line(text), b',"logprobs":', logprobs, end))
        return self.events.event(piece.sample.index, rest, self._samples)

    def _echo(self, sample: Sample) -> _Echo:
        """The sample's prompt, made when it is first asked for: by then it is known to fit the model."""
        index = sample.index // self._n
        if index not in self._echoes:
            given = self._body.prompt if isinstance(self._body.prompt, str) else self._body.prompt[index]
            text = given if isinstance(given, str) else None
            self._echoes[index] = _Echo(self._tokenizer, text, self._prompts[index])
        return self._echoes[index]

    def _text(self, piece: Piece) -> str:
        if not self._body.echo or not piece.first:
            return piece.text
        return self._echo(piece.sample).text + piece.text

    def _add_logprobs(self, target: LegacyLogprobs, piece: Piece) -> None:
        sample, base = piece.sample, 0
        if self._body.echo:
            echo = self._echo(sample)
            base = len(echo.text)
            if piece.first:
                target.add_first(token_name(self._tokenizer, sample.prompt_ids[0]))
                for entry, offset in zip(sample.prompt_logprobs, echo.offsets[1:], strict=False):
                    target.add(self._tokenizer, entry, offset)
        for entry, offset in zip(piece.logprobs, sample.offsets[piece.start :], strict=False):
            target.add(self._tokenizer, entry, base + offset)

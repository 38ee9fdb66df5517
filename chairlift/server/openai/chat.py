"""POST /v1/chat/completions."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from chairlift.bodies import decode
from chairlift.core.sequences.sampling_params import MAX_LOGPROBS, SamplingParams
from chairlift.core.sequences.step import TokenLogprob
from chairlift.errors import InvalidRequest
from chairlift.server.conversations.conversation import Conversation, Tool, ToolChoice, open_conversation
from chairlift.server.conversations.reply_steps import reasoning_tokens
from chairlift.server.http.exchange import encode_line, in_turn, new_id, read_body, terms_of
from chairlift.server.models.registry import models_of
from chairlift.server.models.sequence_service import Piece, Sample, SequenceService
from chairlift.server.openai.answer_form import answer_grammar
from chairlift.server.openai.answers import SequenceAnswer, named_logprobs
from chairlift.server.openai.body_types import (
    ChatBody,
    ToolBody,
    ToolChoiceBody,
    check_supported,
    has_form,
    limit_of,
    options_of,
    sampling_params,
)
from chairlift.text.reply import CallPart, ContentPart, ReasoningPart, ReplyPart, ReplyReader

# A role is put between a template's own special tokens, so it must not be made to end or begin one.
_ROLE = re.compile(r"[\w .-]{1,64}")
_decoder = msgspec.json.Decoder(ChatBody)
# Of events.
_DELTA, _CONTENT, _LOGPROBS, _NO_END = b'"delta":', b'{"content":', b',"logprobs":', b'"finish_reason":null}'


async def chat_completions(request: Request) -> Response:
    """Answer a conversation."""
    raw = await read_body(request)
    body = decode(raw, _decoder)
    service = models_of(request).language_model(body.model, request.scope["path"])
    service.check(body.n, body.stop)
    check_supported(body)
    terms = terms_of(request.scope, body.priority)
    service.check_load(terms)
    params = _params(body, service.sampling_defaults)
    check_messages(body.messages)
    async with in_turn(request, len(raw)):
        grammar = await answer_grammar(body, len(raw)) if has_form(body) else None
        opened = await open_conversation(service, _conversation(body, len(raw), grammar))
    request_id = new_id("chatcmpl")
    continues = bool(body.continue_final_message)
    options = options_of(body, continues=continues, grammar=opened.grammar)._replace(shown=opened.shown)
    if params.bad_words:
        options = options._replace(bad_word_ids=await service.bad_word_ids(params))
    samples = service.submit(request_id, [opened.prompt_ids], params, terms, options)
    return await ChatAnswer(service, body, params, samples, request_id, opened.make_reader).respond(request)


def _params(body: ChatBody, defaults: Mapping[str, Any]) -> SamplingParams:
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs to be true", "top_logprobs")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_LOGPROBS:
        message = f"top_logprobs must be between 0 and {MAX_LOGPROBS}, got {body.top_logprobs}"
        raise InvalidRequest(message, "top_logprobs")
    return sampling_params(body, defaults, limit_of(body)[1], logprobs)


def text_of(content: Any) -> str:
    """A message's text, whatever form its content has."""
    if isinstance(content, list):
        return "".join(part[part["type"]] for part in content)
    return content if isinstance(content, str) else ""


def check_messages(messages: list[dict[str, Any]]) -> None:
    """Refuse a chat without messages, and roles that could be more than that. Raises InvalidRequest."""
    if not messages:
        raise InvalidRequest("messages must hold at least one message", "messages")
    for index, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise InvalidRequest(f"messages[{index}] needs a string 'role'", f"messages[{index}].role")
        if _ROLE.fullmatch(message["role"]) is None:
            wanted = "must be 1 to 64 letters, digits, spaces, '_', '.' or '-'"
            raise InvalidRequest(f"messages[{index}].role {wanted}", f"messages[{index}].role")


def _conversation(body: ChatBody, size: int, grammar: str | None) -> Conversation:
    continues = bool(body.continue_final_message)
    if continues and body.add_generation_prompt:
        problem = "continue_final_message and add_generation_prompt exclude each other; leave one out"
        raise InvalidRequest(problem, "continue_final_message")
    tools, choice = _chosen_tools(body)
    generation = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    return Conversation(
        messages=body.messages,
        size=size,
        tools=tools,
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        reasoning_effort=body.reasoning_effort,
        thinking=body.enable_thinking,
        thinking_tokens=body.thinking_token_budget,
        add_generation_prompt=generation,
        continue_final_message=continues,
        grammar=grammar,
        template_arguments=body.chat_template_kwargs or {},
    )


def tools_of(given: Sequence[ToolBody] | None) -> list[Tool]:
    """The tools of a body."""
    functions = [each.function for each in given or ()]
    return [
        Tool(name=each.name, description=each.description, parameters=each.parameters, strict=bool(each.strict))
        for each in functions
    ]


def _chosen_tools(body: ChatBody) -> tuple[list[Tool], ToolChoice]:
    """The tools that are left, and whether one must be called. Raises InvalidRequest."""
    tools, choice = tools_of(body.tools), body.tool_choice
    if not isinstance(choice, ToolChoiceBody):
        return tools, ToolChoice(choice or "auto")
    function, allowed = choice.function, choice.allowed_tools
    if (function if choice.type == "function" else allowed) is None or (function and allowed):
        field = "function" if choice.type == "function" else "allowed_tools"
        problem = f"tool_choice of type {choice.type!r} takes the field {field}, and no other"
        raise InvalidRequest(problem, f"tool_choice.{field}")
    if allowed is None:
        return tools, ToolChoice("required", function.name if function else None)
    names = {tool.name for tool in tools}
    for index, each in enumerate(allowed.tools):
        if each.function.name not in names:
            where = f"tool_choice.allowed_tools.tools[{index}].function.name"
            raise InvalidRequest(f"{where} {each.function.name[:80]!r} is none of the tools", where)
    chosen = {each.function.name for each in allowed.tools}
    return [tool for tool in tools if tool.name in chosen], ToolChoice(allowed.mode)


class _Message:
    """One sample's message, as a reader takes it apart."""

    def __init__(self, reader: ReplyReader) -> None:
        self._reader = reader
        self._calls = 0
        self.reasoning: list[str] = []

    def deltas(self, text: str, last: bool) -> list[dict[str, Any]]:
        """What a piece of text adds; `last` says that it is the last."""
        parts = self._reader.push(text) + (self._reader.finish() if last else [])
        return [self._delta(part) for part in parts]

    def whole(self, text: str, before: str) -> dict[str, Any]:
        """The message that a text is, with what goes before its content."""
        content = [before]
        calls: list[dict[str, Any]] = []
        for part in self._reader.push(text) + self._reader.finish():
            if isinstance(part, ContentPart):
                content.append(part.text)
            elif isinstance(part, ReasoningPart):
                self.reasoning.append(part.text)
            elif isinstance(part, CallPart):
                calls.append(self._begun(part))
            else:
                calls[part.index]["function"]["arguments"] += part.text
        message: dict[str, Any] = {"role": "assistant", "content": "".join(content), "refusal": None}
        if self.reasoning:
            message["reasoning_content"] = "".join(self.reasoning)
        if calls:
            message |= {"content": message["content"] or None, "tool_calls": calls}
        return message

    def _delta(self, part: ReplyPart) -> dict[str, Any]:
        if isinstance(part, ContentPart):
            return {"content": part.text}
        if isinstance(part, ReasoningPart):
            self.reasoning.append(part.text)
            return {"reasoning_content": part.text}
        if isinstance(part, CallPart):
            return {"tool_calls": [{"index": part.index, **self._begun(part)}]}
        return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}

    @property
    def has_called(self) -> bool:
        """Whether there are calls, the last of which came to its end: a client's stop may be in the midst of one."""
        return self._calls > 0 and not self._reader.in_call

    def _begun(self, part: CallPart) -> dict[str, Any]:
        self._calls += 1
        return {
            "id": new_id("call").replace("-", "_"),
            "type": "function",
            "function": {"name": part.name, "arguments": ""},
        }


def _merged(deltas: list[dict[str, Any]]) -> dict[str, Any]:
    """Several deltas as one."""
    whole: dict[str, Any] = {}
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        for key in ("content", "reasoning_content"):
            if key in delta:
                whole[key] = whole.get(key, "") + delta[key]
        for call in delta.get("tool_calls", ()):
            known = calls.setdefault(call["index"], call)
            if known is not call:
                known["function"]["arguments"] += call["function"]["arguments"]
    return whole | {"tool_calls": list(calls.values())} if calls else whole


class ChatAnswer(SequenceAnswer):
    """A message for each sample."""

    def __init__(
        self,
        service: SequenceService,
        body: ChatBody,
        params: SamplingParams,
        samples: Sequence[Sample],
        request_id: str,
        make_reader: Callable[[], ReplyReader] | None,
    ) -> None:
        super().__init__("chat.completion", "chat.completion.chunk", service, body, params, samples, request_id)
        self._service = service
        self._messages = None if make_reader is None else [_Message(make_reader()) for _ in samples]
        self._logprobs: list[list[TokenLogprob]] | None = [[] for _ in samples] if body.logprobs else None
        last = body.messages[-1]
        echoes = body.echo and last["role"] == "assistant"
        self._echo = text_of(last.get("content") or last.get("refusal")) if echoes else ""

    def echo_size(self, group: list[Piece]) -> int:
        """The last message, for each sample that begins."""
        return len(self._echo) * sum(piece.first for piece in group)

    def keep_logprobs(self, piece: Piece) -> None:
        """Keep them as they are."""
        if self._logprobs is not None:
            self._logprobs[piece.sample.index] += piece.logprobs

    def content(self, sample: Sample, text: str) -> dict[str, Any]:
        """The message and its log-probabilities."""
        message: dict[str, Any] = {"role": "assistant", "content": self._echo + text, "refusal": None}
        if self._messages is not None:
            message = self._messages[sample.index].whole(text, self._echo)
        return {
            "message": message,
            "logprobs": self._shape(self._logprobs[sample.index]) if self._logprobs is not None else None,
        }

    def beside(self) -> dict[str, Any]:
        """The prompt's log-probabilities, which all choices share."""
        return self.prompt_logprobs(self.samples[0])

    def event(self, piece: Piece) -> bytes:
        """The role before the first piece, the text if there is any, and how it ended."""
        index, events, made = piece.sample.index, self.events, b""
        if piece.first:
            role = b'"delta":{"role":"assistant","content":%b},"logprobs":null,"finish_reason":null}'
            made = events.event(index, (role % encode_line(self._echo),), self.samples, 0)
        # First, as they tell how it ended.
        deltas = self._deltas(piece)
        end = _NO_END
        if piece.finish_reason is not None:
            reason = self.finish_reason(piece.sample)
            end = encode_line({"finish_reason": reason, "stop_reason": piece.sample.stop_reason})[1:]
        # Where events count up, no two of them may come of the same tokens.
        apart = piece.finish_reason is not None and not events.continuous
        logprobs = encode_line(self._shape(piece.logprobs)) if self._logprobs is not None else b"null"
        for delta in deltas:
            parts = (_DELTA, delta, _LOGPROBS, logprobs, b",", _NO_END if apart else end)
            made += events.event(index, parts, self.samples, piece.num_tokens)
            logprobs = b"null"
        if piece.finish_reason is not None and (apart or not deltas):
            made += events.event(index, (b'"delta":{},"logprobs":null,', end), self.samples, piece.num_tokens)
        return made

    def around_text(self) -> tuple[bytes, bytes] | None:
        """There may be more where a message is read by parts, or has log-probabilities."""
        if self._messages is not None or self._logprobs is not None:
            return None
        return self.events.around(_DELTA + _CONTENT, b"}" + _LOGPROBS + b"null," + _NO_END)

    async def reasoning_tokens(self) -> int | None:
        """Those of all messages, where they are read by parts."""
        if self._messages is None:
            return None
        pairs = zip(self._messages, self.samples, strict=True)
        return sum([await reasoning_tokens(self._service, each.reasoning, sample) for each, sample in pairs])

    def finish_reason(self, sample: Sample) -> str | None:
        """How a sample ended; one that calls tools, and is not cut off, ends by that."""
        called = self._messages is not None and self._messages[sample.index].has_called
        return "tool_calls" if called and sample.finish_reason == "stop" else sample.finish_reason

    def _deltas(self, piece: Piece) -> list[bytes]:
        """What a piece adds to the message; with log-probabilities there is one delta at least."""
        if self._messages is None:
            written = bool(piece.text or piece.logprobs)
            return [_CONTENT + encode_line(piece.text) + b"}"] if written else []
        deltas = self._messages[piece.sample.index].deltas(piece.text, piece.finish_reason is not None)
        if self.events.continuous and len(deltas) > 1:
            deltas = [_merged(deltas)]
        return list(map(encode_line, deltas)) or ([b"{}"] if piece.logprobs else [])

    def _shape(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Log-probabilities as chat completions have them."""
        return {"content": named_logprobs(self.tokenizer, entries, self.names_are_ids), "refusal": None}

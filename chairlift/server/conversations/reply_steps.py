"""A conversation with one reply: opened in the words of its protocol, and then the reply's parts, step by step."""

import contextlib
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import NamedTuple

from chairlift.core.sequences.step import TokenLogprob
from chairlift.errors import InvalidRequest
from chairlift.server.conversations.at_once import at_once
from chairlift.server.conversations.conversation import Conversation, OpenConversation, open_conversation
from chairlift.server.http.exchange import off_loop
from chairlift.server.http.part_writer import PartWriter
from chairlift.server.models.sequence_service import Piece, Sample, SequenceOptions, SequenceService, pieces
from chairlift.text.reply import ContentPart, ReplyPart


async def open_named(
    service: SequenceService, conversation: Conversation, names: Mapping[str, str]
) -> OpenConversation:
    """Open a conversation. What it refuses is named as its client names it: `names` has the chat's name for each."""
    try:
        return await open_conversation(service, conversation)
    except InvalidRequest as error:
        chats, own = next((each for each in names.items() if (error.param or "").startswith(each[0])), ("", ""))
        param = error.param and error.param.replace(chats, own, 1).replace(".function.", ".")
        message = str(error).replace(chats, own, 1).replace("].function.", "].")
        raise InvalidRequest(message, param, error.code) from None


def reply_options(
    opened: OpenConversation,
    streams: bool,
    cache_salt: str | None = None,
    use_prefix_cache: bool = True,
    continues: bool = False,
) -> SequenceOptions:
    """What a reply wants beside tokens and terms."""
    return SequenceOptions(
        continues=continues,
        streams=streams,
        cache_salt=cache_salt or "",
        use_prefix_cache=use_prefix_cache,
        grammar=opened.grammar,
        shown=opened.shown,
    )


class EarlyParts(NamedTuple):
    """Where parts before the end may be written as they come, and what is made of them."""

    writer: PartWriter | None
    render: Callable[[list[ReplyPart]], bytes]


async def reply_steps(
    sample: Sample,
    opened: OpenConversation,
    logprobs: list[TokenLogprob] | None = None,
    early: EarlyParts | None = None,
    streams: bool = False,
) -> AsyncGenerator[list[ReplyPart], None]:
    """What each step adds to the reply; nothing where a step adds no text.

    `logprobs` gets those of its tokens before. The sample has its `finish_reason` with the last of them, and none if it
    was cancelled. Those before that may be written `early`, and are not given then. Whether a client `streams` it is
    for `pieces`. Raises as that.
    """
    reading = _Reading(opened, logprobs)
    written = None
    if early is not None:
        render = early.render
        written = at_once([sample], early.writer, lambda group: render(reading.parts(group)))
    async with contextlib.aclosing(pieces([sample], written, streams)) as groups:
        async for group in groups:
            yield reading.parts(group)


class _Reading:
    """Takes the parts of a reply out of its text, and notes its log-probabilities."""

    def __init__(self, opened: OpenConversation, logprobs: list[TokenLogprob] | None) -> None:
        self._reader = opened.make_reader() if opened.make_reader is not None else None
        self._logprobs = logprobs
        self._place = 0

    def parts(self, group: list[Piece]) -> list[ReplyPart]:
        found: list[ReplyPart] = []
        for piece in group:
            if self._logprobs is not None:
                self._logprobs += piece.logprobs
            if self._reader is not None:
                found += self._reader.push(piece.text)
                found += self._reader.finish() if piece.finish_reason is not None else ()
            elif piece.text:
                found.append(ContentPart(piece.text, self._place))
                self._place += len(piece.text)
        return found


async def reasoning_tokens(service: SequenceService, thoughts: list[str], sample: Sample) -> int:
    """About how many of a sample's tokens are its reasoning: those of its text."""
    text = "".join(thoughts)
    if not text:
        return 0
    ids = await off_loop(len(text), lambda: service.tokenizer.encode(text, add_special_tokens=False))
    return min(len(ids), sample.num_tokens)

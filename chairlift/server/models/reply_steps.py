"""A conversation with one reply: opened in the words of its protocol, and then the reply's parts, step by step."""

import contextlib
from collections.abc import AsyncGenerator, Mapping

from chairlift.core.sequences.request import TokenLogprob
from chairlift.errors import InvalidRequest
from chairlift.server.http.exchange import off_loop
from chairlift.server.models.conversation import Conversation, OpenConversation, open_conversation
from chairlift.server.models.sequence_service import Sample, SequenceOptions, SequenceService, pieces
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


async def reply_steps(
    sample: Sample, opened: OpenConversation, logprobs: list[TokenLogprob] | None = None
) -> AsyncGenerator[list[ReplyPart], None]:
    """What each step adds to the reply; nothing where a step adds no text.

    `logprobs` gets those of its tokens before. The sample has its `finish_reason` with the last of them, and none if it
    was cancelled. Raises as `pieces`.
    """
    reader = opened.make_reader() if opened.make_reader is not None else None
    place = 0
    async with contextlib.aclosing(pieces([sample])) as groups:
        async for group in groups:
            parts: list[ReplyPart] = []
            for piece in group:
                if logprobs is not None:
                    logprobs += piece.logprobs
                if reader is not None:
                    parts += reader.push(piece.text)
                    parts += reader.finish() if piece.finish_reason is not None else ()
                elif piece.text:
                    parts.append(ContentPart(piece.text, place))
                    place += len(piece.text)
            yield parts


async def reasoning_tokens(service: SequenceService, thoughts: list[str], sample: Sample) -> int:
    """About how many of a sample's tokens are its reasoning: those of its text."""
    text = "".join(thoughts)
    if not text:
        return 0
    ids = await off_loop(len(text), lambda: service.tokenizer.encode(text, add_special_tokens=False))
    return min(len(ids), sample.num_tokens)

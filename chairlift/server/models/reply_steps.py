"""One sample as the parts of a reply, step by step, whatever protocol they go out by."""

import contextlib
from collections.abc import AsyncGenerator

from chairlift.server.http.exchange import off_loop
from chairlift.server.models.conversation import OpenConversation
from chairlift.server.models.sequence_service import Sample, SequenceService, pieces
from chairlift.text.reply import ContentPart, ReasoningPart, ReplyPart


async def reply_steps(sample: Sample, opened: OpenConversation) -> AsyncGenerator[list[ReplyPart], None]:
    """What each step adds to the reply; nothing where a step adds no text.

    The sample has its `finish_reason` with the last of them, and none if it was cancelled. Raises as `pieces`.
    """
    reader = opened.make_reader() if opened.make_reader is not None else None
    async with contextlib.aclosing(pieces([sample])) as groups:
        async for group in groups:
            parts: list[ReplyPart] = []
            for piece in group:
                if reader is not None:
                    parts += reader.push(piece.text)
                    parts += reader.finish() if piece.finish_reason is not None else ()
                elif piece.text:
                    parts.append(ContentPart(piece.text))
            yield parts


async def reasoning_tokens(service: SequenceService, parts: list[ReasoningPart], sample: Sample) -> int:
    """About how many of a sample's tokens are its reasoning: those of its text."""
    text = "".join(part.text for part in parts)
    if not text:
        return 0
    ids = await off_loop(len(text), lambda: service.tokenizer.encode(text, add_special_tokens=False))
    return min(len(ids), sample.num_tokens)

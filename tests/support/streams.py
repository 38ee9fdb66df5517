"""What comes for one sequence, update by update."""

from collections.abc import AsyncGenerator

from chairlift.engine.sequences.client import Stream
from chairlift.engine.sequences.messages import SequenceUpdate
from chairlift.engine.sequences.updates import Updates


async def updates_of(stream: Stream) -> AsyncGenerator[SequenceUpdate, None]:
    async for group in Updates([stream]):
        for _, update in group:
            yield update


async def num_tokens(stream: Stream) -> int:
    """How many tokens it is given until it ends."""
    return sum([len(update.token_ids) async for update in updates_of(stream)])

"""Conversations that are too long for the model, without their beginning."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from chairlift.core.sequences.request import Unservable, check_fits
from chairlift.errors import InvalidRequest
from chairlift.server.conversations.conversation import Conversation, OpenConversation
from chairlift.server.conversations.reply_steps import open_named
from chairlift.server.http.api_errors import ApiError
from chairlift.server.http.exchange import off_loop
from chairlift.server.models.sequence_service import SequenceService
from chairlift.server.responses.input_items import messages_of
from chairlift.server.responses.response_body import ResponseItem

# How a chat's fields are named here.
NAMES = {"reasoning_effort": "reasoning.effort"}
# Where a client does not say how long the answer may be, what is cut leaves a part of the context to it: one in so many
# tokens.
_LEFT = 4
_TOO_LONG = "context_length_exceeded"


class Truncation(NamedTuple):
    """A conversation of items after instructions, whose oldest items are left out until the rest fits.

    What is left begins with what somebody other than the model says, if that can be, and has no output of a call that
    is left out.
    """

    service: SequenceService
    conversation: Conversation
    instructions: str | None
    items: list[ResponseItem]

    async def open(self, max_tokens: int | None) -> OpenConversation:
        """Open the longest that leaves room for so many tokens. Raises as `open_conversation`."""
        whole, info = await self._try(0, max_tokens or 1), self.service.client.info
        if whole is not None or info is None:
            return whole or await self._open(0)
        left = max_tokens or info.max_model_len // _LEFT
        said = [i for i, item in enumerate(self.items) if item["type"] == "message" and item["role"] != "assistant"]
        last = said[-1] if said else -1
        # What begins with an output begins without its call, and would lose the output too.
        rest = [i for i in range(last + 1, len(self.items)) if self.items[i]["type"] != "function_call_output"]
        for places in (said, rest):
            if (found := await self._longest(places, left)) is not None:
                return found
        # Not even the shortest fits, which is for others to say.
        return await self._open((rest or said)[-1])

    async def _longest(self, places: Sequence[int], left: int) -> OpenConversation | None:
        """Of the conversations that begin at these places the longest that fits; None if none does."""
        found, low, high = None, 0, len(places)
        while low < high:
            middle = (low + high) // 2
            tried = await self._try(places[middle], left)
            if tried is None:
                low = middle + 1
            else:
                found, high = tried, middle
        return found

    async def _try(self, start: int, left: int) -> OpenConversation | None:
        """Open what begins there; None if it is too long."""
        try:
            opened = await self._open(start)
            if (info := self.service.client.info) is not None:
                limits = {"num_blocks": info.num_blocks, "block_size": info.block_size}
                check_fits(len(opened.prompt_ids), left, max_model_len=info.max_model_len, **limits)
        except Unservable:
            return None
        except ApiError as error:
            if error.body.code != _TOO_LONG:
                raise
            return None
        except InvalidRequest as error:
            if error.code != _TOO_LONG:
                raise
            return None
        return opened

    async def _open(self, start: int) -> OpenConversation:
        def make() -> list[dict[str, Any]]:
            return messages_of(self.instructions, _without_orphans(self.items[start:]))

        messages = await off_loop(self.conversation.size, make)
        return await open_named(self.service, msgspec.structs.replace(self.conversation, messages=messages), NAMES)


def _without_orphans(items: list[ResponseItem]) -> list[ResponseItem]:
    """Items without the outputs of calls that are not among them."""
    calls: set[str] = set()
    kept = []
    for item in items:
        if item["type"] == "function_call":
            calls.add(item["call_id"])
        if item["type"] != "function_call_output" or item["call_id"] in calls:
            kept.append(item)
    return kept

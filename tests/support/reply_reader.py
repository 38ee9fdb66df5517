"""A reader of replies for tests: `~` goes in and out of reasoning, `@name|arguments@` is a call; and of events."""

import json
from typing import Any

import msgspec
import pytest
from support.server_harness import Front

from chairlift.server.conversations import reply_steps
from chairlift.server.conversations.conversation import Conversation, OpenConversation, check_tools, open_conversation
from chairlift.server.models.sequence_service import SequenceService
from chairlift.text.dialect import Region
from chairlift.text.dialects import DIALECTS
from chairlift.text.model_dialect import ModelDialect
from chairlift.text.reply import ArgumentsPart, CallPart, ContentPart, ReasoningPart, ReplyPart
from chairlift.text.reply_reader import DialectMarkers

# What a model says that thinks first and writes its calls as Hermes does.
HERMES_REPLY = '<think>\nso\n</think>\n\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'


def speaking(front: Front) -> Front:
    """The front of a model that speaks so."""
    think = Region(("<think>",), ("</think>",))
    dialect = msgspec.structs.replace(DIALECTS["hermes"], reasoning_content=think)
    front.service.model_dialect = ModelDialect(dialect=dialect, takes_tools=True, markers=DialectMarkers(dialect, {}))
    return front


class MarkedReader:
    """Takes text apart at its marks, a character at a time."""

    def __init__(self) -> None:
        self._state, self._name, self._calls = "content", "", 0

    def push(self, text: str) -> list[ReplyPart]:
        found: list[ReplyPart] = []
        for character in text:
            found += self._take(character)
        return found

    def finish(self) -> list[ReplyPart]:
        return []

    def _take(self, character: str) -> list[ReplyPart]:
        match self._state, character:
            case "content", "~":
                self._state = "reasoning"
            case "content", "@":
                self._state, self._name = "name", ""
            case "name", "|":
                self._state, self._calls = "arguments", self._calls + 1
                return [CallPart(self._calls - 1, self._name)]
            case ("reasoning", "~") | ("arguments", "@"):
                self._state = "content"
            case "content", _:
                return [ContentPart(character)]
            case "reasoning", _:
                return [ReasoningPart(character)]
            case "arguments", _:
                return [ArgumentsPart(self._calls - 1, character)]
            case _:
                self._name += character
        return []


class Marked:
    """What the routes opened while `open_conversation` was stood in for: any tools, and replies with marks."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.opened: list[Conversation] = []
        patch.setattr(reply_steps, "open_conversation", self._open)

    async def _open(self, service: SequenceService, conversation: Conversation) -> OpenConversation:
        self.opened.append(conversation)
        check_tools(conversation)
        bare = Conversation(messages=conversation.messages, size=conversation.size)
        opened = await open_conversation(service, bare)
        return OpenConversation(opened.prompt_ids, conversation.grammar, MarkedReader)


def events_of(body: bytes) -> list[dict[str, Any]]:
    """Server-sent events, each of which must be named as its type is."""
    found = []
    for block in body.decode().split("\n\n"):
        if block:
            name, data = block.split("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    return found

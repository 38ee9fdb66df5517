"""Replies read as they come."""

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

from chairlift.text.dialect import Dialect
from chairlift.text.reply import ArgumentsPart, CallPart, ContentPart, ReasoningPart
from chairlift.text.reply_reader import DialectMarkers, DialectReader

Read = tuple[str, str, list[tuple[str, str]]]


def read_reply(
    dialect: Dialect,
    text: str,
    cuts: Iterable[int] = (),
    *,
    tools: dict[str, dict[str, Any]],
    opened: bool = False,
    bounded: bool = False,
    continues: bool = False,
    parallel: bool = True,
) -> Read:
    """Content, reasoning, and calls with their arguments, of a text that comes in pieces."""
    markers = DialectMarkers(dialect, tools)
    reader = DialectReader(markers, opened, bounded, continues=continues, parallel=parallel)
    places = [0, *sorted(cuts), len(text)]
    parts = [part for start, end in pairwise(places) for part in reader.push(text[start:end])]
    content, reasoning, calls = "", "", list[tuple[str, str]]()
    for part in parts + reader.finish():
        match part:
            case ContentPart(more):
                content += more
            case ReasoningPart(more):
                reasoning += more
            case CallPart(index, called):
                assert index == len(calls)
                calls.append((called, ""))
            case ArgumentsPart(index, more):
                assert index == len(calls) - 1
                calls[index] = (calls[index][0], calls[index][1] + more)
    return content, reasoning, calls

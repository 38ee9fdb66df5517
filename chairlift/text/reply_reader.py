"""Takes a reply apart by its dialect, as it comes: reasoning, answer, calls."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from chairlift.text.arguments import Scanner, arguments_json, make_scanner
from chairlift.text.dialect import MAYBE, CallForm, Dialect, Found, Marker, Region
from chairlift.text.reply import ArgumentsPart, CallPart, ContentPart, ReasoningPart, ReplyPart
from chairlift.text.schemas import SchemaTypes, joined

# Characters that are read once more, of what began like calls and was none. After so many, further ones are text.
_MOST_AGAIN = 2**18
# What may end reasoning and is not of it: white space, and what is left of a character whose last bytes are missing.
_CUT_OFF = "".join(filter(str.isspace, map(chr, range(0x3001)))) + "\ufffd"


class _Head(NamedTuple):
    """A marker that opens something: a call of a form, or reasoning, or the answer; or that ends it."""

    marker: Marker
    kind: str
    form: CallForm | None = None


class _CallMarkers(NamedTuple):
    """The markers of a form of calls: how a further one begins, and how one and how all of them end."""

    next: Marker | None
    closes: tuple[Marker, ...]
    end: Marker | None


def _heads(markers: Sequence[str], kind: str) -> list[_Head]:
    return [_Head(Marker(each), kind) for each in markers]


class _Watch:
    """The heads that are looked for, and a pattern of their first letters."""

    def __init__(self, heads: Sequence[_Head]) -> None:
        self.heads = tuple(heads)
        letters = "".join(sorted({re.escape(head.marker.first) for head in heads}))
        self.first = re.compile(f"[{letters}]" if letters else "(?!)")


class DialectMarkers:
    """All markers of a dialect, made once for the readers of a conversation.

    Without tools what looks like a call is the answer's text. `tools` are the schemas of arguments by name.
    """

    def __init__(self, dialect: Dialect, tools: dict[str, dict[str, Any]]) -> None:
        # Tags are read one by one, each by its own schema.
        tagged = any(form.tags is not None for form in dialect.tool_calls)
        self.tools = {name: SchemaTypes(joined(schema, schema) if tagged else schema) for name, schema in tools.items()}
        self.forms: dict[CallForm, _CallMarkers] = {}
        calls: list[_Head] = []
        for form in dialect.tool_calls if tools else ():
            named = form.named + ("{" if form.notation == "json" else "")
            calls.append(_Head(Marker(form.begin + form.open, named), "call", form))
            again = None if form.separator is None else Marker(form.separator + form.open, named)
            end = Marker(form.end) if form.end.strip() else None
            self.forms[form] = _CallMarkers(again, tuple(map(Marker, form.close)), end)
        nothing = Region((), ())
        reasoning, content = dialect.reasoning_content or nothing, dialect.content or nothing
        wrapper = dialect.wrapper or nothing
        self.wraps = dialect.wrapper is not None
        thoughts, answers = _heads(reasoning.open, "reasoning"), _heads(content.open, "content")
        anywhere = [head for head in calls if head.form is not None and head.form.anywhere]
        # Within an answer its wrapper's first marker is text.
        self.first = _Watch(thoughts + answers + _heads(wrapper.open, "wrapped") + calls)
        # Text that is in no markers is followed by no reasoning.
        self.later = _Watch((thoughts if answers else []) + answers + anywhere)
        self.closes = {
            "reasoning": _Watch(_heads(reasoning.close, "between")),
            "content": _Watch(_heads(content.close, "between")),
            "wrapped": _Watch(_heads(wrapper.close, "between") + anywhere),
        }


class DialectReader:
    """Reads one reply of a dialect; `reasoning` says that the prompt has opened it, `bounded` that a budget may end it.
    With `continues` the prompt has begun the answer. Unless calls may be `parallel`, those after the first are text.

    What is found depends on the text alone, not on how it is cut: as long as it is not certain whether something is a
    marker, it is held back. White space between parts is of none, nor is the beginning of a character within which a
    budget has ended: it counts tokens, and characters may have several. What looks like a call and is none, by its name
    or its arguments, is the answer's text.
    """

    def __init__(
        self,
        markers: DialectMarkers,
        reasoning: bool,
        bounded: bool = False,
        *,
        continues: bool = False,
        parallel: bool = True,
    ) -> None:
        self._markers = markers
        self._bounded = bounded
        self._parallel = parallel
        self._text = ""
        self._at = 0
        # Characters before `_text`.
        self._dropped = 0
        self._parts: list[ReplyPart] = []
        self._state = "reasoning" if reasoning else "wrapped" if continues and markers.wraps else "between"
        # The state that a call is in.
        self._around = self._state
        # What ends the text so far, and is of none if a marker follows: white space, or a character that is cut off.
        self._held = self._before = ""
        # Whether white space that follows is of none, and whether anything but white space has come.
        self._trims = reasoning
        self._begun = False
        self._calls = 0
        self._form: CallForm | None = None
        self._name = ""
        # Where in `_text` the call and its arguments begin.
        self._start = self._arguments = 0
        self._again = 0
        self._scanner: Scanner | None = None

    @property
    def in_call(self) -> bool:
        """Whether a call has begun whose arguments have not ended."""
        return self._state == "arguments"

    def push(self, text: str) -> list[ReplyPart]:
        """Take the next piece of text, and return what is sure by now."""
        self._text += text
        return self._read(False)

    def finish(self) -> list[ReplyPart]:
        """The text has ended: return what was held back."""
        return self._read(True)

    def _read(self, last: bool) -> list[ReplyPart]:
        while self._step(last):
            pass
        if self._scanner is None or self._streams:
            self._drop()
        if last and not self._trims:
            self._release()
        parts, self._parts = self._parts, []
        return parts

    def _drop(self) -> None:
        """Forget what is read."""
        self._dropped += self._at
        self._text, self._at = self._text[self._at :], 0

    @property
    def _streams(self) -> bool:
        return self._form is not None and self._form.notation == "json"

    def _step(self, last: bool) -> bool:
        """Read on by one marker or text; whether there may be more to read."""
        if self._state == "arguments":
            return self._read_arguments(last)
        if self._state == "close":
            return self._after_arguments(last)
        if self._state == "next":
            return self._after_call(last)
        return self._read_text(last)

    def _read_text(self, last: bool) -> bool:
        """Text of the reasoning or the answer, up to the first marker."""
        kind = "reasoning" if self._state == "reasoning" else "content"
        if self._state == "between":
            watch = self._markers.later if self._begun else self._markers.first
        else:
            watch = self._markers.closes[self._state]
        start, found = self._search(watch, last)
        self._say(kind, self._text[self._at : start], self._dropped + self._at)
        self._at = start
        if found is None:
            return False
        head, place = found
        self._before, self._held, self._trims = self._held, "", True
        if head.form is not None:
            self._around = self._state
            self._begin_call(head.form, place)
        else:
            self._state, self._at = head.kind, place.end
        return True

    def _search(self, watch: _Watch, last: bool) -> tuple[int, tuple[_Head, Found] | None]:
        """Where the first head is, or may come to be, and which."""
        heads, word = watch.heads, self._place()
        for match in watch.first.finditer(self._text, self._at):
            start = match.start()
            if watch is self._markers.first and start > word:
                # There is text before it, which only some may follow.
                heads = self._markers.later.heads
            for head in heads:
                found = head.marker.at(self._text, start)
                if found is MAYBE and not last:
                    return start, None
                if found is None or found is MAYBE:
                    continue
                if head.kind != "call" or self._is_called(found.name):
                    return start, (head, found)
        return len(self._text), None

    def _is_called(self, name: str) -> bool:
        return name in self._markers.tools and self._again < _MOST_AGAIN and (self._parallel or not self._calls)

    def _begin_call(self, form: CallForm, found: Found) -> None:
        self._form, self._name, self._state, self._begun = form, found.name, "arguments", True
        # All of a call that is not told as it comes is kept.
        self._start, self._at = self._at, found.end - (form.notation == "json")
        self._arguments = self._at
        self._scanner = make_scanner(form, self._markers.tools[self._name])
        if form.notation == "json":
            self._parts.append(CallPart(self._calls, self._name))

    def _read_arguments(self, last: bool) -> bool:
        assert self._scanner is not None
        start = self._at
        self._at, done = self._scanner.take(self._text, start)
        if self._streams and self._at > start:
            self._parts.append(ArgumentsPart(self._calls, self._text[start : self._at]))
        if done:
            self._state = "close"
        elif last and not self._streams:
            return self._not_a_call(len(self._text))
        return done

    def _not_a_call(self, end: int) -> bool:
        """What began like a call is text: its first letter at least, and what follows is looked through again.

        `end` is where it was known.
        """
        self._again += end - self._start
        self._scanner, self._state = None, self._around
        self._held, self._trims = self._before, False
        self._say("content", self._text[self._start : self._start + 1], self._dropped + self._start)
        self._at = self._start + 1
        return True

    def _after_arguments(self, last: bool) -> bool:
        """What closes a call. One whose arguments are not JSON, or is not closed, is none unless it has been told."""
        assert self._form is not None
        place = self._place()
        for marker in self._markers.forms[self._form].closes:
            found = marker.at(self._text, place)
            if found is MAYBE and not last:
                return False
            if found is not None and (found is not MAYBE or self._streams):
                break
        else:
            found = None
        if not self._streams:
            types = self._markers.tools[self._name]
            raw = self._text[self._arguments : self._at]
            written = None if found is None else arguments_json(self._form, raw, types)
            if written is None:
                return self._not_a_call(self._at)
            self._parts += [CallPart(self._calls, self._name), ArgumentsPart(self._calls, written)]
        self._calls += 1
        self._scanner, self._trims = None, True
        if found is None:
            self._state = self._around
        else:
            # The rest of a marker that was cut off says nothing.
            self._at, self._state = len(self._text) if found is MAYBE else found.end, "next"
        return True

    def _after_call(self, last: bool) -> bool:
        """Another call, or the end of all calls, or anything else."""
        assert self._form is not None
        form = self._markers.forms[self._form]
        for marker in (form.next, form.end):
            found = None if marker is None else marker.at(self._text, self._place())
            if found is MAYBE and not last:
                return False
            if found is None or found is MAYBE:
                continue
            if marker is form.end:
                self._at = found.end
            elif self._is_called(found.name):
                self._begin_call(self._form, found)
                return True
            else:
                continue
            break
        self._state, self._trims = self._around, True
        return True

    def _place(self) -> int:
        """Where the text goes on after white space."""
        place = self._at
        while place < len(self._text) and self._text[place].isspace():
            place += 1
        return place

    def _say(self, kind: str, text: str, start: int) -> None:
        """Text of the answer or the reasoning, but for the white space at its ends, which waits.

        `start` is its place in all that was pushed.
        """
        if self._trims:
            start += len(text)
            text = text.lstrip()
            start -= len(text)
        if not text:
            return
        self._trims = False
        kept = text.rstrip(_CUT_OFF if self._bounded and kind == "reasoning" else None)
        if kept:
            self._begun = self._begun or kind == "content"
            start -= len(self._held)
            kept, self._held, text = self._held + kept, "", text[len(kept) :]
            self._parts.append(ReasoningPart(kept) if kind == "reasoning" else ContentPart(kept, start))
        self._held += text

    def _release(self) -> None:
        """White space that ended the reply belongs to it."""
        if self._held:
            reasoning = self._state == "reasoning"
            start = self._dropped + self._at - len(self._held)
            self._parts.append(ReasoningPart(self._held) if reasoning else ContentPart(self._held, start))
        self._held = ""

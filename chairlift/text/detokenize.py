"""Tokens to bytes, and to text one at a time, never half a character."""

import codecs
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Protocol

import msgspec
import tokenizers

from chairlift.core.finished import FinishReason
from chairlift.core.sequences.sampling_params import SamplingParams
from chairlift.text.stop import StopAutomaton, StopStrings

# Enough neighbours for any decoder that looks around; a longer tail would only cost time.
_PRIMING_TOKENS = 6
# A UTF-8 character has at most four bytes: five tokens that still give U+FFFD will not become a character.
_MAX_HELD_TOKENS = 5
_BROKEN = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Vocabulary:
    """Token ids to bytes, for byte-level BPE and for SentencePiece with byte fallback.

    `texts` has the text of every token that is whole characters, and None for the others. `plain` says that decoding is
    joining tokens' bytes (then dropping `strip_left` leading spaces). All other tokenizers (WordPiece, Metaspace, ...)
    decode by their neighbours; for them `bytes_of` is the token decoded alone.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder()
        self.size = max(backend.get_vocab_size(with_added_tokens=False), max(added, default=-1) + 1)
        self.special = frozenset(token_id for token_id, token in added.items() if token.special)
        steps = steps_of(backend.decoder, "decoders")
        kinds = [step["type"] for step in steps]
        self._byte_level = kinds == ["ByteLevel"]
        self.strip_left = _sentencepiece_strip(steps)
        self.plain = self._byte_level or self.strip_left is not None
        self._known: dict[int, bytes] = {}
        self.texts: Mapping[int, str | None] = _Texts(self.bytes_of)

    def bytes_of(self, token_id: int) -> bytes:
        """The token's bytes, special tokens as they are written; nothing for an id outside the vocabulary."""
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._compute(token_id)
        return found

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        """Decode by the tokenizer itself."""
        return str(self._backend.decode(ids, skip_special_tokens=skip_special_tokens))

    def _compute(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return b""
        if self._byte_level:
            letters = byte_of_letter()
            if all(letter in letters for letter in token):
                return bytes(letters[letter] for letter in token)
            return token.encode()
        if self.plain:
            match = _BYTE_TOKEN.fullmatch(token)
            return bytes([int(match[1], 16)]) if match else token.replace("▁", " ").encode()
        return self.decode([token_id], False).encode()


class _Texts(dict[int, str | None]):
    """Tokens' bytes as text, found when asked for; None if they are no whole characters."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        super().__init__()
        self._bytes_of = bytes_of

    def __missing__(self, token_id: int) -> str | None:
        try:
            self[token_id] = self._bytes_of(token_id).decode()
        except UnicodeDecodeError:
            self[token_id] = None
        return self[token_id]


class Detokenizer(Protocol):
    """Pieces of text whose concatenation is the decoded text."""

    def push(self, token_id: int) -> str:
        """Take the next token; return the text that is now certain, often none or a little more than the token's."""

    def finish(self) -> str:
        """No more tokens: return what was held back, broken characters as U+FFFD."""


def make_detokenizer(
    vocabulary: Vocabulary,
    skip_special_tokens: bool = True,
    prompt_ids: Sequence[int] = (),
    shown: frozenset[int] = frozenset(),
) -> Detokenizer:
    """A detokenizer for one sequence, the fastest that is exact for the tokenizer.

    With `prompt_ids`, the text is what follows the prompt's text, so the space that some tokenizers drop from the
    start of a text stays in. Without, the text is that of the generated tokens alone. Special tokens among `shown`
    are not skipped.
    """
    skipped = vocabulary.special - shown if skip_special_tokens else frozenset()
    if vocabulary.plain:
        return ByteDetokenizer(vocabulary, skipped, at_start=not prompt_ids)
    return WindowDetokenizer(vocabulary, skipped, prompt_ids)


class ByteDetokenizer:
    """For tokenizers whose text is their tokens' bytes in a row; a look-up per token, and UTF-8 where one is no text.

    Broken UTF-8 differs from the `tokenizers` library in one way: after a run of `<0xNN>` tokens that is not UTF-8 as a
    whole the library replaces every byte of the run, and here only the broken ones, since the rest was sent long ago.
    """

    def __init__(self, vocabulary: Vocabulary, skipped: frozenset[int], at_start: bool) -> None:
        self._bytes_of, self._texts = vocabulary.bytes_of, vocabulary.texts
        self._skip = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._within = False
        self._strip = (vocabulary.strip_left or 0) if at_start else 0

    def push(self, token_id: int) -> str:
        """Take the next token; return the characters that it completes."""
        if token_id in self._skip:
            return ""
        text = None if self._within else self._texts[token_id]
        if text is None:
            text = self._decoder.decode(self._bytes_of(token_id))
            self._within = bool(self._decoder.getstate()[0])
        return self._stripped(text) if self._strip and text else text

    def finish(self) -> str:
        """Return a broken last character, if there is one."""
        return self._decoder.decode(b"", True)

    def _stripped(self, text: str) -> str:
        """Drop leading spaces of the whole text, which may come in several pieces."""
        kept = text
        while self._strip and kept.startswith(" "):
            kept = kept[1:]
            self._strip -= 1
        if kept:
            self._strip = 0
        return kept


class WindowDetokenizer:
    """For every other tokenizer: decode the last few tokens with and without the new one, and take the difference.

    The window starts where text was last released and is cut as soon as text is released again, so a token costs the
    same however long the sequence is.
    """

    def __init__(self, vocabulary: Vocabulary, skipped: frozenset[int], prompt_ids: Sequence[int]) -> None:
        self._vocabulary = vocabulary
        self._skip = skipped
        self._window = list(prompt_ids[-_PRIMING_TOKENS:])
        self._done = len(self._window)
        self._done_text = self._text(self._window)

    def push(self, token_id: int) -> str:
        """Take the next token; return the text that is now certain."""
        if token_id in self._skip:
            return ""
        self._window.append(token_id)
        text = self._text(self._window)
        if text.endswith(_BROKEN) and len(self._window) - self._done < _MAX_HELD_TOKENS:
            return ""
        return self._release(text)

    def finish(self) -> str:
        """Return what was held back."""
        return self._release(self._text(self._window))

    def _release(self, text: str) -> str:
        new = text[len(self._done_text) :]
        # Tokens without any text may come without end, and must not pile up.
        if new or len(self._window) - self._done >= _MAX_HELD_TOKENS:
            # Keep the tokens just released as the neighbours of those to come.
            self._window = self._window[self._done :]
            self._done = len(self._window)
            self._done_text = self._text(self._window)
        return new

    def _text(self, ids: list[int]) -> str:
        return self._vocabulary.decode([each for each in ids if each not in self._skip], False)


class TextDelta(msgspec.Struct, frozen=True):
    """What one push gave.

    `text` may be shown now. `num_tokens` is how many of the pushed tokens count: all, or those up to and with the one
    that completed a stop string. `stop_reason` is the stop string, or the stop token's id if the client named it
    (None for the model's own EOS, as in vLLM). `stopped` says that a stop string ended the text: the caller aborts the
    request, unless the engine has ended it too.
    """

    text: str
    num_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    stopped: bool = False


def stop_automaton(params: SamplingParams) -> StopAutomaton | None:
    """What finds a request's stop strings; None if there are none."""
    stops = params.stop_strings
    return StopAutomaton(stops) if stops else None


class TextStream:
    """Turns one sequence's tokens into text: whole characters, stop strings cut off, nothing after the end.

    `num_tokens` counts the tokens of the text so far, an EOS and the tokens of a cut stop string included. `offsets`
    holds, for each of them, where in the text it starts, held-back text counted in; it is kept only if `params` asks
    for logprobs. Give `prompt_ids` where the answer continues the prompt's text (completions): some tokenizers drop
    the space at the start of a text. `automaton` is `stop_automaton(params)`, one for all samples of a request.
    Special tokens among `shown` are text.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        params: SamplingParams,
        prompt_ids: Sequence[int] = (),
        automaton: StopAutomaton | None = None,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._detokenizer = make_detokenizer(vocabulary, params.skip_special_tokens, prompt_ids, shown)
        self._push = self._detokenizer.push
        self._stops = StopStrings(automaton, params.include_stop_str_in_output) if automaton is not None else None
        self._params = params
        self._end: TextDelta | None = None
        self._length = 0
        self.num_tokens = 0
        self.offsets: list[int] | None = None if params.logprobs is None else []
        # Whether there is nothing to look for in the text, nor to note of it.
        self.is_plain = self._stops is None and self.offsets is None

    def push_plain(self, token_ids: Sequence[int]) -> str:
        """As `push` before the end, where the stream is plain: the text."""
        count = len(token_ids)
        self.num_tokens += count
        return self._push(token_ids[0]) if count == 1 else "".join(map(self._push, token_ids))

    def push(
        self,
        token_ids: Sequence[int],
        finish_reason: FinishReason | None = None,
        stop_token: int | None = None,
    ) -> TextDelta:
        """Take what a step gave. `stop_token` is the id that ended the sequence, when `finish_reason` is STOP.

        After the end, late tokens give an empty delta that repeats how it ended.
        """
        if self._end is not None:
            return self._end
        if finish_reason is None and self.is_plain:
            return TextDelta(self.push_plain(token_ids), len(token_ids))
        before = self.num_tokens
        silent = self._is_silent(token_ids, finish_reason, stop_token)
        texts = [self._push_one(token_id) for token_id in (token_ids[:-1] if silent else token_ids)]
        if silent and not self._matched:
            self._count()
        if finish_reason is not None and not self._matched:
            texts.append(self._flush())
        delta = TextDelta("".join(texts), self.num_tokens - before)
        if self._matched is not None:
            return self._finish(delta, FinishReason.STOP, self._matched, stopped=True)
        if finish_reason is not None:
            named = stop_token is not None and stop_token in (self._params.stop_token_ids or ())
            return self._finish(delta, finish_reason, stop_token if named else None, stopped=False)
        return delta

    @property
    def _matched(self) -> str | None:
        return self._stops.matched if self._stops is not None else None

    def _is_silent(self, token_ids: Sequence[int], reason: FinishReason | None, stop_token: int | None) -> bool:
        """Whether the last token is a stop token, whose own text is not shown."""
        stopped = reason is FinishReason.STOP and stop_token is not None
        at_end = stopped and len(token_ids) > 0 and token_ids[-1] == stop_token
        return at_end and not self._params.include_stop_str_in_output

    def _push_one(self, token_id: int) -> str:
        if self._matched is not None:
            return ""
        self._count()
        text = self._push(token_id)
        self._length += len(text)
        # The first `min_tokens` tokens are the client's whatever they say.
        if self._stops is None or self.num_tokens <= self._params.min_tokens:
            return text
        return self._stops.push(text)

    def _count(self) -> None:
        self.num_tokens += 1
        if self.offsets is not None:
            self.offsets.append(self._length)

    def _flush(self) -> str:
        rest = self._detokenizer.finish()
        if self._stops is None:
            return rest
        return self._stops.push(rest) + self._stops.finish()

    def _finish(
        self, delta: TextDelta, reason: FinishReason, stop_reason: str | int | None, stopped: bool
    ) -> TextDelta:
        self._end = TextDelta("", 0, reason, stop_reason, stopped)
        return TextDelta(delta.text, delta.num_tokens, reason, stop_reason, stopped)


def steps_of(component: Any, name: str) -> list[dict[str, Any]]:
    """The parts of a tokenizer's decoder, normalizer or pre-tokenizer; `name` is what a sequence calls its parts."""
    return [] if component is None else _flat(json.loads(component.__getstate__()), name)


def _flat(state: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [step for part in state[name] for step in _flat(part, name)] if state["type"] == "Sequence" else [state]


def _sentencepiece_strip(steps: list[dict[str, Any]]) -> int | None:
    """How many leading spaces a SentencePiece-style decoder drops; None if the decoder is not of that style."""
    kinds = [step["type"] for step in steps]
    if kinds[:3] != ["Replace", "ByteFallback", "Fuse"]:
        return None
    if steps[0]["pattern"] != {"String": "▁"} or steps[0]["content"] != " ":
        return None
    if len(steps) == 3:
        return 0
    strip = steps[3]
    if len(steps) == 4 and strip["type"] == "Strip" and strip["content"] == " " and strip["stop"] == 0:
        return int(strip["start"])
    return None


@cache
def byte_of_letter() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes stand for themselves, the others for letters from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}

"""What a sequence may say before its grammar looks at it: looks are cheap, but what they look at is seldom in a cache.

Within a string that may be long nearly any text may follow, and within a number any digit, whatever was said before. So
where a long text would be allowed, or many digits, tokens of such text are taken unseen, up to that length, and the
grammar follows all of them at once later.
"""

from array import array

import llguidance
import tokenizers

# A word of so many letters, which most grammars allow only where they allow nearly anything: near the end of a string
# of limited length too, where most tokens are longer.
_PROBE_LETTERS = 4
# How often in a row that word is looked for, and a digit. No schema has a constant of so many digits: exponents are
# written instead.
_WORDS, _DIGITS = 32, 40
_DIGIT = "7"
# Tokens that are said at most before a grammar follows them.
_MOST_SAID = 64
# Of a token that nobody has asked for yet; and characters of one up to which it is taken unseen.
_UNKNOWN, _LONGEST = -2, 100
# What makes long strings other than free text, and long numbers other than free digits, beside patterns. None of the
# library's own formats has a space; and where they have so many digits, and no letters, they have as many as one likes:
# in fractions of seconds.
_FORMS, _SPACE = '"format"', " "
_BOUNDS = ('"minimum"', '"maximum"', '"exclusiveM', '"multipleOf"')


class PlainTokens:
    """Which tokens of a vocabulary are plain text, as strings of JSON have it without escapes, and which are digits."""

    def __init__(self, tokens: llguidance.LLTokenizer, backend: tokenizers.Tokenizer) -> None:
        """Takes the interpreter's lock for about a microsecond a token."""
        self.word: int | None
        self._tokens = tokens
        # A byte for each token.
        self._lengths = array("b", [_UNKNOWN]) * tokens.vocab_size
        self._digits = array("b", [_UNKNOWN]) * tokens.vocab_size
        words = [(index, word) for word, index in backend.get_vocab().items() if len(word) == _PROBE_LETTERS]
        # The last one, as the rarest.
        rare = [each for each in words if each[1].isascii() and each[1].isalpha() and each[1].islower()]
        self.word, self.spelled = max(rare, default=(None, ""))
        self.digit = backend.token_to_id(_DIGIT)
        self.space = tokens.tokenize_str(_SPACE)

    def length(self, token: int) -> int:
        """Characters of a token, all of them printable ASCII other than quotes and backslashes.

        0 for any other text and for very long ones, and -1 for what is no text.
        """
        found = self._lengths[token]
        if found == _UNKNOWN:
            text = self._text(token)
            is_plain = len(text) <= _LONGEST and all(0x20 <= each < 0x7F and each not in b'"\\' for each in text)
            found = self._lengths[token] = -1 if not text else len(text) if is_plain else 0
        return found

    def is_digits(self, token: int) -> bool:
        """Whether a token has digits only."""
        found = self._digits[token]
        if found == _UNKNOWN:
            text = self._text(token)
            found = self._digits[token] = bool(text) and all(0x30 <= each <= 0x39 for each in text)
        return bool(found)

    def _text(self, token: int) -> bytes:
        return b"" if self._tokens.is_special_token(token) else bytes(self._tokens.decode_bytes([token]))


class FreeText:
    """What of a grammar's tokens has leeway: `words` and `digits`, which are looked for, each as often as it must be.

    One word only if strings of it are no free text: it still says that nearly anything may follow. After two of them a
    space where texts of the library's formats may be as long.
    """

    def __init__(self, plain: PlainTokens, grammar: str, is_plain: bool) -> None:
        """`is_plain`: whether it is a JSON schema without patterns of its client's."""
        self.plain = plain
        between = plain.space if _FORMS in grammar else []
        has_text = is_plain and 2 * plain.spelled not in grammar and (bool(between) or _FORMS not in grammar)
        has_digits = is_plain and not any(word in grammar for word in _BOUNDS) and _DIGITS * _DIGIT not in grammar
        words = [] if plain.word is None else [plain.word] * (_WORDS if has_text else 1)
        self.words = words[:2] + between + words[2:] if has_text and words else words
        # How many of them say nothing about those that follow, if any do.
        self.num_first = 1 + len(between)
        # Without a word there is no telling a number from a string.
        self.digits = [plain.digit] * _DIGITS if has_digits and self.words and plain.digit is not None else []


class Leeway:
    """A sequence's: `room` is how many characters of plain text may follow, after which others still may."""

    def __init__(self, free: FreeText) -> None:
        self._free = free
        self._plain = free.plain
        self.room = 0
        self.has_digits = False
        # How often in a row it was asked after digits.
        self._times = 0

    def look_for_text(self, matcher: llguidance.LLMatcher) -> bool:
        """Find how much there is; return whether a short word may follow."""
        found = int(matcher.validate_tokens(self._free.words)) if self._free.words else 0
        self.room = max(found - self._free.num_first, 0) * _PROBE_LETTERS
        return found > 0

    def look_for_digits(self, matcher: llguidance.LLMatcher, said: int | None) -> None:
        """Find whether any digits may follow what was `said` last, and change nothing of what may be next.

        That is so after a digit of a number that goes on: its first ones decide what may follow, all others do not.
        Most numbers are short: so they are looked for after the second token of one.
        """
        digits = self._free.digits
        self._times = self._times + 1 if digits and said is not None and self._plain.is_digits(said) else 0
        if self._times > 1 and matcher.validate_tokens(digits) == len(digits):
            # Not in a string, which may be of limited length.
            self.has_digits = matcher.validate_tokens(self._free.words[:1]) == 0

    def takes_text(self, token: int, waiting: int) -> bool | None:
        """Whether a token may be next where text may be, `waiting` others being said and not followed; None: unknown.

        One that may is taken.
        """
        length = self._plain.length(token)
        if length < 0:
            return False
        if not 0 < length <= self.room or waiting >= _MOST_SAID:
            return None
        self.room -= length
        return True

    def takes_digits(self, said: list[int]) -> bool:
        """Whether what may be next stays as it is after what was `said` and is not followed yet."""
        return self.has_digits and len(said) < _MOST_SAID and self._plain.is_digits(said[-1])

    def forget(self) -> None:
        """There is none, until it is looked for again."""
        self.room, self.has_digits = 0, False

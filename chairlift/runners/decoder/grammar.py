"""The grammars that sequences follow: which tokens each of them may say next, found while the model computes.

The library is llguidance (guidance-ai/llguidance): a derivative-based lexer under an Earley parser, which walks the
tokens' trie and gives one bit for each token.
"""

from collections.abc import Sequence
from pathlib import Path

import llguidance
import numpy as np
import tokenizers

from chairlift.folders.end_tokens import end_token_ids, special_tokens
from chairlift.folders.model_json import read_object
from chairlift.ops.base import Int32s

# Tokens that follow from a grammar and are found at once. Whatever else does is chosen as any token is.
_MOST_FORCED = 64
# Errors hold the whole grammar and the state of the parser behind their first line.
_MOST_ERROR = 300
# How the library says that no text follows a grammar.
_NOTHING = ("NoExtension", "NoExtensionBias")


class GrammarError(ValueError):
    """A grammar that can't be compiled, or not be followed any further."""


class GrammarTokenizer:
    """A model's tokens as grammars need them. Takes the interpreter's lock for a few microseconds a token to make."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        """Raises GrammarError if the folder has no tokenizer.json, or one with other tokens than the model."""
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise GrammarError("the model's folder has no tokenizer.json, which grammars need")
        backend = tokenizers.Tokenizer.from_file(str(file))
        eos = special_tokens(read_object(folder / "tokenizer_config.json")).get("eos_token")
        self.eos_ids = frozenset(end_token_ids(folder, eos, backend.token_to_id))
        try:
            self.tokens = llguidance.LLTokenizer(backend.to_str(), vocab_size, sorted(self.eos_ids) or None)
        except ValueError as error:
            raise GrammarError(f"the model's tokenizer can't be used with grammars: {first_line(error)}") from None
        self.words = -(-vocab_size // 32)

    def compile(self, grammar: str) -> "CompiledGrammar":
        """Compile, without the interpreter's lock; raises GrammarError, with what is wrong, within seconds."""
        # Bounded as well: bytes and depth of nesting, where a request comes in.
        limits = llguidance.LLParserLimits(
            initial_lexer_fuel=100_000,
            step_lexer_fuel=100_000,
            step_max_items=50_000,
            max_lexer_states=50_000,
            max_grammar_size=200_000,
            verbose_errors=False,
        )
        matcher = llguidance.LLMatcher(self.tokens, grammar, log_level=0, limits=limits)
        found = CompiledGrammar(self, matcher)
        # Also the first tokens that it allows, for which most of the lexer is made, and those that follow from them.
        found.check(np.zeros(self.words, np.int32))
        return found


class CompiledGrammar:
    """A grammar that any number of sequences can follow."""

    def __init__(self, tokenizer: GrammarTokenizer, matcher: llguidance.LLMatcher) -> None:
        self._tokenizer = tokenizer
        self._matcher = matcher

    def check(self, allowed: Int32s) -> None:
        """Raise GrammarError if it is wrong, or too complex to begin with."""
        if not self._matcher.is_error():
            self._matcher.unsafe_compute_mask_ptr(allowed.ctypes.data, allowed.nbytes)
        _check(self._matcher)
        first = self.follow([], forces=True)
        first.advance()
        if first.error is not None:
            raise GrammarError(first.error)

    def follow(self, output_ids: Sequence[int], forces: bool) -> "Follower":
        """A sequence's own way through it, which goes on after `output_ids`."""
        return Follower(self._tokenizer, self._matcher.deep_copy(), output_ids, forces)


class Follower:
    """One sequence's place in its grammar. While it is `busy` only `advance`, in whatever thread, may touch the rest.

    `allowed` [ceil(V / 32)] int32 has a bit for each token that may be next, after the `forced` ones: those, which
    follow from the grammar, are found if it `forces`. Once it has `ended` there is none. `seconds` is what it took.
    """

    def __init__(
        self, tokenizer: GrammarTokenizer, matcher: llguidance.LLMatcher, output_ids: Sequence[int], forces: bool
    ) -> None:
        self.allowed = np.zeros(tokenizer.words, np.int32)
        self.forced: list[int] = []
        self.ended = False
        self.error: str | None = None
        self.busy = False
        self._eos_ids = tokenizer.eos_ids
        self._matcher = matcher
        self._forces = forces
        self._said = list(output_ids)
        self._address = self.allowed.ctypes.data

    def say(self, token: int) -> None:
        """Let it know of a token that was chosen from those allowed."""
        self._said.append(token)

    def give_up(self, why: str) -> None:
        """Fail, whatever it is doing: nobody waits for that any longer."""
        self.error = why

    def advance(self) -> None:
        """Follow what was said, and find what may be next; an error is kept for whoever asks."""
        try:
            said, self._said = self._said, []
            if not self._matcher.consume_tokens(said):
                _check(self._matcher)
                raise GrammarError("the grammar does not allow a token that was chosen")
            self._look_ahead()
        except GrammarError as error:
            self.error = str(error)
        except BaseException as error:  # a panic of the library is no Exception
            self.error = f"the grammar broke: {first_line(error)}"
        finally:
            self.busy = False

    def _look_ahead(self) -> None:
        matcher, forced = self._matcher, self.forced
        while not matcher.is_stopped():
            matcher.unsafe_compute_mask_ptr(self._address, self.allowed.nbytes)
            if matcher.is_error():
                break
            token = _only_token(self.allowed)
            if token is None:
                return
            if token in self._eos_ids:
                self.ended = True
                return
            if not self._forces or len(forced) == _MOST_FORCED:
                return
            matcher.consume_token(token)
            forced.append(token)
        _check(matcher)
        self.ended = True

    def take_forced(self) -> list[int]:
        """Return the tokens that were found to follow, once."""
        found, self.forced = self.forced, []
        return found


def _only_token(allowed: Int32s) -> int | None:
    """The token whose bit is the only one set, if it is."""
    # Counting is far cheaper than finding, and mostly there are many.
    if np.count_nonzero(allowed) != 1:
        return None
    word = int(allowed.nonzero()[0][0])
    bits = int(allowed[word]) & 0xFFFFFFFF
    return None if bits & (bits - 1) else word * 32 + bits.bit_length() - 1


def _check(matcher: llguidance.LLMatcher) -> None:
    if matcher.is_error():
        raise GrammarError(first_line(matcher.get_error()))


def first_line(error: object) -> str:
    """What an error of the library says, without the state or the place that follows it over many lines."""
    lines = str(error).strip().split("\n")
    said = next((line for line in lines if line.startswith("error: ")), "") if lines[0].endswith(":") else ""
    if lines[0] in _NOTHING:
        return "nothing satisfies it"
    return f"{lines[0]} {said}".strip()[:_MOST_ERROR]

"""The grammars that sequences follow: which tokens each of them may say next, found while the model computes.

The library is llguidance (guidance-ai/llguidance): a derivative-based lexer under an Earley parser, which walks the
tokens' trie and gives one bit for each token.
"""

import itertools
import json
import math
import re
import time
from collections.abc import Sequence
from enum import Enum, auto
from pathlib import Path

import llguidance
import numpy as np
import torch

from chairlift.errors import clip
from chairlift.folders.end_tokens import end_token_ids
from chairlift.folders.tokenizer_json import read_tokenizer
from chairlift.ops.base import Int32s
from chairlift.runners.grammars.leeway import FreeText, Leeway, PlainTokens
from chairlift.runners.sequences import GRAMMAR_PART

# Tokens that follow from a grammar and are found at once. Whatever else does is chosen as any token is.
_MOST_FORCED = 64
# Errors hold the whole grammar and the state of the parser behind their first line.
_MOST_ERROR = 300
# Seconds that it may take to follow a token and look at a word, so that others can wait for tokens that are tried.
_QUICK = 0.0002
# Seconds of a core that one trial may take. After a longer one, no token of that grammar is tried.
_SLOW = 0.002
# Seconds of a core for a token, and what may be next, up to which it is no pity if others wait for the one after it.
_LIGHT = 0.001
# After a trial in vain this many tokens pass before the next one, then twice as many each time; not where longer text
# may follow than then.
_WARY = 16
# Characters of a grammar in which nothing is long: forced text that is no longer takes some milliseconds to cut.
_SHORT = 4000
# Tokens of a grammar that are known to be quiet.
_MOST_QUIET = 1000
# How a grammar of a JSON schema begins, and what stands in one that may have patterns of its own.
_SCHEMA = '{"grammars":[{"json_schema":'
_PATTERNS = ('"pattern', "whitespace_pattern", "\\u")
# How the library says that no text follows a grammar.
_NOTHING = ("NoExtension", "NoExtensionBias")
# How it says in which line something is wrong; so much of that is looked at.
_PLACE = re.compile(r"at (\d+)\(")
_SHOWN = 40


class TrialKind(Enum):
    """What of a sequence can be tried: nothing, the likeliest tokens, or such as were drawn from all of them."""

    NEVER = auto()
    OF_BEST = auto()
    OF_DRAWN = auto()


class GrammarError(ValueError):
    """A grammar that can't be compiled, or not be followed any further."""


class GrammarTokenizer:
    """A model's tokens as grammars need them. Takes the interpreter's lock for a few microseconds a token to make."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        """Raises GrammarError if the folder has no tokenizer.json, or one that the library can't use for the model."""
        if not (folder / "tokenizer.json").is_file():
            raise GrammarError("the model's folder has no tokenizer.json, which grammars need")
        try:
            backend, _, special = read_tokenizer(folder)
            self.eos_ids = frozenset(end_token_ids(folder, special.get("eos_token"), backend.token_to_id))
            # There may be tokens that the model has no number for, as of its part for images (Gemma 3 1B).
            known = max(vocab_size, max(backend.get_vocab().values(), default=0) + 1)
            self.tokens = llguidance.LLTokenizer(backend.to_str(), known, sorted(self.eos_ids) or None)
            self.plain = PlainTokens(self.tokens, backend)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of the library is no Exception
            raise GrammarError(f"the model's tokenizer can't be used with grammars: {first_line(error)}") from None
        self.vocab_size = vocab_size
        # Of a mask, and of what of it is for tokens that the model has.
        self.mask_words, self.words = -(-known // 32), -(-vocab_size // 32)
        self.has_more = known > vocab_size

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
        is_plain = grammar.startswith(_SCHEMA) and not any(word in grammar for word in _PATTERNS)
        # Where a token of a list could be the word that is looked for, a sequence would be tried in the middle of it.
        lists_forced = len(grammar) <= _SHORT and self.plain.spelled not in grammar
        free = FreeText(self.plain, grammar, is_plain)
        found = CompiledGrammar(self, matcher, is_plain, free, lists_forced)
        # Also the first tokens that it allows, for which most of the lexer is made, and those that follow from them.
        try:
            found.check(np.zeros(self.mask_words, np.int32))
        except GrammarError as error:
            raise GrammarError(_whose(grammar, matcher.get_error()) + str(error)) from None
        return found


class CompiledGrammar:
    """A grammar that any number of sequences can follow.

    Tokens are tried only if it `is_plain`, a JSON schema without patterns of its client's: to look at a token keeps the
    interpreter's lock, for a time that a pattern could make long, and trials are in vain where a pattern allows little.
    Those of formats are the library's own. Nor are any tried once to look at one of its tokens took long. To have
    forced tokens listed keeps that lock for as long as the text is: it `lists_forced` only if it is short.
    """

    def __init__(
        self,
        tokenizer: GrammarTokenizer,
        matcher: llguidance.LLMatcher,
        is_plain: bool,
        free: FreeText,
        lists_forced: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.matcher = matcher
        self.is_plain, self.lists_forced = is_plain, lists_forced
        self.free = free
        # Whether to look at a token took long.
        self.is_slow = False
        # Tokens after which nothing was forced and no sequence ended when one last said them.
        self.quiet: set[int] = set()
        # Whether it takes long, so that only threads follow it that nobody waits for; and whose turn it is.
        self.is_aside = False
        self.in_hand: Follower | None = None
        # Where sequences begin that find forced tokens, by what of them is tried: once it is checked.
        self._beginnings: dict[TrialKind, Follower] = {}

    def check(self, allowed: Int32s) -> None:
        """Raise GrammarError if it is wrong, or too complex to begin with."""
        if not self.matcher.is_error():
            self.matcher.unsafe_compute_mask_ptr(allowed.ctypes.data, allowed.nbytes)
        _check(self.matcher)
        for trial in TrialKind if self.is_plain else (TrialKind.NEVER,):
            first = self.follow([], forces=True, trial=trial)
            first.advance()
            if first.error is not None:
                raise GrammarError(first.error)
            self._beginnings[trial] = first

    def follow(self, output_ids: Sequence[int], forces: bool, trial: TrialKind = TrialKind.NEVER) -> "Follower":
        """A sequence's own way through it, which goes on after `output_ids`."""
        return Follower(self, output_ids, forces, trial if self.is_plain else TrialKind.NEVER)

    def begin(self, trial: TrialKind) -> "Follower":
        """The same of a sequence that has no output yet and finds forced tokens, as it is once it has advanced."""
        return self._beginnings[trial if self.is_plain else TrialKind.NEVER].copy()

    def is_free(self) -> bool:
        """Whether others may wait for a sequence of it: all share a lexer, whose lock is kept while one advances."""
        return not self.is_aside and self.in_hand is None


class Follower:
    """One sequence's place in its grammar. While it is `busy` only `advance`, in whatever thread, may touch the rest.

    `allowed` [ceil(V / 32)] int32 has a bit for each token that may be next, after the `forced` ones: those, which
    follow from the grammar, are found if it `forces`. Once it has `ended` there is none.

    If it is `is_tried`, tokens are drawn as if there were no grammar and tried one by one, and only if none of them is
    allowed, one that is; if it is `is_open` as well, `allowed` is not known, and `accept` says it of a token. What
    there is leeway for is taken unseen, and followed later.
    """

    def __init__(
        self, grammar: CompiledGrammar, output_ids: Sequence[int], forces: bool, trial: TrialKind = TrialKind.NEVER
    ) -> None:
        self.grammar = grammar
        self._mask = np.zeros(grammar.tokenizer.mask_words, np.int32)
        self.allowed = self._mask[: grammar.tokenizer.words]
        # The same memory, as `Allowed` has it.
        self.bits = torch.from_numpy(self.allowed)
        self.forced: list[int] = []
        self.ended = False
        self.is_tried = False
        self.is_open = False
        self.error: str | None = None
        self.busy = False
        # By the monotonic clock: when it last became so, and when a thread began with it then.
        self.posted_at, self.begun_at = 0.0, math.inf
        # Of a core, that `advance` took last.
        self.seconds = math.inf
        self._eos_ids = grammar.tokenizer.eos_ids
        self._matcher = grammar.matcher.deep_copy()
        self._forces = forces
        self._leeway = Leeway(grammar.free)
        self._trial = trial if grammar.free.words else TrialKind.NEVER
        # What is allowed is found beforehand: as long as this is set, for so many tokens from now on, or for good.
        self.prepares = False
        self._wary, self._times_in_vain, self._room_in_vain = 0, 0, 0
        self._said = list(output_ids)
        self._last: int | None = None
        self._accepted: int | None = None
        # Whether `advance` is to find what is allowed, and all else is done.
        self._lacks_allowed = False
        self._address = self.bits.data_ptr()

    def copy(self) -> "Follower":
        """Another that is as far as this one, which is not busy and has not failed, and whose tokens nobody took."""
        found = Follower(self.grammar, [], self._forces, self._trial)
        found.allowed[:] = self.allowed
        found.forced = list(self.forced)
        found.ended, found.is_tried, found.is_open = self.ended, self.is_tried, self.is_open
        found.seconds = self.seconds
        found._leeway.room = self._leeway.room
        found._matcher = self._matcher.deep_copy()
        return found

    def say(self, token: int) -> None:
        """Let it know of a token that was chosen from those allowed."""
        if self._accepted is None:
            self._said.append(token)
        self._accepted = None

    def accept(self, token: int) -> bool:
        """Whether a token that is tried may be next; if it is open, it follows one that may, which must be said.

        Not if that can't be asked now.
        """
        if not self.is_open:
            return bool(self.allowed[token // 32] >> (token % 32) & 1)
        known = self._leeway.takes_text(token, len(self._said))
        if known is not None:
            return known
        if not self.can_be_tried:
            return False
        began = time.thread_time()
        try:
            self._catch_up()
            if self._matcher.try_consume_tokens([token]):
                self._accepted = token
        except BaseException as error:
            self._break(error)
        self.grammar.is_slow |= time.thread_time() - began > _SLOW
        return self._accepted is not None

    def _catch_up(self) -> None:
        """Follow what was said."""
        said, self._said = self._said, []
        if said and not self._matcher.consume_tokens(said):
            _check(self._matcher)
            raise GrammarError("the grammar does not allow a token that was chosen")

    @property
    def can_be_tried(self) -> bool:
        """Whether `accept` can be asked now, without waiting for another sequence."""
        return not self.is_open or self.grammar.is_free()

    def refuse(self) -> None:
        """Let it know that no token that was tried may be next: `advance` finds those that may."""
        self._wary = _WARY << min(self._times_in_vain, 10)
        self._times_in_vain += 1
        self._room_in_vain = max(self._leeway.room, self._room_in_vain)

    @property
    def is_light(self) -> bool:
        """Whether others may as well wait while it advances, as far as one can tell by the last time."""
        return self.grammar.is_plain and self.seconds < _LIGHT and self.grammar.is_free()

    @property
    def is_quiet(self) -> bool:
        """Whether nothing but what is allowed is likely to follow from what was said: no token is forced by it."""
        return bool(self._said) and self._said[-1] in self.grammar.quiet

    def give_up(self, why: str) -> None:
        """Fail, whatever it is doing: nobody waits for that any longer."""
        self.error = why

    def go_on(self) -> bool:
        """Go on at once after what was said, if others can be tried, or just what could be before.

        It must `advance` otherwise.
        """
        if not self.is_open:
            return self._leeway.takes_digits(self._said)
        if self._prepares():
            return False
        if self._said:
            return True
        if not self.grammar.is_free() or self._matcher.is_stopped():
            return False
        began = time.thread_time()
        try:
            return self._leeway.look_for_text(self._matcher)
        except BaseException as error:
            self._break(error)
            return False
        finally:
            self.grammar.is_slow |= time.thread_time() - began > _SLOW

    def _break(self, error: BaseException) -> None:
        """Fail by an error of the library, whose panics are no Exceptions; what is not one of those goes on."""
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise error
        self.error = f"the grammar broke: {first_line(error)}"

    def advance(self) -> None:
        """Follow what was said, and find what may be next; an error is kept for whoever asks."""
        self._go_ahead(finds_allowed=True)

    def advance_in_part(self) -> bool:
        """Do that without finding which tokens may be next, the larger part, of which `advance` does what is left.

        Return whether nothing is.
        """
        self._go_ahead(finds_allowed=False)
        return self.error is not None or not self._lacks_allowed

    def _go_ahead(self, finds_allowed: bool) -> None:
        began = time.thread_time()
        self.grammar.in_hand = self
        last = self._said[-1] if self._said else None
        try:
            self._follow(began, finds_allowed)
            if last is not None:
                self._learn(last)
        except GrammarError as error:
            self.error = str(error)
        except BaseException as error:
            self._break(error)
        finally:
            # Another thread may have begun with one that takes longer.
            if self.grammar.in_hand is self:
                self.grammar.in_hand = None
            self.seconds = time.thread_time() - began
            self.busy = False

    def _learn(self, token: int) -> None:
        """Take note whether something was forced by a token, or ended."""
        quiet = self.grammar.quiet
        if self.forced or self.ended:
            quiet.discard(token)
        elif len(quiet) < _MOST_QUIET:
            quiet.add(token)

    def _follow(self, began: float, finds_allowed: bool) -> None:
        matcher, forced = self._matcher, self.forced
        self.is_tried = self.is_open = False
        self._leeway.forget()
        if not self._lacks_allowed:
            self._last = self._said[-1] if self._said else None
        while True:
            if not self._lacks_allowed:
                self._catch_up()
                _check(matcher)
                if matcher.is_stopped():
                    self.ended = True
                    return
                if self._trial is not TrialKind.NEVER and self._is_wide():
                    self._begin_trial(began)
                    return
            self._lacks_allowed = not finds_allowed
            found = self._find_forced() if finds_allowed else self._list_forced()
            if self.ended or not found:
                return
            self._lacks_allowed = False
            self._said, self._last = found, found[-1]
            forced += found
            began = time.thread_time()

    def _find_forced(self) -> list[int]:
        """Find what may be next, and return the token that must be, if it is the only one, and more are wanted."""
        self._find_allowed()
        self._leeway.look_for_digits(self._matcher, self._last)
        token = _only_token(self.allowed)
        if token in self._eos_ids:
            self.ended = True
        if token is None or not self._forces or len(self.forced) >= _MOST_FORCED:
            return []
        return [token]

    def _list_forced(self) -> list[int]:
        """Return tokens of which each would be the only one, as many as are wanted, and as the library can list."""
        if not self._forces or not self.grammar.lists_forced:
            return []
        found = self._matcher.compute_ff_tokens()[: _MOST_FORCED - len(self.forced)]
        if self.grammar.tokenizer.has_more:
            vocab_size = self.grammar.tokenizer.vocab_size
            found = list(itertools.takewhile(lambda token: token < vocab_size, found))
        return found if self._eos_ids.isdisjoint(found) else []

    def _is_wide(self) -> bool:
        """Whether nearly anything may be next, so that tokens are tried: what was said alone decides it."""
        wide = self._leeway.look_for_text(self._matcher)
        _check(self._matcher)
        return wide

    def _begin_trial(self, began: float) -> None:
        """Have tokens tried, and where that could take long, find what is allowed, which changes nothing else."""
        self.is_tried = True
        is_wary = self._wary > 0 and self._leeway.room <= self._room_in_vain
        self._wary -= self._wary > 0
        if not is_wary and not self._prepares() and time.thread_time() - began < _QUICK:
            self.is_open = True
            return
        self._find_allowed()
        # Of what is allowed the likeliest is found without trying.
        self.is_tried = self._trial is TrialKind.OF_DRAWN

    def _prepares(self) -> bool:
        return self.prepares or self.grammar.is_slow or self.grammar.is_aside

    def _find_allowed(self) -> None:
        self._matcher.unsafe_compute_mask_ptr(self._address, self._mask.nbytes)
        _check(self._matcher)
        if self.grammar.tokenizer.has_more:
            self._leave_out_others()

    def _leave_out_others(self) -> None:
        """Allow no token that the model has no number for."""
        if spare := len(self.allowed) * 32 - self.grammar.tokenizer.vocab_size:
            self.allowed.view(np.uint32)[-1] &= 0xFFFFFFFF >> spare
        if not self.allowed.any():
            raise GrammarError("the grammar allows only tokens here that the model has not")

    def take_forced(self) -> list[int]:
        """Return the tokens that were found to follow, once."""
        found, self.forced = self.forced, []
        return found


def _only_token(allowed: Int32s) -> int | None:
    """The token whose bit is the only one set, if it is."""
    # Counting is far cheaper than finding, and mostly there are many.
    if np.count_nonzero(allowed) != 1:
        return None
    words = allowed.view(np.uint32)
    word = int(words.argmax())
    bits = int(words[word])
    return None if bits & (bits - 1) else word * 32 + bits.bit_length() - 1


def _check(matcher: llguidance.LLMatcher) -> None:
    if matcher.is_error():
        raise GrammarError(first_line(matcher.get_error()))


def _whose(grammar: str, error: str) -> str:
    """Whose part of a grammar is wrong: that in which the error's place is, or else the last, which is of them all."""
    if GRAMMAR_PART not in grammar:
        return ""
    several = grammar.startswith("{")
    lines = (json.loads(grammar)["grammars"][0].get("lark_grammar", "") if several else grammar).split("\n")
    place = _PLACE.match(error)
    last = len(lines) if place is None else int(place[1])
    # The error shows its line, which may be one of another grammar.
    shown = place is not None and any(f" {last} | {line[:_SHOWN]}" in error for line in lines[last - 1 : last])
    if several and not shown:
        return ""
    owners = [line.removeprefix(GRAMMAR_PART) for line in lines[:last] if line.startswith(GRAMMAR_PART)]
    return f"{clip(owners[-1], _MOST_ERROR)}: " if owners else ""


def first_line(error: object) -> str:
    """What an error of the library says, without the state or the place that follows it over many lines."""
    lines = str(error).strip().split("\n")
    said = next((line for line in lines if line.startswith("error: ")), "") if lines[0].endswith(":") else ""
    if lines[0] in _NOTHING:
        return "nothing satisfies it"
    return f"{lines[0]} {said}".strip()[:_MOST_ERROR]

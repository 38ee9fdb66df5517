"""A sequence's tokens as the text that the client sees."""

from collections.abc import Sequence

import msgspec

from chairlift.core.finished import FinishReason
from chairlift.core.sequences.sampling import SamplingParams
from chairlift.text.detokenize import make_detokenizer
from chairlift.text.stop import StopAutomaton, StopStrings
from chairlift.text.tokenizer import Tokenizer


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
        tokenizer: Tokenizer,
        params: SamplingParams,
        prompt_ids: Sequence[int] = (),
        automaton: StopAutomaton | None = None,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._detokenizer = make_detokenizer(tokenizer.vocabulary, params.skip_special_tokens, prompt_ids, shown)
        self._stops = StopStrings(automaton, params.include_stop_str_in_output) if automaton is not None else None
        self._params = params
        self._end: TextDelta | None = None
        self._length = 0
        self.num_tokens = 0
        self.offsets: list[int] | None = None if params.logprobs is None else []

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
        if finish_reason is None and self._stops is None and self.offsets is None:
            # Nothing to look for, nothing to note.
            self.num_tokens += len(token_ids)
            return TextDelta("".join(map(self._detokenizer.push, token_ids)), len(token_ids))
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
        text = self._detokenizer.push(token_id)
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

"""Beam search: of many continuations the likeliest as wholes, found with calls of one token each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from chairlift.core.sequences.sampling_params import MAX_LOGPROBS, SamplingParams
from chairlift.library.outputs import BeamSearchOutput, BeamSearchSequence, RequestOutput

MAX_BEAMS = MAX_LOGPROBS // 2


class BeamSearchParams(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How to search, named as in vLLM. Raises ValueError naming the field when a value is out of range.

    A continuation's score is its log-probability divided by its length to the power of `length_penalty`.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        """Refuse, by name, any value outside its range."""
        if not 1 <= self.beam_width <= MAX_BEAMS:
            raise ValueError(f"beam_width must be between 1 and {MAX_BEAMS}, got {self.beam_width}")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")


@dataclass(slots=True)
class _Search:
    """One prompt's beams, and those that have ended."""

    prompt_ids: list[int]
    beams: list[BeamSearchSequence]
    ended: list[BeamSearchSequence] = field(default_factory=list)

    def extend(self, outputs: Sequence[RequestOutput], params: BeamSearchParams, eos_ids: Sequence[int]) -> None:
        """Take the likeliest next tokens of each beam, and keep the best of all."""
        found: list[BeamSearchSequence] = []
        for beam, output in zip(self.beams, outputs, strict=True):
            (sample,) = output.outputs
            for token, entry in (sample.logprobs or [{}])[0].items():
                longer = BeamSearchSequence([*beam.tokens, token], beam.cum_logprob + entry.logprob)
                if token in eos_ids and not params.ignore_eos:
                    longer.finish_reason = "stop"
                    self.ended.append(longer)
                else:
                    found.append(longer)
        found.sort(key=lambda beam: -beam.cum_logprob)
        self.beams = found[: params.beam_width]

    def best(self, params: BeamSearchParams, eos_ids: Sequence[int]) -> list[BeamSearchSequence]:
        """The best of all, by their scores."""
        for beam in self.beams:
            beam.finish_reason = "length"

        def score(beam: BeamSearchSequence) -> float:
            length = len(beam.tokens) - (beam.finish_reason == "stop" and beam.tokens[-1] in eos_ids)
            return float(beam.cum_logprob / max(length, 1) ** params.length_penalty)

        return sorted((*self.ended, *self.beams), key=score, reverse=True)[: params.beam_width]


def beam_search(
    prompts: Sequence[list[int]],
    params: BeamSearchParams,
    eos_ids: Sequence[int],
    generate: Callable[[list[list[int]], SamplingParams], list[RequestOutput]],
    decode: Callable[[list[int]], str],
) -> list[BeamSearchOutput]:
    """The best continuations of each prompt. `generate` is given prompts for one token each."""
    one = SamplingParams(temperature=0, max_tokens=1, logprobs=2 * params.beam_width, ignore_eos=params.ignore_eos)
    searches = [_Search(prompt, [BeamSearchSequence([], 0.0)]) for prompt in prompts]
    for _ in range(params.max_tokens):
        asked = [search.prompt_ids + beam.tokens for search in searches for beam in search.beams]
        if not asked:
            break
        outputs = iter(generate(asked, one))
        for search in searches:
            search.extend([next(outputs) for _ in search.beams], params, eos_ids)
    found = []
    for search in searches:
        best = search.best(params, eos_ids)
        for beam in best:
            beam.text = decode(beam.tokens)
        found.append(BeamSearchOutput(best))
    return found

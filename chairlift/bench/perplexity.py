"""How well a model predicts a text, in windows of equal length."""

import math
from dataclasses import dataclass
from statistics import stdev

from chairlift.core.sequences.sampling_params import SamplingParams
from chairlift.errors import ConfigError
from chairlift.library.llm import LLM
from chairlift.text.tokenizer import Tokenizer

WINDOW = 256


def windows_of(tokenizer: Tokenizer, text: str, most: int, window: int = WINDOW) -> list[list[int]]:
    """The text's first tokens, at most so many, in windows. Raises ConfigError if they do not fill one."""
    ids = tokenizer.encode(text, add_special_tokens=False)[:most]
    windows = [ids[start : start + window] for start in range(0, len(ids) - window + 1, window)]
    if not windows:
        raise ConfigError(
            f"{len(ids)} tokens of the text are too few: take a text, and --text-tokens, of at least {window}"
        )
    return windows


@dataclass
class Surprise:
    """Loss by window, nats a token of all but its first, and the likeliest token at each of those places."""

    losses: list[float]
    likeliest: list[int]

    @property
    def perplexity(self) -> float:
        """How many equally likely tokens the model wavers between."""
        return math.exp(sum(self.losses) / len(self.losses))

    def ratio(self, other: "Surprise") -> tuple[float, float]:
        """This perplexity over the other's, and the standard error of that as the windows differ."""
        differences = [one - two for one, two in zip(self.losses, other.losses, strict=True)]
        ratio = math.exp(sum(differences) / len(differences))
        return ratio, ratio * stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else math.nan

    def agreement(self, other: "Surprise") -> float:
        """Share of the places at which both find the same token likeliest."""
        pairs = list(zip(self.likeliest, other.likeliest, strict=True))
        return sum(one == two for one, two in pairs) / len(pairs)


def surprise(llm: LLM, windows: list[list[int]]) -> Surprise:
    """Have a model predict the windows."""
    losses, likeliest = [], []
    scored = llm.generate(windows, SamplingParams(max_tokens=1, prompt_logprobs=1), use_tqdm=False)
    for window, output in zip(windows, scored, strict=True):
        assert output.prompt_logprobs is not None
        loss = 0.0
        for token, entry in zip(window[1:], output.prompt_logprobs[1:], strict=True):
            assert entry is not None
            loss -= entry[token].logprob
            likeliest += [other for other, found in entry.items() if found.rank == 1][:1]
        losses.append(loss / (len(window) - 1))
    return Surprise(losses, likeliest)

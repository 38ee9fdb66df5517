"""How much one request for texts may be: its sequences, and what each of them takes along to the worker."""

from collections.abc import Sequence

from chairlift.core.sequences.sampling_params import SamplingParams
from chairlift.errors import InvalidRequest

# Each sequence takes along its prompt, its grammar and the token ids that its parameters are about. Those of a request
# have so many tokens at most, so many characters and so many ids.
_MOST_TOKENS, _MOST_GRAMMARS, _MOST_IDS = 2**23, 2**24, 2**20


def count_sequences(
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    grammar: str,
    bad_word_ids: Sequence[Sequence[int]],
    max_waiting: int,
) -> int:
    """The sequences of a request, `params.n` for each prompt.

    Raises InvalidRequest for more than the queue holds, or with more in all than a worker should be sent at once.
    """
    n, count, read = params.n, len(prompts) * params.n, sum(map(len, prompts))
    if count > max_waiting:
        message = f"{len(prompts)} prompts with n={n} are {count} sequences, more than the queue of {max_waiting}"
        raise InvalidRequest(f"{message} holds (max_waiting)", "n" if n > 1 else "prompt")
    if n * read > _MOST_TOKENS:
        problem = f"n={n} of prompts with {read} tokens are more than the {_MOST_TOKENS} tokens that a request may have"
        raise InvalidRequest(f"{problem}; send several", "n")
    if count * len(grammar) > _MOST_GRAMMARS:
        problem = f"{count} sequences with a grammar of {len(grammar)} characters are more than {_MOST_GRAMMARS} in all"
        raise InvalidRequest(f"{problem}; send several requests", "n")
    ids = {
        "bad_words": sum(map(len, bad_word_ids)),
        "allowed_token_ids": len(params.allowed_token_ids or ()),
        "logit_bias": len(params.logit_bias or ()),
    }
    each = sum(ids.values())
    if count * each > _MOST_IDS:
        problem = f"{count} sequences with {each} token ids each in {', '.join(ids)} are more than {_MOST_IDS} in all"
        raise InvalidRequest(f"{problem}; send several requests", max(ids, key=lambda name: ids[name]))
    return count

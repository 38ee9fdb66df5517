"""From a client's request to the core's: one sequence for each sample, with everything the core needs filled in."""

from collections.abc import Sequence

import msgspec

from chairlift.core.sequences.request import Request, check_fits
from chairlift.core.sequences.sampling import SamplingParams
from chairlift.errors import InvalidRequest
from chairlift.runners.sequences import SequenceInfo


def fan_out(
    request_id: str,
    prompt_ids: list[int],
    params: SamplingParams,
    *,
    info: SequenceInfo,
    eos_ids: Sequence[int],
    arrival: float,
    priority: int = 0,
    cache_salt: str = "",
    use_prefix_cache: bool = True,
    background: bool = False,
    hold_updates: bool = False,
) -> list[Request]:
    """Return `params.n` requests. Sample i of a seeded request uses `seed + i`; ids end in `-i` when n > 1.

    Raises InvalidRequest, naming the field, for lengths or token ids that this model can't take.
    """
    max_tokens = params.max_tokens or max(info.max_model_len - len(prompt_ids), 1)
    try:
        check_fits(
            len(prompt_ids),
            max_tokens,
            max_model_len=info.max_model_len,
            num_blocks=info.num_blocks,
            block_size=info.block_size,
        )
    except ValueError as error:
        raise InvalidRequest(str(error), "prompt") from None
    _check_token_ids("prompt", prompt_ids, info.vocab_size)
    _check_token_ids("stop_token_ids", params.stop_token_ids or [], info.vocab_size)
    _check_token_ids("logit_bias", list(params.logit_bias or {}), info.vocab_size)
    stop_ids = frozenset((*(params.stop_token_ids or ()), *(() if params.ignore_eos else eos_ids)))
    requests = []
    for index in range(params.n):
        one = params
        if params.n > 1:
            seed = None if params.seed is None else params.seed + index
            one = msgspec.structs.replace(params, n=1, seed=seed)
        requests.append(
            Request(
                id=request_id if params.n == 1 else f"{request_id}-{index}",
                prompt_ids=prompt_ids,
                params=one,
                max_tokens=max_tokens,
                arrival=arrival,
                priority=priority,
                stop_ids=stop_ids,
                cache_salt=cache_salt,
                use_prefix_cache=use_prefix_cache,
                background=background,
                hold_updates=hold_updates,
            )
        )
    return requests


def _check_token_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    bad = next((i for i in ids if not 0 <= i < vocab_size), None)
    if bad is not None:
        raise InvalidRequest(f"{name} holds token id {bad}, outside the vocabulary of {vocab_size}", name)

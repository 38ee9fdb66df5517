"""Whether a request could ever be served; the front asks before queueing it, the scheduler as it takes it in."""


def check_fits(num_prompt: int, max_tokens: int, *, max_model_len: int, num_blocks: int, block_size: int) -> None:
    """Raise ValueError, saying what to change, if a sequence of these lengths (in tokens) can never fit."""
    if num_prompt < 1 or max_tokens < 1:
        raise ValueError(
            f"a request needs a prompt and max_tokens of at least 1 token, got {num_prompt} and {max_tokens}"
        )
    total = num_prompt + max_tokens
    if total > max_model_len:
        raise ValueError(
            f"This model's maximum context length is {max_model_len} tokens. However, you asked for {total}: "
            f"{num_prompt} in the prompt and {max_tokens} of output. Shorten the prompt or max_tokens."
        )
    # The last token generated is never fed back, so it needs no place.
    if -(-(total - 1) // block_size) > num_blocks:
        raise ValueError(
            f"{num_prompt} prompt tokens and max_tokens={max_tokens} need more than the KV cache's "
            f"{num_blocks * block_size} tokens. Shorten the request, or have the server raise kv_cache_gb."
        )

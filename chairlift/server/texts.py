"""Texts and token ids from requests to encodings: tokenized off the event loop, checked against the model's length."""

from collections.abc import Sequence

from chairlift.engine.dispatcher import Answer
from chairlift.errors import InvalidRequest
from chairlift.runners.oneshot import Encoding
from chairlift.server.endpoint import Terms
from chairlift.server.errors import ApiError
from chairlift.server.oneshot import OneShotService
from chairlift.server.threads import off_loop
from chairlift.text.encoding import Cut, encode_pairs, encode_texts
from chairlift.text.tokenizer import Tokenizer


async def from_texts(service: OneShotService, texts: Sequence[str], cut: Cut | None, field: str) -> list[Encoding]:
    """Encodings of texts. Without a cut, one that is too long is an error."""
    tokenizer = tokenizer_of(service)
    encodings = await off_loop(sum(map(len, texts)), lambda: encode_texts(tokenizer, texts, cut))
    return check_lengths(service, encodings, field)


async def from_pairs(
    service: OneShotService, pairs: Sequence[tuple[str, str]], cut: Cut | None, field: str
) -> list[Encoding]:
    """Encodings of pairs of texts."""
    tokenizer = tokenizer_of(service)
    size = sum(len(first) + len(second) for first, second in pairs)
    encodings = await off_loop(size, lambda: encode_pairs(tokenizer, pairs, cut))
    return check_lengths(service, encodings, field)


def from_ids(service: OneShotService, prompts: Sequence[list[int]], field: str) -> list[Encoding]:
    """Encodings of token ids, taken as they are."""
    size = service.loaded().vocab_size
    for ids in prompts:
        if min(ids) < 0 or (size is not None and max(ids) >= size):
            raise InvalidRequest(f"{field} has token ids outside the vocabulary of {size}", field)
    return check_lengths(service, [Encoding(ids) for ids in prompts], field)


def check_lengths(service: OneShotService, encodings: list[Encoding], field: str) -> list[Encoding]:
    """The encodings, if all fit the model."""
    limit = service.loaded().max_tokens
    if limit is not None:
        for index, encoding in enumerate(encodings):
            if len(encoding.token_ids) > limit:
                which = f"{field}[{index}]" if len(encodings) > 1 else field
                message = f"{which} has {len(encoding.token_ids)} tokens, more than the {limit} that this model takes"
                raise ApiError(400, message, field, "context_length_exceeded")
    return encodings


def check_not_empty(texts: Sequence[str], field: str) -> None:
    """Refuse no text at all, and empty ones."""
    if not texts or not all(texts):
        raise ApiError(400, f"{field} must not be empty", field, "empty_input")


def tokenizer_of(service: OneShotService) -> Tokenizer:
    """The model's tokenizer; a model without one takes only token ids."""
    if service.tokenizer is None:
        raise InvalidRequest(f"`{service.name}` has no tokenizer here; send token ids")
    return service.tokenizer


async def run(service: OneShotService, encodings: Sequence[Encoding], terms: Terms) -> list[Answer]:
    """Answers, each encoding counted by its tokens."""
    sizes = [float(len(encoding.token_ids)) for encoding in encodings]
    return await service.infer(encodings, sizes=sizes, priority=terms.priority, timeout=terms.timeout)


def count(encodings: Sequence[Encoding]) -> int:
    """Tokens in all."""
    return sum(len(encoding.token_ids) for encoding in encodings)

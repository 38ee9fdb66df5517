"""Texts and token ids from requests to encodings: tokenized off the event loop, checked against the model's length."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from chairlift.engine.items.dispatcher import Answer
from chairlift.errors import InputTooLong, InvalidRequest
from chairlift.folders.sentence_files import SPLADE
from chairlift.runners.items import Encoding
from chairlift.server.http.api_errors import ApiError
from chairlift.server.http.exchange import Terms, off_loop
from chairlift.server.models.item_service import ItemService
from chairlift.text.encoding import Cut, TextEncoder

T = TypeVar("T")

_WHOLE = frozenset({int})
# Ids that are looked at in one go, in which nobody else has the interpreter.
_PIECE = 2**16
# Ids that are in the vocabulary by chance are taken for this model's, so whoever sends such has to be told here.
_OTHER_IDS = (
    "if another model's tokenizer made them, send texts instead (LangChain's OpenAIEmbeddings does so with "
    "check_embedding_ctx_length=False)"
)
# Of each there is a number for every word on its way here.
MAX_SPLADE_INPUTS = 512
# About what a text takes besides its characters, in characters.
_EACH_TEXT = 32
# Characters of a text that is paired with many others, in all those pairs: about what the largest body has by default.
_MOST_REPEATED = 2**22


async def from_texts(
    service: ItemService,
    texts: Sequence[str],
    cut: Cut | None,
    field: str,
    places: Sequence[str] | None = None,
    prompt_name: str | None = None,
) -> list[Encoding]:
    """Encodings of texts, with this prompt of the folder's or the default one.

    Without a cut, one that is too long is an error; `places` are what clients call each.
    """
    check_number(service, len(texts), field)
    encoder = encoder_of(service)

    def encode() -> list[Encoding]:
        return encoder.encode_texts(texts, truncate=cut or False, prompt_name=prompt_name)

    each = _EACH_TEXT + encoder.chars_around
    return await off_loop(sum(map(len, texts)) + each * len(texts), naming(field, len(texts), encode, places))


async def from_pairs(
    service: ItemService,
    pairs: Sequence[tuple[str, str]],
    cut: Cut | None,
    field: str,
    places: Sequence[str] | None = None,
    instruction: str | None = None,
) -> list[Encoding]:
    """Encodings of pairs of texts, as `from_texts`; an instruction takes the place of the folder's."""
    service.check_count(len(pairs))
    encoder = encoder_of(service)

    def work() -> list[Encoding]:
        template = None if instruction is None else encoder.instructed(instruction)
        encode = partial(encoder.encode_pairs, pairs, truncate=cut or False, template=template)
        return naming(field, len(pairs), encode, places)()

    each = _EACH_TEXT + encoder.chars_around + len(instruction or "")
    return await off_loop(sum(len(first) + len(second) + each for first, second in pairs), work)


def naming(field: str, number: int, work: Callable[[], T], places: Sequence[str] | None = None) -> Callable[[], T]:
    """The same work, its errors telling the client's name for what is wrong: by default, its place in the field."""

    def named() -> T:
        try:
            return work()
        except InputTooLong as error:
            if places is not None:
                raise InputTooLong(f"{places[error.index]}: {error}", field, error.index) from None
            which = f"{field}[{error.index}]: " if number > 1 else ""
            raise InputTooLong(f"{which}{error}", field, error.index) from None
        except InvalidRequest as error:
            raise InvalidRequest(str(error), field) from None

    return named


async def from_ids(service: ItemService, prompts: Sequence[list[int]], cut: Cut | None, field: str) -> list[Encoding]:
    """Encodings of token ids, taken as they are but for the cut. What is no number among them is refused."""
    check_number(service, len(prompts), field)
    info = service.loaded()
    for index, ids in enumerate(prompts):
        if cut is None and info.max_tokens is not None and len(ids) > info.max_tokens:
            message = f"{field}[{index}]: an input has {len(ids)} tokens, but the model takes {info.max_tokens}"
            raise InputTooLong(message, field, index)

    def encode() -> list[Encoding]:
        if not all(map(are_ids, prompts)):
            raise mixture(field)
        kept = prompts if cut is None else [_shorten(ids, cut, info.max_tokens) for ids in prompts]
        if any(min(ids) < 0 or (info.vocab_size is not None and max(ids) >= info.vocab_size) for ids in kept):
            problem = f"{field} has token ids outside the vocabulary of {info.vocab_size}"
            raise InvalidRequest(f"{problem}; {_OTHER_IDS}", field)
        return [Encoding(ids) for ids in kept]

    return await off_loop(sum(map(len, prompts)), encode)


def as_inputs(given: Sequence[Any]) -> Sequence[Any]:
    """Inputs, of which a single one's token ids may come without a list around them.

    That is told by the first of them, as there may be millions; `are_ids` looks at all.
    """
    return [given] if given and isinstance(given[0], int) else given


def are_ids(ids: Sequence[Any]) -> bool:
    """Whether all of a list are whole numbers."""
    return all(_WHOLE.issuperset(map(type, ids[at : at + _PIECE])) for at in range(0, len(ids), _PIECE))


def mixture(field: str, kinds: str = "texts, token ids or lists of token ids") -> InvalidRequest:
    """The refusal of inputs that are not all of one of these kinds."""
    return InvalidRequest(f"{field} must be {kinds}, not a mixture", field)


def check_number(service: ItemService, number: int, field: str) -> None:
    """Refuse more texts than may wait, or than there is room for numbers for every word of each."""
    service.check_count(number)
    if service.loaded().pooling == SPLADE and number > MAX_SPLADE_INPUTS:
        problem = f"{field} holds {number} inputs, more than the {MAX_SPLADE_INPUTS} that a SPLADE model takes at once"
        raise ApiError(413, problem, field, "too_many_inputs")


def _shorten(ids: list[int], cut: Cut, max_tokens: int | None) -> list[int]:
    length = min((each for each in (cut.length, max_tokens) if each is not None), default=len(ids))
    if len(ids) <= length:
        return ids
    return ids[:length] if cut.side == "right" else ids[-length:]


def check_repeated(text: str, times: int, field: str) -> None:
    """Refuse a text that goes with so many others that a short request would take very long to tokenize."""
    if len(text) * times > _MOST_REPEATED:
        problem = (
            f"{field} has {len(text)} characters, which beside {times} others are more than {_MOST_REPEATED} in all"
        )
        raise InvalidRequest(f"{problem}; shorten it, or send fewer at once", field)


def check_instruction(instruction: str | None, times: int) -> None:
    """Refuse an instruction that is empty, or that goes with so many pairs that it takes very long to tokenize."""
    if instruction is None:
        return
    if not instruction:
        problem = "instruction must not be empty; leave it out for that of the model's folder"
        raise InvalidRequest(problem, "instruction")
    check_repeated(instruction, times, "instruction")


def check_not_empty(texts: Sequence[str], field: str) -> None:
    """Refuse no text at all, and empty ones."""
    if not texts or not all(texts):
        raise ApiError(400, f"{field} must not be empty", field, "empty_input")


def encoder_of(service: ItemService) -> TextEncoder:
    """What makes token ids of the model's texts; a model without takes only token ids."""
    if service.encoder is None:
        raise InvalidRequest(f"`{service.name}` has no tokenizer here; send token ids")
    return service.encoder


async def run(service: ItemService, encodings: Sequence[Encoding], terms: Terms) -> list[Answer]:
    """Answers, each encoding counted by its tokens."""
    sizes = [float(len(encoding.token_ids)) for encoding in encodings]
    return await service.infer(encodings, terms, sizes)


def count(encodings: Sequence[Encoding]) -> int:
    """Tokens in all."""
    return sum(len(encoding.token_ids) for encoding in encodings)

"""Prompts for filling in what is between two texts, by the tokens that a model has for it."""

from typing import Literal, NamedTuple

from chairlift.errors import InvalidRequest
from chairlift.text.tokenizer import Tokenizer


class _Form(NamedTuple):
    """The tokens before the prefix and the suffix, and after both, in whichever order these stand."""

    prefix: str
    suffix: str
    middle: str | None
    first: Literal["prefix", "suffix"] = "prefix"


# Of Qwen2.5-Coder and CodeGemma, StarCoder and Granite, SantaCoder, DeepSeek-Coder, Code Llama, Codestral.
_FORMS = (
    _Form("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    _Form("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    _Form("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    _Form("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    _Form("▁<PRE>", "▁<SUF>", "▁<MID>"),
    _Form("[PREFIX]", "[SUFFIX]", None, first="suffix"),
)


def fill_in_ids(tokenizer: Tokenizer, prefix: str, suffix: str, parse_special: bool) -> list[int]:
    """The prompt that has a model write what is between two texts. Raises InvalidRequest if it has no tokens for it."""
    find = tokenizer.backend.token_to_id
    form = next((form for form in _FORMS if find(form.prefix) is not None and find(form.suffix) is not None), None)
    if form is None or (form.middle is not None and find(form.middle) is None):
        raise InvalidRequest("this model has no tokens for filling in; leave suffix out", "suffix")
    texts = tokenizer.encode_batch([prefix, suffix], add_special_tokens=False, parse_special=parse_special)
    parts = {"prefix": [find(form.prefix), *texts[0]], "suffix": [find(form.suffix), *texts[1]]}
    begins = tokenizer.bos_id is not None and tokenizer.encode("")[:1] == [tokenizer.bos_id]
    first, second = ("prefix", "suffix") if form.first == "prefix" else ("suffix", "prefix")
    head = [tokenizer.bos_id] if begins and tokenizer.bos_id is not None else []
    end = [] if form.middle is None else [find(form.middle)]
    return [each for each in (*head, *parts[first], *parts[second], *end) if each is not None]

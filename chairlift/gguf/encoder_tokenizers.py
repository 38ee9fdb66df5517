"""tokenizer.json and its companions of an encoder, made from a GGUF file's metadata."""

from collections.abc import Mapping
from typing import Any

from chairlift.errors import UnsupportedModel
from chairlift.gguf.gguf_file import shown
from chairlift.gguf.text_ends import text_ends
from chairlift.gguf.tokenizer_files import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    added_token,
    byte_pairs,
    list_of,
    token_id,
)
from chairlift.gguf.unigrams import unigrams
from chairlift.gguf.word_pieces import plain_pieces, word_pieces

_MODEL = "model"
# The keys that name a text's first token, its last one, and the one for what is unknown; and what these are called by
# the kinds of tokenizers where files don't say.
_KEYS = ("cls_token_id", "bos_token_id"), ("seperator_token_id", "eos_token_id"), ("unknown_token_id",)
_NAMED = {"bert": ("[CLS]", "[SEP]", "[UNK]"), "t5": ("<s>", "</s>", "<unk>"), "gpt2": ("<s>", "</s>", "<unk>")}
# Those by whose rule texts are cut into words that have one token between the two of a pair.
_ONE_BETWEEN = ("modern-bert",)


def encoder_tokenizer_files(metadata: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the contents of tokenizer.json, tokenizer_config.json and generation_config.json.

    `name` is the file's, for errors. Raises UnsupportedModel naming the key at fault.
    """
    told = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    tokens, kinds = list_of(told, "tokens", str, name), told.get("token_type")
    kinds = [NORMAL] * len(tokens) if kinds is None else list_of(told, "token_type", int, name)
    if len(kinds) != len(tokens):
        raise UnsupportedModel(f"tokenizer.ggml.token_type of {name} is not as long as its tokens")
    model = told.get(_MODEL)
    if not isinstance(model, str) or model not in _NAMED:
        known = ", ".join(_NAMED)
        raise UnsupportedModel(f"tokenizer.ggml.model {shown(model)} of {name} is not read; these are: {known}")
    if model == "bert":
        tokens = plain_pieces(tokens, kinds)
    if len(set(tokens)) < len(tokens):
        raise UnsupportedModel(f"tokenizer.ggml.tokens of {name} has a token twice")
    first, last, unknown = (
        _named(told, keys, text, tokens, name) for keys, text in zip(_KEYS, _NAMED[model], strict=True)
    )
    if model == "bert":
        # Around all texts, whatever a file says of that, as llama.cpp does it.
        made = word_pieces(told, tokens, kinds, unknown)
        ends = text_ends(tokens, first, last, second=1)
    else:
        _check_ends(told, name)
        made = unigrams(told, tokens, kinds, unknown, name) if model == "t5" else byte_pairs(told, tokens, name)
        ends = text_ends(tokens, first, last, between=1 if told.get("pre") in _ONE_BETWEEN else 2)
    special = {first, last, unknown}
    whole = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            added_token(number, token, number in special or kind != USER_DEFINED, strips=False)
            for number, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if token and (number in special or kind in (CONTROL, UNKNOWN, USER_DEFINED))
        ],
        **made,
        "post_processor": ends,
    }
    named = {"cls_token": tokens[first], "sep_token": tokens[last], "unk_token": tokens[unknown]}
    return {"tokenizer.json": whole, "tokenizer_config.json": named, "generation_config.json": {}}


def _check_ends(told: Mapping[str, Any], name: str) -> None:
    """Raise UnsupportedModel for texts without what encoders of these kinds have around them."""
    for key in ("add_bos_token", "add_eos_token"):
        if told.get(key, True) is not True:
            problem = f"tokenizer.ggml.{key} = {shown(told[key])} of {name}, an encoder, is not read"
            raise UnsupportedModel(f"{problem}: its texts begin and end with a token of their own")


def _named(told: Mapping[str, Any], keys: tuple[str, ...], text: str, tokens: list[str], name: str) -> int:
    """The token that the first key names that is there, or of this text."""
    for key in keys:
        if (found := token_id(told, key, tokens, name)) is not None:
            return found
    if text not in tokens:
        raise UnsupportedModel(f"tokenizer.ggml.{keys[0]} is missing in {name}, and no token is {text!r}")
    return tokens.index(text)

"""tokenizer.json and its companions of an encoder, made from a GGUF file's metadata."""

from collections.abc import Mapping
from typing import Any

from chairlift.errors import UnsupportedModel
from chairlift.gguf.gguf_file import shown
from chairlift.gguf.text_ends import text_ends
from chairlift.gguf.tokenizer_files import CONTROL, NORMAL, UNKNOWN, USER_DEFINED, added_token, list_of, token_id
from chairlift.gguf.word_pieces import plain_pieces, word_pieces

_MODEL = "model"


def encoder_tokenizer_files(metadata: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the contents of tokenizer.json, tokenizer_config.json and generation_config.json.

    `name` is the file's, for errors. Raises UnsupportedModel naming the key at fault.
    """
    told = {key.removeprefix("tokenizer.ggml."): value for key, value in metadata.items()}
    tokens, kinds = list_of(told, "tokens", str, name), told.get("token_type")
    kinds = [NORMAL] * len(tokens) if kinds is None else list_of(told, "token_type", int, name)
    if len(kinds) != len(tokens):
        raise UnsupportedModel(f"tokenizer.ggml.token_type of {name} is not as long as its tokens")
    if told.get(_MODEL) != "bert":
        raise UnsupportedModel(f"tokenizer.ggml.model {shown(told.get(_MODEL))} of {name} is not read; bert is")
    tokens = plain_pieces(tokens, kinds)
    if len(set(tokens)) < len(tokens):
        raise UnsupportedModel(f"tokenizer.ggml.tokens of {name} has a token twice")
    # What a file leaves out is what tokens of BERT's are called. It is put around all texts, whatever a file says of
    # that, as llama.cpp does it.
    first = _named(told, ("cls_token_id", "bos_token_id"), "[CLS]", tokens, name)
    last = _named(told, ("seperator_token_id", "eos_token_id"), "[SEP]", tokens, name)
    unknown = _named(told, ("unknown_token_id",), "[UNK]", tokens, name)
    made = word_pieces(told, tokens, kinds, unknown)
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
        "post_processor": text_ends(tokens, first, last, second=1),
    }
    named = {"cls_token": tokens[first], "sep_token": tokens[last], "unk_token": tokens[unknown]}
    return {"tokenizer.json": whole, "tokenizer_config.json": named, "generation_config.json": {}}


def _named(told: Mapping[str, Any], keys: tuple[str, ...], text: str, tokens: list[str], name: str) -> int:
    """The token that the first key names that is there, or of this text."""
    for key in keys:
        if (found := token_id(told, key, tokens, name)) is not None:
            return found
    if text not in tokens:
        raise UnsupportedModel(f"tokenizer.ggml.{keys[0]} is missing in {name}, and no token is {text!r}")
    return tokens.index(text)

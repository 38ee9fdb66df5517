"""A model folder's tokenizer.json, with the tokens that only the files beside it add."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken

from chairlift.errors import UnsupportedModel, clip
from chairlift.folders.end_tokens import special_tokens, token_text
from chairlift.folders.model_json import NO_TOKENIZER, read_object

# The largest that models come with have some 35 MB.
_MAX_BYTES = 2**28
# Tokens that the files beside it may list, each of which the library compares with all others, and characters of one.
# Models list up to some 6,500, of up to some 60 characters.
_MOST_TOKENS, _LONGEST_TOKEN = 2**14, 256
# Digits of an id.
_LONGEST_ID = 9
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
# A token as the library saves it: its content and its flags.
TokenForm = dict[str, Any]


class TokenizerFiles(NamedTuple):
    """The library's tokenizer, what tokenizer_config.json says, and the special tokens that have a name, by it."""

    backend: tokenizers.Tokenizer
    config: dict[str, Any]
    special: dict[str, str]


def read_tokenizer(folder: Path) -> TokenizerFiles:
    """Read tokenizer.json, and add the tokens that tokenizer_config.json, or else added_tokens.json, alone lists.

    As in transformers, those of tokenizer_config.json are as that says also where tokenizer.json has them otherwise,
    but for their ids. Raises UnsupportedModel naming the file, also for a token that would get another id than the one
    it is listed with, or that the model has no number for; and ConfigError.
    """
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise UnsupportedModel(f"{folder} {NO_TOKENIZER}")
    if file.stat().st_size > _MAX_BYTES:
        raise UnsupportedModel(f"{file} has {file.stat().st_size} bytes, more than {_MAX_BYTES}")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        raise UnsupportedModel(f"{file} can't be read: {error}") from error
    config = read_object(folder / "tokenizer_config.json")
    special = special_tokens(folder, config)
    known = backend.get_added_tokens_decoder()
    source, listed = _listed(folder, config, special, known)
    # Mostly there are none: to add any takes as long as to add all.
    lacking = {each: listed[each] for each in sorted(listed) if each not in known or listed[each] != _form(known[each])}
    if lacking:
        _add(backend, lacking, source, _vocab_size(folder))
    return TokenizerFiles(backend, config, special)


def _listed(
    folder: Path, config: Mapping[str, Any], special: Mapping[str, str], known: Mapping[int, AddedToken]
) -> tuple[Path, dict[int, TokenForm]]:
    """The tokens by id that files beside tokenizer.json list, and the file they are in; `known` are its own."""
    path, names = folder / "tokenizer_config.json", set(special.values())
    listed = config.get("added_tokens_decoder")
    if listed is not None:
        if not isinstance(listed, dict):
            raise UnsupportedModel(f"{path}: added_tokens_decoder must be an object, got {clip(repr(listed), 80)}")
        return path, _read_tokens(listed.items(), path, names)
    # Older folders, in which tokenizer.json goes first.
    path, names = folder / "added_tokens.json", names | _nameless(folder, config)
    contents = {token.content for token in known.values()}
    tokens = _read_tokens(((given, text) for text, given in read_object(path).items()), path, names)
    return path, {each: form for each, form in tokens.items() if each not in known and form["content"] not in contents}


def _nameless(folder: Path, config: Mapping[str, Any]) -> set[str]:
    """The special tokens that have no name."""
    found = set()
    for source in (read_object(folder / "special_tokens_map.json"), config):
        for field in ("additional_special_tokens", "extra_special_tokens"):
            given = source.get(field)
            for value in given.values() if isinstance(given, dict) else given if isinstance(given, list) else ():
                if (text := token_text(value)) is not None:
                    found.add(text)
    return found


def _read_tokens(given: Iterable[tuple[Any, Any]], path: Path, names: set[str]) -> dict[int, TokenForm]:
    """Tokens by id, of ids and what is listed with them; those of `names` are special."""
    found: dict[int, TokenForm] = {}
    for token_id, value in given:
        text, number = token_text(value), str(token_id)
        if text is None or len(text) > _LONGEST_TOKEN:
            problem = f"an added token must be a text of up to {_LONGEST_TOKEN} characters"
            raise UnsupportedModel(f"{path}: {problem}, got {clip(repr(value), 80)}")
        if not number.isdecimal() or len(number) > _LONGEST_ID:
            raise UnsupportedModel(f"{path}: {clip(repr(token_id), 80)} is no id of a token")
        flags = value if isinstance(value, dict) else {}
        special = flags.get("special", False) or text in names
        form = {"content": text, **dict.fromkeys(_FLAGS, False), "normalized": not special}
        form |= {name: flags[name] for name in _FLAGS if name in flags} | {"special": special}
        # Of an empty one there is nothing to find in a text; transformers leaves it out too.
        if text:
            found[int(number)] = form
        if len(found) > _MOST_TOKENS:
            raise UnsupportedModel(f"{path} lists more than {_MOST_TOKENS} tokens, which is more than any model adds")
    return found


def _form(token: AddedToken) -> TokenForm:
    form: TokenForm = token.__getstate__()
    return form


def _add(backend: tokenizers.Tokenizer, forms: Mapping[int, TokenForm], path: Path, vocab_size: int | None) -> None:
    try:
        tokens = {each: AddedToken(**form) for each, form in forms.items()}
    except (TypeError, ValueError) as error:
        raise UnsupportedModel(f"{path}: an added token has a flag that is none, or is no text: {error}") from error
    new = {each: token.content for each, token in tokens.items() if backend.token_to_id(token.content) is None}
    for token_id, text in new.items():
        if vocab_size is not None and token_id >= vocab_size:
            problem = f"{path}: {clip(repr(text), 80)} has the id {token_id}, but the model has {vocab_size} tokens"
            raise UnsupportedModel(f"{problem} by its config.json; remove it from there")
    backend.add_tokens(list(tokens.values()))
    for token_id, text in new.items():
        if (found := backend.token_to_id(text)) != token_id:
            problem = f"{path}: {clip(repr(text), 80)} has the id {token_id}, but behind tokenizer.json it is {found}"
            raise UnsupportedModel(f"{problem}; give the tokens that tokenizer.json has not the ids that come next")


def _vocab_size(folder: Path) -> int | None:
    """The tokens that the model has numbers for; None if its config.json does not say."""
    config = read_object(folder / "config.json")
    nested = config.get("text_config")
    for source in (nested if isinstance(nested, dict) else {}, config):
        if isinstance(found := source.get("vocab_size"), int):
            return found
    return None

"""Texts and pairs of texts as token ids with special tokens, for encoders. Without torch."""

import json
import os
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, compress
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import tokenizers
from tokenizers import processors

from chairlift.errors import InputTooLong, InvalidRequest, UnsupportedModel, clip
from chairlift.folders.end_tokens import special_tokens
from chairlift.folders.model_json import read_object
from chairlift.folders.sentence_files import SentenceFiles
from chairlift.runners.items import Encoding
from chairlift.text.message_template import MessageTemplate, MessageTemplates
from chairlift.text.tokenizer import Tokenizer, encode_all

Side = Literal["left", "right"]
# Tokens that are told one by one in an answer.
MAX_TOKENS_TOLD = 2**17
# Characters that are encoded at once, after which what else comes waits: the library takes some 400 bytes for each.
# A text has no more, unless the model takes so many tokens.
_SLICE_CHARS = 2**19
_CHARS_PER_TOKEN = 16
# Characters that are counted at once, without anybody else having the interpreter.
_PIECE = 2**16
# Classes of tokenizers that do as `add_eos_token` in tokenizer_config.json says; others never looked at it.
_HEED_EOS = {f"{name}Tokenizer" for name in ("Llama", "CodeLlama", "Gemma", "Cohere", "GPTNeoX")}


class Cut(NamedTuple):
    """How to cut what is too long: to `length` tokens if the model takes more than that, taking from `side`.

    The second of a pair may have at most `second` tokens by itself, special ones not counted.
    """

    length: int | None = None
    side: Side = "right"
    second: int | None = None


class TextToken(msgspec.Struct):
    """A token and where it is in its text, in characters; one that was put around the text is nowhere in it."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


class TextEncoder:
    """Encodes for one model. Safe to share between threads: nothing changes after loading.

    Special tokens and type ids are what the post-processor in tokenizer.json says, and the token that ends a text is
    there if tokenizer_config.json asks for it; what looks like one in a text is text. A text (or pair) of more than
    `max_tokens`, special ones counted, is cut, or refused, as the caller asks. Where texts are messages of a chat, they
    are what the chat template makes of them, of which only the texts are ever cut. `chars_around` are the most
    characters that the folder has put around a text or pair: by a prompt, or the template.
    """

    def __init__(self, folder: str | os.PathLike[str], max_tokens: int, files: SentenceFiles | None = None) -> None:
        """Read the folder's tokenizer; `files` say whether texts are made lowercase or messages, and have its prompts.

        Raises UnsupportedModel, and ConfigError for a chat template that leaves no room for texts.
        """
        files = files or SentenceFiles()
        self.max_tokens = max_tokens
        self._lowercase = files.lowercase
        self._prompts, self._default_prompt = files.prompts or {}, files.default_prompt
        self._tokenizer = Tokenizer.from_folder(folder)
        self._templates: MessageTemplates | None = None
        self.chars_around = max(map(len, self._prompts.values()), default=0)
        if files.chat is not None:
            self._templates = MessageTemplates(self._tokenizer, files.chat, files, max_tokens)
            self.chars_around = self._templates.most_chars
        _end_texts(self._tokenizer.backend, Path(folder))
        self._backend, self._lengths = self._tokenizer.backend, self._tokenizer.lengths

    def check_prompt(self, name: str | None) -> None:
        """Raise InvalidRequest for a prompt that the folder does not have."""
        if name is not None and name not in self._prompts:
            known = clip(", ".join(self._prompts) or "none", 200)
            problem = f"prompt_name {clip(repr(name), 80)} is not one of this model's prompts: {known}"
            raise InvalidRequest(problem, "prompt_name")

    def encode_texts(
        self, texts: Sequence[str], *, truncate: bool | Cut = False, prompt_name: str | None = None
    ) -> list[Encoding]:
        """Encode texts with this prompt of the folder's, or the default one.

        Raises InputTooLong if one is and `truncate` is off, InvalidRequest if it is no Unicode.
        """
        if not texts:
            return []
        name = self._default_prompt if prompt_name is None else prompt_name
        template = None if self._templates is None else self._templates.of_text(name)
        return self._encode(self._given(texts, name, template), truncate, template)

    def encode_pairs(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        truncate: bool | Cut = False,
        template: MessageTemplate | None = None,
    ) -> list[Encoding]:
        """Encode pairs such as query and document, cutting the longer part first. Raises as `encode_texts`.

        `template` is what `instructed` gives, where there is an instruction.
        """
        if template is None and self._templates is not None:
            template = self._templates.of_pair()
        if template is not None:
            trimmed = (template.trimmed(*pair) for pair in pairs)
            return self._encode([(one, other) for one, other in trimmed], truncate, template)
        firsts = self._given([one for one, _ in pairs], self._default_prompt)
        seconds = self._given([other for _, other in pairs])
        return self._encode(list(zip(firsts, seconds, strict=True)), truncate, None)

    def instructed(self, instruction: str) -> MessageTemplate:
        """The template of pairs with an instruction in the place of the folder's. Raises InvalidRequest."""
        if self._templates is None:
            problem = "this model takes no instruction, since its texts go through no chat template; leave it out"
            raise InvalidRequest(problem, "instruction")
        if _size(instruction) > self._most_chars:
            raise InvalidRequest(f"instruction has more than {self._most_chars} characters; shorten it", "instruction")
        return self._templates.instructed(instruction)

    def tokens(
        self, texts: Sequence[str], add_special_tokens: bool = True, prompt_name: str | None = None
    ) -> list[list[TextToken]]:
        """Take texts apart, behind this prompt of the folder's, if any.

        Raises InvalidRequest if one is no Unicode or too long, or all exceed MAX_TOKENS_TOLD.
        """
        template = self._template_told(add_special_tokens, prompt_name)
        texts = [self._prefix(prompt_name) + text for text in texts]
        given = self._given(texts, template=template)
        self._refuse_large(given)
        backend, ids_of = self._backend_for(given, template)
        marked = backend is not self._backend
        written = given if template is None else [template.prompt(text, marked) for text in given]
        encodings: list[tokenizers.Encoding] = []
        number = 0
        for some in _slices(written):
            try:
                # The fast call does not say where tokens are.
                encodings += backend.encode_batch(some, add_special_tokens=add_special_tokens and template is None)
            except (TypeError, UnicodeError) as error:
                raise InvalidRequest("a text is not valid Unicode (it holds a lone surrogate?)", "inputs") from error
            number += sum(map(len, encodings[-len(some) :]))
            if number > MAX_TOKENS_TOLD:
                raise InvalidRequest(f"the texts have more than {MAX_TOKENS_TOLD} tokens; send fewer", "inputs")
        places = [None if template is None else template.places(text, marked)[0] for text in given]
        return [self._told(*each, ids_of) for each in zip(texts, given, places, encodings, strict=True)]

    def _template_told(self, add_special_tokens: bool, prompt_name: str | None) -> MessageTemplate | None:
        """The template of texts that are taken apart; None if it is not to be there, or is for pairs alone."""
        if self._templates is None:
            return None
        if not add_special_tokens:
            if prompt_name is not None:
                problem = "prompt_name is what the system says in the chat template, which is left out without"
                raise InvalidRequest(f"{problem} add_special_tokens; set that, or leave prompt_name out", "prompt_name")
            return None
        if prompt_name is None and not self._templates.takes_texts:
            return None
        return self._templates.of_text(prompt_name)

    def _prefix(self, prompt_name: str | None) -> str:
        """What a prompt puts before a text; nothing where it is a message of its own."""
        return "" if prompt_name is None or self._templates is not None else self._prompts[prompt_name]

    def _given(
        self, texts: Sequence[str], prompt_name: str | None = None, template: MessageTemplate | None = None
    ) -> list[str]:
        """Texts as they are to be encoded."""
        prefix = self._prefix(prompt_name)
        given = [prefix + text for text in texts]
        if template is not None:
            given = [template.trimmed(text)[0] for text in given]
        return [text.lower() for text in given] if self._lowercase else given

    def _told(
        self,
        text: str,
        given: str,
        place: tuple[int, int] | None,
        encoding: tokenizers.Encoding,
        ids_of: Callable[[tokenizers.Encoding], list[int]],
    ) -> list[TextToken]:
        """The tokens of what was `given` for a text, and where they are in the text; `place` is where it is in a
        prompt, if that was encoded."""
        offsets: Sequence[tuple[int, int]] = encoding.offsets
        around: Sequence[int] = encoding.special_tokens_mask
        if place is not None:
            begin, end = place
            around = [stop <= begin or start >= end for start, stop in offsets]
            # The template may have trimmed the text.
            shift = text.find(given) - begin
            offsets = [(max(start, begin) + shift, min(stop, end) + shift) for start, stop in offsets]
        elif len(given) != len(text):
            # Few letters have small ones of more than one character.
            places = [place for place, letter in enumerate(text) for _ in letter.lower()] + [len(text)]
            ends = [0, *(place + 1 for place in places)]
            offsets = [(places[start], max(ends[stop], places[start])) for start, stop in offsets]
        found = zip(ids_of(encoding), around, offsets, strict=True)
        return [
            TextToken(token_id, self._tokenizer.token_text(token_id), True, None, None)
            if added
            else TextToken(token_id, text[start:stop], False, start, stop)
            for token_id, added, (start, stop) in found
        ]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of token ids. Raises InvalidRequest for one that there is not."""
        if any(not 0 <= each < self._tokenizer.vocab_size for each in ids):
            raise InvalidRequest(f"token ids must be from 0 to {self._tokenizer.vocab_size - 1}", "ids")
        return self._tokenizer.decode(ids, skip_special_tokens)

    def _backend_for(
        self, given: Sequence[str | tuple[str, str]], template: MessageTemplate | None
    ) -> tuple[tokenizers.Tokenizer, Callable[[tokenizers.Encoding], list[int]]]:
        """The tokenizer for texts, in which what looks like a special token is text, and what has its tokens' ids."""
        instructed = template is not None and template.has_special
        if instructed or any(map(self._tokenizer.has_special, chain.from_iterable(map(_parts, given)))):
            return self._tokenizer.lookalikes.backend, self._tokenizer.lookalikes.ids
        return self._backend, attrgetter("ids")

    def _encode(
        self, given: Sequence[str | tuple[str, str]], truncate: bool | Cut, template: MessageTemplate | None
    ) -> list[Encoding]:
        cut = truncate if isinstance(truncate, Cut) else Cut()
        limit = self.max_tokens if cut.length is None else min(cut.length, self.max_tokens)
        if template is not None and limit <= template.fixed_tokens:
            problem = f"an input can't be cut to {limit} tokens, since the chat template puts {template.fixed_tokens}"
            raise InvalidRequest(f"{problem} around it; ask for more", "input")
        # Above this many tokens it takes a closer look: a second part may be too long in an input that is not.
        harmless = limit if cut.second is None else min(limit, cut.second)
        if truncate is False:
            self._refuse_long(given)
        try:
            if truncate is not False and cut.side == "right":
                given = [self._head(text, limit, cut) for text in given]
        except (TypeError, UnicodeError) as error:
            raise InvalidRequest("a text is not valid Unicode (it holds a lone surrogate?)", "input") from error
        self._refuse_large(given)
        backend, ids_of = self._backend_for(given, template)
        marked = backend is not self._backend
        texts: Sequence[str | tuple[str, str]] = given
        if template is not None:
            texts = [template.prompt(text, marked) for text in given]
        found = []
        encodings = chain.from_iterable(encode_all(backend, some, template is None) for some in _slices(texts))
        for index, encoding in enumerate(encodings):
            if len(encoding) > harmless and truncate is False:
                message = f"an input has {len(encoding)} tokens, but the model takes {self.max_tokens}"
                raise InputTooLong(message, "input", index)
            ids, types = ids_of(encoding), encoding.type_ids
            if len(encoding) > harmless:
                parts = encoding.sequence_ids if template is None else template.parts(given[index], marked)
                kept = _kept(parts, limit, cut)
                ids, types = list(compress(ids, kept)), list(compress(types, kept))
            found.append(Encoding(ids, types if any(types) else None))
        return found

    def _refuse_long(self, given: Sequence[str | tuple[str, str]]) -> None:
        """Raise InputTooLong for what is too long whatever its tokens are."""
        for index, text in enumerate(given):
            parts = _parts(text)
            # A character has at most four bytes, and a token at least one: short texts need no look.
            if 4 * sum(map(len, parts)) <= self.max_tokens:
                continue
            least = sum(map(self._lengths.least_tokens, parts))
            if least > self.max_tokens:
                message = f"an input has at least {least} tokens, but the model takes {self.max_tokens}"
                raise InputTooLong(message, "input", index)

    @property
    def _most_chars(self) -> int:
        """The characters that a text, or a pair, may have to be tokenized."""
        return max(_SLICE_CHARS, _CHARS_PER_TOKEN * self.max_tokens)

    def _refuse_large(self, given: Sequence[str | tuple[str, str]]) -> None:
        """Raise InputTooLong for what would take too much memory to tokenize."""
        for index, text in enumerate(given):
            size = _size(text)
            if size > self._most_chars:
                problem = f"an input has {size} characters that would have to be tokenized, more than"
                raise InputTooLong(f"{problem} {self._most_chars}; send less of it", "input", index)

    def _head(self, text: str | tuple[str, str], limit: int, cut: Cut) -> str | tuple[str, str]:
        """As much of a text or pair as matters where `limit` tokens are kept; what follows need not be tokenized."""
        if isinstance(text, str):
            return self._head_of(text, limit)
        most = limit if cut.second is None else min(cut.second, limit)
        heads = self._head_of(text[0], limit), self._head_of(text[1], most)
        if heads == text or most < limit or _size(heads) > self._most_chars:
            return heads
        # Of two long parts the longer one may lose a token more, so it must be known which one that is.
        return heads if min(map(self._lengths.count, heads)) < limit else text

    def _head_of(self, text: str, limit: int) -> str:
        """A text's beginning that has `limit` tokens, looked for in as much of it as may be tokenized; or all of it."""
        most = self._most_chars
        if len(text) > most:
            text.encode()  # what is not looked at must be Unicode as well
        seen = text[:most]
        head = self._lengths.head(seen, limit) if _size(seen) <= most else seen
        return head if len(head) < len(seen) else text


def _end_texts(backend: tokenizers.Tokenizer, folder: Path) -> None:
    """Have texts end with the end token if tokenizer_config.json says so and tokenizer.json does not.

    Models that pool the last token were trained by the former (e5-mistral), which transformers 4 went by, too.
    """
    config = read_object(folder / "tokenizer_config.json")
    name = str(config.get("tokenizer_class") or "").removesuffix("Fast")
    # Code of the folder's own, which is never run, is there for such things.
    if not config.get("add_eos_token") or (name and name not in _HEED_EOS and "auto_map" not in config):
        return
    token = special_tokens(folder, config).get("eos_token")
    token_id = None if token is None else backend.token_to_id(token)
    if token is None or token_id is None:
        raise UnsupportedModel(
            f"{folder / 'tokenizer_config.json'} has add_eos_token, but no eos_token that is a token"
        )
    if backend.encode("a").ids[-1:] != [token_id]:
        saved = backend.post_processor and json.loads(backend.post_processor.__getstate__())
        made: Any = processors.TemplateProcessing("$A", "$A $B:1", [])
        made.__setstate__(json.dumps(_ended(saved, token, token_id, folder)).encode())
        backend.post_processor = made


def _ended(saved: dict[str, Any] | None, token: str, token_id: int, folder: Path) -> dict[str, Any]:
    """A post-processor, as it is saved, with a token behind each text."""
    steps = [] if saved is None else saved["processors"] if saved["type"] == "Sequence" else [saved]
    plain: dict[str, Any] = {"single": [_part("A", 0)], "pair": [_part("A", 0), _part("B", 1)], "special_tokens": {}}
    template = next((step for step in steps if step["type"] == "TemplateProcessing"), plain)
    others = [step for step in steps if step is not template]
    if any(step["type"] != "ByteLevel" for step in others):
        raise UnsupportedModel(f"{folder / 'tokenizer.json'}: add_eos_token with this post_processor is not supported")
    mark = {"id": token, "ids": [token_id], "tokens": [token]}
    forms: dict[str, list[Any]] = {"single": [], "pair": []}
    for name, pieces in forms.items():
        for piece in template[name]:
            pieces.append(piece)
            if "Sequence" in piece:
                pieces.append({"SpecialToken": {"id": token, "type_id": piece["Sequence"]["type_id"]}})
    special = {"special_tokens": {**template["special_tokens"], token: mark}}
    return {"type": "Sequence", "processors": [*others, {"type": "TemplateProcessing", **forms, **special}]}


def _part(name: str, type_id: int) -> dict[str, Any]:
    return {"Sequence": {"id": name, "type_id": type_id}}


def _slices(given: Sequence[str | tuple[str, str]]) -> Iterator[Sequence[str | tuple[str, str]]]:
    """So many at a time that what the library makes of them, some hundred bytes a character, is no more than that."""
    begin = size = 0
    for index, text in enumerate(given):
        more = _size(text)
        if size + more > _SLICE_CHARS and index > begin:
            yield given[begin:index]
            begin, size = index, 0
        size += more
    if begin < len(given):
        yield given[begin:]


def _size(text: str | tuple[str, str]) -> int:
    """The characters of a text or pair, or what a normalizer makes of them, if that is more."""
    return sum(len(part) if part.isascii() else _normalized_size(part) for part in _parts(text))


def _normalized_size(text: str) -> int:
    # Each letter by itself: to sort a text's accents takes Python time by the square of how many are in a row.
    counts = Counter[str]()
    for start in range(0, len(text), _PIECE):
        counts.update(text[start : start + _PIECE])
    return sum(count * len(unicodedata.normalize("NFKD", letter)) for letter, count in counts.items())


def _parts(text: str | tuple[str, str]) -> tuple[str, ...]:
    return (text,) if isinstance(text, str) else text


def _kept(parts: Sequence[int | None], limit: int, cut: Cut) -> list[bool]:
    """Which tokens of a text or pair that is too long are kept: `parts` has each one's part, None for special tokens.

    An encoding that the library cuts has all that is cut off too, and a pair of them each with each.
    """
    first, second = parts.count(0), parts.count(1)
    room = max(limit - (len(parts) - first - second), 0)
    if second == 0:
        most = [room, 0]
    else:
        second = second if cut.second is None else min(second, cut.second)
        # As transformers' longest_first: the shorter part stays whole as long as it is under half.
        short = min(first, second, room // 2)
        most = [short, room - short] if first <= second else [room - short, short]
        most[1] = min(most[1], second)
    skipped = [max(parts.count(part) - most[part], 0) if cut.side == "left" else 0 for part in (0, 1)]
    kept, seen = [], [0, 0]
    for part in parts:
        if part is None:
            kept.append(True)
        else:
            kept.append(0 <= seen[part] - skipped[part] < most[part])
            seen[part] += 1
    return kept

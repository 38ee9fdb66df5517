"""A model folder's tokenizer: text to token ids and back, special tokens, chat template."""

import os
import re
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

# Set before the library is first used. Its thread pool would fight the model for the cores, and a fork after the pool
# has started can deadlock; one prompt is encoded on one thread anyway.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import tokenizers

from chairlift.bodies import is_deep
from chairlift.errors import InvalidRequest
from chairlift.folders.end_tokens import end_token_ids
from chairlift.folders.tokenizer_json import read_tokenizer
from chairlift.text.chat_template import ChatTemplate, check_arguments, normalize_messages, plain, too_deep
from chairlift.text.detokenize import Vocabulary
from chairlift.text.dialect import CallForm
from chairlift.text.lengths import TextLengths
from chairlift.text.special_tokens import Lookalikes, any_of


class ChatPrompt(NamedTuple):
    """A rendered chat. `marked`, if it is there, is what is to be encoded: in it, only the template's own special
    tokens are any, while the messages hold some that are text."""

    text: str
    marked: str | None = None


class Tokenizer:
    """Encodes, decodes, and renders chats for one model. Safe to share between threads: nothing changes after loading.

    `eos_ids` are the tokens that end an answer, by any of the folder's files. `vocab_size` is the highest id plus one;
    the model's own vocabulary may be padded beyond it. `response_template` says how replies are written, where the
    folder does.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: tuple[int, ...] = (),
        bos_id: int | None = None,
        chat_template: ChatTemplate | None = None,
        response_template: dict[str, Any] | None = None,
    ) -> None:
        # A saved padding or truncation setting belongs to training: it would silently change prompts here.
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend
        self._chat_template = chat_template or ChatTemplate({}, {})
        self.vocabulary = Vocabulary(backend)
        self.lengths = TextLengths(backend)
        self.vocab_size = self.vocabulary.size
        self.eos_ids = eos_ids
        self.bos_id = bos_id
        self.response_template = response_template
        special = [token for token in backend.get_added_tokens_decoder().values() if token.special and token.content]
        self._special = sorted({token.content for token in special}, key=len, reverse=True)
        # What a normalizer makes a special token of can't be seen in a text.
        self._always = backend.normalizer is not None and any(token.normalized for token in special)
        self._first = {text[0] for text in self._special}
        self._pattern = re.compile(any_of(self._special) or "(?!)")
        # As bytes of JSON, each byte one letter here.
        written = [msgspec.json.encode(text)[1:-1].decode("latin-1") for text in self._special]
        self._first_written = {raw[0].encode("latin-1") for raw in written}
        self._pattern_written = re.compile(any_of(written).encode("latin-1") or b"(?!)")
        self._lookalikes: Lookalikes | None = None
        self._making = threading.Lock()

    @classmethod
    def from_folder(cls, path: str | os.PathLike[str]) -> "Tokenizer":
        """Read `tokenizer.json` and its companions from a Hugging Face model folder."""
        folder = Path(path)
        backend, config, special = read_tokenizer(folder)
        return cls(
            backend,
            eos_ids=end_token_ids(folder, special.get("eos_token"), backend.token_to_id),
            bos_id=backend.token_to_id(special["bos_token"]) if "bos_token" in special else None,
            chat_template=ChatTemplate.from_folder(folder, config, special),
            response_template=config.get("response_template"),
        )

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The library's own tokenizer, shared: not to be changed."""
        return self._backend

    def encode(self, text: str, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids of a text, as `encode_batch`."""
        return self.encode_batch([text], add_special_tokens, parse_special)[0]

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True, parse_special: bool = True
    ) -> list[list[int]]:
        """Token ids of many texts.

        `add_special_tokens` puts around each what the tokenizer says. Without `parse_special`, what looks like a
        special token in a text is text. Raises InvalidRequest if one is not Unicode.
        """
        if not parse_special and any(map(self.has_special, texts)):
            lookalikes = self.lookalikes
            return list(map(lookalikes.ids, encode_all(lookalikes.backend, texts, add_special_tokens)))
        return [list(each.ids) for each in encode_all(self._backend, texts, add_special_tokens)]

    def starts(self, text: str, parse_special: bool = True, add_special_tokens: bool = True) -> list[int]:
        """Where in a text each of its tokens begins, in characters, with those that the tokenizer puts around it."""
        special = parse_special or not self.has_special(text)
        backend = self._backend if special else self.lookalikes.backend
        return [start for start, _ in spans(backend.encode(text, add_special_tokens=add_special_tokens))]

    def word_ids(self, words: Sequence[str]) -> list[list[int]]:
        """The tokens of each word where nothing is before it, and where a space is."""
        found: list[list[int]] = []
        for word in words:
            bare, spaced = self.encode_batch([word.lstrip(), f" {word.lstrip()}"], False, False)
            found += [bare] if spaced == bare else [bare, spaced]
        return found

    def encode_chat(self, prompt: ChatPrompt) -> list[int]:
        """Token ids of a rendered chat, which brings its own special tokens."""
        if prompt.marked is None:
            return self.encode(prompt.text, add_special_tokens=False)
        return self.lookalikes.ids(encode_all(self.lookalikes.backend, [prompt.marked], False)[0])

    def has_special(self, text: str) -> bool:
        """Whether a text may hold what looks like a special token."""
        return self._always or (any(first in text for first in self._first) and self._pattern.search(text) is not None)

    @property
    def lookalikes(self) -> Lookalikes:
        """What keeps special tokens apart from texts that look like them; made when it is first needed."""
        with self._making:
            if self._lookalikes is None:
                self._lookalikes = Lookalikes(self._backend, self._special)
            return self._lookalikes

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids. Ids outside the vocabulary give nothing."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        """One token as text, as the OpenAI API shows it in logprobs; broken characters show as U+FFFD."""
        return self.vocabulary.bytes_of(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """One token as UTF-8 bytes, which may be part of a character."""
        return self.vocabulary.bytes_of(token_id)

    @property
    def chat_template(self) -> ChatTemplate:
        """The folder's chat templates; there may be none."""
        return self._chat_template

    @property
    def has_chat_template(self) -> bool:
        """Whether `render_chat` can work at all."""
        return self._chat_template.available

    def render_chat(
        self,
        messages: Sequence[Any],
        add_generation_prompt: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
        quick: bool = False,
        continue_final: bool = False,
        calls: CallForm | None = None,
    ) -> ChatPrompt:
        """The prompt of a chat, special tokens included. What looks like one in the messages stays text.

        `template_kwargs` reach the template as they are (`tools`, `documents`, `enable_thinking`, ...). With
        `continue_final` the prompt ends where the last message's content does. `calls` is the form in which calls are
        written for a template that has no place for them. Raises InvalidRequest, and with `quick` TooSlow for a
        rendering that should not be waited for.
        """
        arguments = plain(dict(template_kwargs or {}))
        check_arguments(arguments)
        template = self._chat_template
        chat = normalize_messages(messages, template.joins_arguments, template.knows_no_content)
        written = _written([chat, arguments])
        render = partial(template.render, size=len(written), quick=quick, continue_final=continue_final, calls=calls)
        if not self._always:
            holds = any(first in written for first in self._first_written)
            if not holds or self._pattern_written.search(written) is None:
                return ChatPrompt(render(chat, add_generation_prompt, arguments))
        hidden = self.lookalikes
        chat, arguments = hidden.hide(chat), hidden.hide(arguments)
        text = render(chat, add_generation_prompt, arguments)
        return ChatPrompt(hidden.show(text), hidden.show(hidden.mark(text)))


def encode_all(
    backend: tokenizers.Tokenizer, texts: Sequence[Any], add_special_tokens: bool = True
) -> list[tokenizers.Encoding]:
    """Encode texts, or pairs of them. Raises InvalidRequest if one is not Unicode."""
    try:
        # The fast batch call skips character offsets, which nobody here reads.
        encodings: list[tokenizers.Encoding] = backend.encode_batch_fast(
            list(texts), add_special_tokens=add_special_tokens
        )
    except (TypeError, UnicodeError) as error:
        raise InvalidRequest("the prompt is not valid Unicode text (it holds a lone surrogate?)") from error
    return encodings


def spans(encoding: tokenizers.Encoding) -> list[tuple[int, int]]:
    """Where in a text each of its tokens begins and ends, in characters."""
    found: list[tuple[int, int]] = []
    end = 0
    for first, last in encoding.offsets:
        # A token's own spaces may be left out of where it is said to be, but not out of the text.
        start = end if first == last else min(first, end)
        end = max(end, last)
        found.append((start, end))
    return found


def _written(data: Any) -> bytes:
    """Plain data as JSON. Raises InvalidRequest if it is nested too deeply, or is not Unicode."""
    try:
        raw = msgspec.json.encode(data)
    except RecursionError:
        raise too_deep() from None
    except UnicodeError as error:
        raise InvalidRequest("the messages are not valid Unicode text (a lone surrogate?)", "messages") from error
    if is_deep(raw):
        raise too_deep()
    return raw

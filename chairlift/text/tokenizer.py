"""A model folder's tokenizer: text to token ids and back, special tokens, chat template."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Set before the library is first used. Its thread pool would fight the model for the cores, and a fork after the pool
# has started can deadlock; one prompt is encoded on one thread anyway.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import tokenizers

from chairlift.errors import InvalidRequest, UnsupportedModel
from chairlift.text.chat_template import ChatTemplate
from chairlift.text.detokenize import Vocabulary
from chairlift.text.lengths import TextLengths


class Tokenizer:
    """Encodes, decodes, and renders chats for one model. Safe to share between threads: nothing changes after loading.

    `eos_ids` are the tokens that end an answer, by any of the folder's files. `vocab_size` is the highest id plus one;
    the model's own vocabulary may be padded beyond it.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: tuple[int, ...] = (),
        bos_id: int | None = None,
        chat_template: ChatTemplate | None = None,
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

    @classmethod
    def from_folder(cls, path: str | os.PathLike[str]) -> "Tokenizer":
        """Read `tokenizer.json` and its companions from a Hugging Face model folder."""
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise UnsupportedModel(
                f"{folder} has no tokenizer.json. Chairlift reads only that format; convert an older tokenizer with "
                "transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER), then try again."
            )
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exception
            raise UnsupportedModel(f"{file} can't be read: {error}") from error
        config = _read_json(folder / "tokenizer_config.json")
        special = {key: text for key, value in config.items() if key.endswith("_token") and (text := _content(value))}
        return cls(
            backend,
            eos_ids=_eos_ids(folder, backend, special.get("eos_token")),
            bos_id=backend.token_to_id(special["bos_token"]) if "bos_token" in special else None,
            chat_template=ChatTemplate.from_folder(folder, config, special),
        )

    @property
    def backend(self) -> tokenizers.Tokenizer:
        """The library's own tokenizer, shared: not to be changed."""
        return self._backend

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Pass `add_special_tokens=False` for a rendered chat, which brings its own."""
        return list(self._encode_batch([text], add_special_tokens)[0].ids)

    def encode_batch(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Token ids of many texts."""
        return [list(e.ids) for e in self._encode_batch(texts, add_special_tokens)]

    def _encode_batch(self, texts: Sequence[str], add_special_tokens: bool) -> list[tokenizers.Encoding]:
        try:
            # The fast batch call skips character offsets, which nobody here reads.
            encodings: list[tokenizers.Encoding] = self._backend.encode_batch_fast(
                list(texts), add_special_tokens=add_special_tokens
            )
        except (TypeError, UnicodeError) as error:
            raise InvalidRequest("the prompt is not valid Unicode text (it holds a lone surrogate?)") from error
        return encodings

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
    def has_chat_template(self) -> bool:
        """Whether `render_chat` can work at all."""
        return self._chat_template.available

    def render_chat(self, messages: Sequence[Any], add_generation_prompt: bool = True, **template_kwargs: Any) -> str:
        """The prompt of a chat, special tokens included: encode it with `add_special_tokens=False`.

        `template_kwargs` reach the template as they are (`tools`, `documents`, `enable_thinking`, ...).
        """
        return self._chat_template.render(messages, add_generation_prompt, template_kwargs)


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        data = json.loads(file.read_bytes())
    except ValueError as error:
        raise UnsupportedModel(f"{file} is not valid JSON: {error}") from error
    if not isinstance(data, dict):
        raise UnsupportedModel(f"{file} must hold a JSON object")
    return data


def _content(token: Any) -> str | None:
    """A special token's text; files hold it as a string or as {"content": ...}."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _eos_ids(folder: Path, backend: tokenizers.Tokenizer, eos_token: str | None) -> tuple[int, ...]:
    found: list[int] = []
    config = _read_json(folder / "config.json")
    nested = config.get("text_config")
    for source in (_read_json(folder / "generation_config.json"), config, nested if isinstance(nested, dict) else {}):
        value = source.get("eos_token_id")
        found += value if isinstance(value, list) else [value] if isinstance(value, int) else []
    if eos_token is not None and (token_id := backend.token_to_id(eos_token)) is not None:
        found.append(token_id)
    return tuple(dict.fromkeys(found))

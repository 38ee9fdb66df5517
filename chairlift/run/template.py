"""Requests made of rows: one field of each row, in a body that suits the model."""

from collections.abc import Mapping
from typing import Any

import msgspec

from chairlift.bodies import decode
from chairlift.errors import ConfigError, InvalidRequest
from chairlift.jobs.lines import Line, LineError
from chairlift.server.items.embeddings import EmbeddingBody
from chairlift.server.items.tei import TeiPredictBody
from chairlift.server.models.registry import KINDS, ModelService
from chairlift.server.models.sequence_service import SequenceService
from chairlift.server.openai.body_types import ChatBody, CompletionBody

Row = Mapping[str, bytes]

_CHAT = b'[{"role":"user","content":'


class Template:
    """Makes a request of a row, whose columns are JSON.

    The column `field` is the prompt, the text, or the instance; `id_field` is the custom_id, or else that is "line-N".
    `params` are further fields of the body. Raises ConfigError for what the model's route does not take.
    """

    def __init__(
        self, model: ModelService, field: str, id_field: str | None, params: Mapping[str, Any], chat: bool = False
    ) -> None:
        self.field, self.id_field = field, id_field
        self._columns = (field, id_field)
        self._before, self._after = b"", b"}"
        if chat and not isinstance(model, SequenceService):
            raise ConfigError(f"--chat is for language models, and `{model.name}` is {KINDS[model.task or 'python']}")
        if isinstance(model, SequenceService):
            self._for_language_model(model, params, chat)
        elif model.task == "embed":
            self._for("/v1/embeddings", "input", model.name, params, EmbeddingBody)
        elif model.task == "classify":
            self._for("/predict", "inputs", model.name, params, TeiPredictBody)
        elif model.task == "rerank":
            raise ConfigError(
                "a reranker needs a query and documents in each line: use the batch format, url /v1/rerank"
            )
        else:
            if more := [name for name in params if name != "model"]:
                raise ConfigError(f"--param {more[0]}: `{model.name}` takes instances and nothing else")
            self.url = f"/v1/models/{model.name}:predict"
            self._before, self._after = b'{"instances":[', b"]}"

    def line(self, number: int, row: Row) -> Line:
        """The request of a row."""
        value = row.get(self.field)
        custom_id = b'"line-%d"' % number if self.id_field is None else row.get(self.id_field)
        if value is None or custom_id is None:
            missing = self.field if value is None else self.id_field
            return Line(
                number=number,
                custom_id=_text(custom_id) if custom_id is not None else b"null",
                error=LineError("missing_field", f"line {number}: it has no {missing!r}", missing),
            )
        return Line(number=number, custom_id=_text(custom_id), url=self.url, body=self._before + value + self._after)

    def parse(self, number: int, raw: bytes) -> Line:
        """The request of a line that is a JSON object."""
        try:
            row = decode(raw, _row)
        except InvalidRequest as error:
            problem = LineError(error.code or "invalid_line", f"line {number}: {error}")
            return Line(number=number, error=problem)
        return self.line(number, {name: bytes(value) for name, value in row.items() if name in self._columns})

    def _for_language_model(self, model: SequenceService, params: Mapping[str, Any], chat: bool) -> None:
        if not chat:
            self._for("/v1/completions", "prompt", model.name, params, CompletionBody)
            return
        if not model.tokenizer.has_chat_template:
            raise ConfigError(f"--chat needs a chat template, and `{model.name}` has none")
        self._for("/v1/chat/completions", "messages", model.name, params, ChatBody)
        self._before, self._after = self._before + _CHAT, b"}]" + self._after

    def _for(self, url: str, field: str, model: str, params: Mapping[str, Any], body: type[msgspec.Struct]) -> None:
        """Set the URL and what stands around the value. Raises ConfigError for parameters that the route refuses."""
        for name in params:
            if name in (field, "stream"):
                raise ConfigError(
                    f"--param {name}: " + ("a batch streams nothing" if name == "stream" else "see --prompt-field")
                )
        given = {"model": model} | dict(params)
        sample = {**given, field: [] if field == "messages" else "text"}
        try:
            decode(msgspec.json.encode(sample), msgspec.json.Decoder(body))
        except InvalidRequest as error:
            raise ConfigError(f"--param: {error}") from None
        self.url = url
        self._before = msgspec.json.encode(given)[:-1] + b',"%b":' % field.encode()


_row = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _text(custom_id: bytes) -> bytes:
    """An id as a JSON string, whatever it is in the row."""
    return custom_id if custom_id.startswith(b'"') else msgspec.json.encode(custom_id.decode())

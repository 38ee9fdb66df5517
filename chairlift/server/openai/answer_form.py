"""The form that an answer must have, by any of the names that clients have for it."""

from typing import Any

import msgspec

from chairlift.bodies import convert
from chairlift.core.sequences.sampling_params import StructuredOutputsParams
from chairlift.errors import InvalidRequest
from chairlift.server.http.exchange import LARGE_SIZE, off_loop
from chairlift.server.openai.body_types import CommonBody
from chairlift.text.structured import grammar_of

# Those of the fields of `StructuredOutputsParams` that vLLM once had as fields of the body.
_GUIDED = ("json", "regex", "choice", "grammar")


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True):
    """`json_schema` of a response format. The schema is enforced, `strict` or not; the name is the client's own."""

    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


async def answer_grammar(body: CommonBody, size: int) -> str | None:
    """Return the grammar that a body of `size` bytes asks for; None for text. Raises InvalidRequest with the field."""
    asked = {field: wanted for field, wanted in _wanted(body).items() if wanted is not None}
    if not asked:
        return None
    if len(asked) > 1:
        first, second = list(asked)[:2]
        raise InvalidRequest(f"{first} and {second} both say what form the answer has; send one of them", second)
    [(field, wanted)] = asked.items()
    # GBNF is translated by Python code whose time grows with it.
    return await off_loop(LARGE_SIZE + 1 if wanted.grammar else size, lambda: grammar_of(wanted, field))


def _wanted(body: CommonBody) -> dict[str, StructuredOutputsParams | None]:
    """What each field asks for, by its name."""
    found = {"structured_outputs": body.structured_outputs}
    if body.response_format is not None:
        found["response_format"] = of_response_format(body.response_format)
    pattern = body.guided_whitespace_pattern
    for name in _GUIDED:
        field = f"guided_{name}"
        value = getattr(body, field)
        if value is not None:
            given = {name: value} if name != "json" else {name: value, "whitespace_pattern": pattern}
            found[field] = StructuredOutputsParams(**given)
    if pattern is not None and body.guided_json is None:
        raise InvalidRequest("guided_whitespace_pattern goes with guided_json", "guided_whitespace_pattern")
    return found


def of_response_format(given: dict[str, Any]) -> StructuredOutputsParams | None:
    """What a `response_format` of chat completions asks for; None for text. Raises InvalidRequest."""
    kind, rest = given.get("type"), {key: value for key, value in given.items() if key != "type" and value is not None}
    match kind:
        case "text" | "json_object" if not rest:
            return StructuredOutputsParams(json_object=True) if kind == "json_object" else None
        case "json_object" if "schema" in rest:
            # As llama.cpp has it.
            field, instead = "response_format.schema", "send 'json_schema' with json_schema.schema"
            raise InvalidRequest(f"{field} is not taken with 'json_object'; {instead}", field)
        case "json_schema" if rest.keys() == {"json_schema"}:
            return StructuredOutputsParams(json=_schema(rest["json_schema"]))
        case "structural_tag":
            return StructuredOutputsParams(structural_tag=rest)
    wanted = "'text', 'json_object', 'json_schema' with a json_schema, or 'structural_tag'"
    raise InvalidRequest(f"response_format must be of type {wanted}", "response_format")


def _schema(given: Any) -> dict[str, Any]:
    field = "response_format.json_schema"
    found = convert(given, JsonSchemaFormat, field)
    if found.schema is None:
        raise InvalidRequest(f"{field}.schema is required", f"{field}.schema")
    return found.schema

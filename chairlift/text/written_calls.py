"""Calls of a conversation as the model writes them: text of messages, where a chat template has no place for calls."""

import json
from typing import Any

from chairlift.errors import InvalidRequest
from chairlift.text.dialect import CallForm, Dialect

# Notations that are written here. Templates of models with others have a place for calls.
_NOTATIONS = ("json", "python")


def form_to_write(dialect: Dialect | None, source: str) -> CallForm | None:
    """How calls are written into messages for a chat template; None if it writes them itself, or nobody knows how."""
    if dialect is None or "tool_calls" in source:
        return None
    known = (form for form in dialect.tool_calls if form.notation in _NOTATIONS and not form.only_read)
    return next(known, None)


def with_written_calls(chat: list[dict[str, Any]], form: CallForm) -> list[dict[str, Any]]:
    """Messages whose content has their calls. Raises InvalidRequest for what are none."""
    return [_with_calls(message, form, f"messages[{index}]") for index, message in enumerate(chat)]


def _with_calls(message: dict[str, Any], form: CallForm, where: str) -> dict[str, Any]:
    calls = message.get("tool_calls")
    if message.get("role") != "assistant" or not calls:
        return message
    if not isinstance(calls, list):
        raise InvalidRequest(f"{where}.tool_calls must be a list of calls", f"{where}.tool_calls")
    each = [_written(call, form, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)]
    text = f"{form.begin}{(form.separator or '').join(each)}{form.end}"
    said = message.get("content")
    return {**message, "content": f"{said}\n{text}" if said else text}


def _written(call: Any, form: CallForm, where: str) -> str:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise InvalidRequest(f"{where}.function must have a name and arguments", f"{where}.function")
    arguments = function.get("arguments") or {}
    if not isinstance(arguments, dict):
        place = f"{where}.function.arguments"
        raise InvalidRequest(f"{place} must be a JSON object, as text", place)
    written = f"{form.open}{function['name']}{form.named}{_arguments(arguments, form)}{form.close[0]}"
    return written.replace("…", "") if "…" in form.open + form.named + form.close[0] else written


def _arguments(arguments: dict[str, Any], form: CallForm) -> str:
    if form.notation == "json":
        return json.dumps(arguments, ensure_ascii=False)
    return ", ".join(f"{name}={_python(value)}" for name, value in arguments.items())


def _python(value: Any) -> str:
    """A value in Python's notation, which is JSON but for three words."""
    return str(value) if value is None or isinstance(value, bool) else json.dumps(value, ensure_ascii=False)

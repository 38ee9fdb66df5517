"""The tools of a response: what may be called, and what must be."""

from typing import Any, Literal

from chairlift.bodies import convert
from chairlift.errors import InvalidRequest
from chairlift.server.conversations.conversation import Tool, ToolChoice
from chairlift.server.responses.response_body import TypedObject


class ResponseFunction(TypedObject):
    """A function that the model may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    # Not implemented.
    defer_loading: Any = None
    allowed_callers: Any = None
    output_schema: Any = None


class ChosenFunction(TypedObject):
    """One of the tools, by its name."""

    name: str


class AllowedTools(TypedObject):
    """`tool_choice` that leaves some of the tools out."""

    mode: Literal["auto", "required"]
    tools: list[dict[str, Any]]


def read_tools(given: list[dict[str, Any]]) -> list[Tool]:
    """The functions. Raises InvalidRequest, by its place, for any other tool."""
    return [_tool(tool, f"tools[{index}]") for index, tool in enumerate(given)]


def _tool(given: dict[str, Any], where: str) -> Tool:
    _check_function(given, where)
    body = convert(given, ResponseFunction, where)
    for name in ("defer_loading", "output_schema"):
        if getattr(body, name):
            raise InvalidRequest(f"{where}.{name} is not supported; leave it out", f"{where}.{name}")
    if body.allowed_callers not in (None, [], ["direct"]):
        raise InvalidRequest(f"{where}.allowed_callers may only be ['direct']", f"{where}.allowed_callers")
    return Tool(name=body.name, description=body.description, parameters=body.parameters, strict=bool(body.strict))


def _check_function(given: dict[str, Any], where: str) -> None:
    kind = given.get("type")
    if kind != "function":
        raise InvalidRequest(f"{where}.type {kind!r} is not supported, only 'function'", f"{where}.type")


def read_choice(given: str | dict[str, Any] | None, tools: list[Tool]) -> tuple[list[Tool], ToolChoice]:
    """The tools that are left, and whether one must be called. Raises InvalidRequest."""
    names = {tool.name for tool in tools}
    if given is None or given == "auto":
        return tools, ToolChoice()
    if given == "none":
        return tools, ToolChoice("none")
    if isinstance(given, str):
        if given != "required":
            raise InvalidRequest("tool_choice must be 'none', 'auto', 'required' or an object", "tool_choice")
        return tools, ToolChoice("required")
    if given.get("type") == "allowed_tools":
        allowed = convert(given, AllowedTools, "tool_choice")
        chosen = {_named(each, names, f"tool_choice.tools[{index}]") for index, each in enumerate(allowed.tools)}
        return [tool for tool in tools if tool.name in chosen], ToolChoice(allowed.mode)
    return tools, ToolChoice("required", _named(given, names, "tool_choice"))


def _named(given: dict[str, Any], names: set[str], where: str) -> str:
    _check_function(given, where)
    name = convert(given, ChosenFunction, where).name
    if name not in names:
        raise InvalidRequest(f"{where}.name {name!r} is not one of tools", f"{where}.name")
    return name

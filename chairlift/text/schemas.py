"""What the JSON schema of a tool's arguments says, as far as grammars and readers have to know."""

import copy
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import unquote

# References that lead on and on.
_MOST_STEPS = 16
# Schemas that are joined with one.
_MOST_JOINED = 1000
# What says something of further properties, and what joins schemas, each of which would bar the others' properties.
_OF_OTHERS = frozenset(
    {"additionalProperties", "unevaluatedProperties", "patternProperties", "minProperties", "enum", "const"}
)
_JOINING = frozenset({"allOf", "$dynamicRef", "dependentSchemas", "if"})
_ELSEWHERE = frozenset({"$ref", "anyOf", "oneOf"})
# What joins a schema with those that are elsewhere.
_BESIDE = _OF_OTHERS | {"properties", "required"}
_ALL = frozenset({"string", "number", "integer", "boolean", "object", "array", "null"})
# A schema that allows anything.
_ANY: dict[str, Any] = {}


def resolved(schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    """A schema, or what it refers to within `root`; one that allows anything is {}.

    Raises ValueError for a reference that leads nowhere.
    """
    for _ in range(_MOST_STEPS):
        if not isinstance(schema, dict):
            return {}
        reference = schema.get("$ref")
        if not isinstance(reference, str):
            return schema
        schema = _target(reference, root)
    raise ValueError("references that lead in a circle")


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema whose objects have the properties that it lists, and no others unless it speaks of others.

    It is narrower than what was given, never empty where that was not. What joins schemas is left as it is.
    """
    made = copy.deepcopy(schema)
    nodes = list(_nodes(made))
    if any(_joins(node) for node in nodes):
        return schema
    for node in nodes:
        listed = node.get("properties")
        if isinstance(listed, dict) and not _OF_OTHERS & node.keys() and _all_in(node.get("required", []), listed):
            node["additionalProperties"] = False
    return made


def _joins(node: dict[str, Any]) -> bool:
    """Whether several schemas hold for one value."""
    elsewhere = _ELSEWHERE & node.keys()
    return bool(_JOINING & node.keys() or len(elsewhere) > 1 or (elsewhere and _BESIDE & node.keys()))


def _all_in(names: Any, listed: dict[str, Any]) -> bool:
    return isinstance(names, list) and all(isinstance(name, str) and name in listed for name in names)


def _nodes(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A schema and all that are in it."""
    waiting: list[Any] = [schema]
    while waiting:
        node = waiting.pop()
        if not isinstance(node, dict):
            continue
        yield node
        for word in ("properties", "patternProperties", "$defs", "definitions"):
            waiting += _dict(node.get(word)).values()
        for word in ("prefixItems", "anyOf", "oneOf", "allOf"):
            waiting += _list(node.get(word))
        waiting += [node.get("items"), node.get("additionalProperties")]


def joined(schema: dict[str, Any], root: dict[str, Any], look: Callable[[], None] = lambda: None) -> dict[str, Any]:
    """An object's schema with the properties of all that are joined with it, for notations of one property at a time.

    One that several of them have may be as any of them says. `look` is called for each.
    """
    properties: dict[str, list[Any]] = {}
    required: list[Any] = []
    waiting: list[tuple[Any, bool]] = [(schema, True)]
    seen: dict[int, Any] = {}
    while waiting and len(seen) < _MOST_JOINED:
        part, holds = waiting.pop()
        look()
        try:
            part = resolved(part, root)
        except ValueError:
            continue
        if id(part) in seen:
            continue
        seen[id(part)] = part
        for key, value in _dict(part.get("properties")).items():
            properties.setdefault(key, []).append(value)
        required += _list(part.get("required")) if holds else []
        for word in ("oneOf", "anyOf", "allOf"):
            waiting += [(each, holds and word == "allOf") for each in reversed(_list(part.get(word)))]
    if len(seen) == 1:
        return schema
    made = {key: _any_of(found) for key, found in properties.items()}
    rest = {word: value for word, value in schema.items() if word != "$ref"}
    return {**rest, "properties": made, "required": required}


def _any_of(schemas: list[Any]) -> Any:
    different = list({json.dumps(each): each for each in schemas}.values()) if len(schemas) > 1 else schemas
    return different[0] if len(different) == 1 else {"anyOf": different}


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


class SchemaTypes:
    """The types that schemas within `root` name, in their alternatives too.

    Each is looked at once, however many lead to it: what all of them take grows with their size, and not with its
    square.
    """

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._found: dict[int, frozenset[str]] = {}
        # By whose addresses they are found.
        self._kept: list[dict[str, Any]] = []

    def of(self, schema: Any) -> frozenset[str]:
        """The types of a schema; empty if it may be any."""
        followed = self._followed(schema)
        if id(followed) not in self._found:
            self._find(followed)
        found = self._found[id(followed)]
        return frozenset() if found == _ALL else found

    def of_property(self, key: str) -> frozenset[str]:
        """The types of a property of `root`."""
        properties = self._followed(self._root).get("properties")
        return self.of(properties.get(key)) if isinstance(properties, dict) else frozenset()

    def _find(self, schema: dict[str, Any]) -> None:
        """Note the types of a schema, and of all that are among its alternatives."""
        waiting = [schema]
        # By an alternative, the schemas that have it.
        owners: dict[int, list[int]] = defaultdict(list)
        while waiting:
            owner = waiting.pop()
            if id(owner) in self._found:
                continue
            self._kept.append(owner)
            self._found[id(owner)], alternatives = _said(owner)
            for each in map(self._followed, alternatives):
                owners[id(each)].append(id(owner))
                waiting.append(each)
        changed = list(owners)
        while changed:
            found = changed.pop()
            for owned in owners.get(found, ()):
                if not self._found[found] <= self._found[owned]:
                    self._found[owned] |= self._found[found]
                    changed.append(owned)

    def _followed(self, schema: Any) -> dict[str, Any]:
        """A schema, or what it refers to; what leads nowhere allows anything."""
        try:
            return resolved(schema, self._root) or _ANY
        except ValueError:
            return _ANY


def _said(schema: dict[str, Any]) -> tuple[frozenset[str], list[Any]]:
    """The types that a schema itself names, all if it may be any; or none, and the alternatives that say."""
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset({declared}), []
    if isinstance(declared, list):
        return frozenset(each for each in declared if isinstance(each, str)), []
    for values in (schema.get("enum"), [schema["const"]] if "const" in schema else None):
        if isinstance(values, list):
            return frozenset(map(json_type, values)), []
    alternatives = [*_list(schema.get("anyOf")), *_list(schema.get("oneOf"))]
    return (frozenset() if alternatives else _ALL), alternatives


def json_type(value: Any) -> str:
    """What JSON schema calls a value's type; whole numbers are integers."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int) or (isinstance(value, float) and value.is_integer()):
        return "integer"
    if isinstance(value, float):
        return "number"
    if isinstance(value, str):
        return "string"
    return "array" if isinstance(value, list) else "object"


def _target(reference: str, root: dict[str, Any]) -> Any:
    if reference != "#" and not reference.startswith("#/"):
        raise ValueError(f"the reference {reference!r} is not within the schema")
    found: Any = root
    for step in reference[1:].split("/")[1:]:
        step = unquote(step).replace("~1", "/").replace("~0", "~")
        try:
            found = found[int(step) if isinstance(found, list) else step]
        except (LookupError, TypeError, ValueError):
            raise ValueError(f"the reference {reference!r} leads nowhere") from None
    return found

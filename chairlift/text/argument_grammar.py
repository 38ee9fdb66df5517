"""The grammar of a call's arguments by their schema, for notations that are not JSON."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from chairlift.text.dialect import CallForm, TagForm
from chairlift.text.lark import LarkRules, quoted
from chairlift.text.schemas import SchemaTypes, closed, joined, resolved
from chairlift.text.structured import MAX_CHOICES, MAX_GRAMMAR_BYTES

# What a schema may say of arguments as a whole, where they are not written as JSON.
_ABOUT = {"title", "description", "$schema", "$id", "$comment", "examples", "default", "deprecated", "x-guidance"}
_OBJECT = _ABOUT | {"type", "properties", "required", "additionalProperties", "$defs", "definitions", "$ref"}
_ARRAY = _ABOUT | {"type", "items", "minItems", "maxItems", "$ref"}
_STRING = _ABOUT | {"type", "minLength", "maxLength", "enum", "const", "$ref"}
_NUMBER = _ABOUT | {"type", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"} | {"$ref"}
_NO_MORE = {"type": "object", "properties": {}, "additionalProperties": False}
_KEY = {"python": re.compile(r"[^\W\d]\w*"), "bare": re.compile(r"[\w.-]+"), "tags": re.compile(r"[^<>\s]+")}
# Escapes that JSON and Python have in common.
_SAME_ESCAPES = {"json_allowed_escapes": '"\\nrtbf'}
# Schemas of one tool that are looked at, of which many may lead to the same ones.
_MOST_LOOKS = 2**17


def arguments_of(rules: LarkRules, form: CallForm, name: str, schema: dict[str, Any], strict: bool = False) -> str:
    """The arguments of the tool `name`.

    What can't be kept to is left out of the schema; if it is `strict`, ValueError names it.
    """
    schema = schema or _NO_MORE
    try:
        size = len(json.dumps(schema, ensure_ascii=False).encode("utf-8", "surrogatepass"))
        if size > MAX_GRAMMAR_BYTES:
            raise ValueError(f"they have {size} bytes, more than {MAX_GRAMMAR_BYTES}; send simpler ones")
        if form.notation == "json":
            return rules.json(closed(schema), relaxed=not strict)
        return _Arguments(rules, form, schema, strict).written()
    except RecursionError:
        raise ValueError(f"the parameters of {name} are nested too deeply") from None
    except (TypeError, AttributeError, OverflowError):
        raise ValueError(f"the parameters of {name} are no JSON schema") from None
    except ValueError as error:
        raise ValueError(f"the parameters of {name}: {error}") from None


class _Arguments:
    """The arguments of one tool, in a notation."""

    def __init__(self, rules: LarkRules, form: CallForm, schema: dict[str, Any], strict: bool) -> None:
        self._rules = rules
        self._form = form
        self._root = schema
        self._types = SchemaTypes(schema)
        self._strict = strict
        self._looks = 0
        self._references: dict[str, str] = {}
        # What references lead to, written to refer to definitions by name, and the references in it.
        self._definitions: dict[str, tuple[Any, set[str]]] = {}
        self._names: dict[str, str] = {}

    def written(self) -> str:
        """All of them."""
        write = {"python": self._python, "bare": self._bare, "tags": self._tags}[self._form.notation]
        schema = self._resolved(self._root)
        return self._members(schema, "" if self._form.notation == "tags" else ", " if self._spaced else ",", write)

    @property
    def _spaced(self) -> bool:
        return self._form.notation == "python"

    def _look(self) -> None:
        """Count a schema that is looked at. Raises ValueError once there are too many."""
        self._looks += 1
        if self._looks > _MOST_LOOKS:
            problem = f"their references and alternatives lead to more than {_MOST_LOOKS} schemas"
            raise ValueError(f"{problem}, those counted again to which several lead; send simpler ones")

    def _resolved(self, schema: Any) -> dict[str, Any]:
        """A schema, or what it refers to; what leads nowhere allows anything."""
        self._look()
        try:
            return resolved(schema, self._root)
        except ValueError:
            if self._strict:
                raise
            return {}

    def _members(self, schema: dict[str, Any], separator: str, write: Callable[[str, Any], str]) -> str:
        """Properties in their order, those that are not required perhaps."""
        self._check(schema, _OBJECT)
        if not self._strict:
            schema = joined(schema, self._root, self._look)
        properties = schema.get("properties") or {}
        required = set(schema.get("required") or ())
        if self._strict and (missing := sorted(required - properties.keys())):
            raise ValueError(f"{missing[0]!r} is required, and is none of its properties")
        keys = [key for key in properties if self._can_be_named(key)]
        if self._form.notation == "bare":
            keys.sort(key=str.lower)
        parts = [(write(key, properties[key]), key in required) for key in keys]
        return self._row(parts, separator)

    def _can_be_named(self, key: str) -> bool:
        """Whether the notation has a way to write a property's name."""
        found = _KEY[self._form.notation].fullmatch(key) is not None
        if self._strict and not found:
            raise ValueError(f"the name {key!r} can't be written in this model's notation")
        return found

    def _check(self, schema: Mapping[str, Any], known: set[str], several: bool = False) -> None:
        """Refuse what is not known, if it is strict; of a schema of several types, each knows words of its own."""
        known = known | (_OBJECT | _ARRAY | _STRING | _NUMBER if several else set())
        if self._strict and (unknown := sorted(schema.keys() - known)):
            raise ValueError(f"{unknown[0]!r} can't be kept to in this model's notation of calls")

    def _row(self, parts: list[tuple[str, bool]], separator: str) -> str:
        """Parts in a row, with separators between those that are there."""
        rules, rest = self._rules, ""
        # What may come first, from the last part to the first.
        firsts: list[str] = []
        between = quoted(separator) + " " if separator else ""
        must = False
        for part, needed in reversed(parts):
            alone = f"{part} {rest}".rstrip()
            if not separator:
                firsts.append(part if needed else f"({part})?")
                continue
            if needed:
                firsts.clear()
            firsts.append(alone)
            must = must or needed
            rest = rules.add("more", f"{between}{part} {rest}" if needed else f"({between}{part})? {rest}")
        if not separator or not firsts:
            return " ".join(reversed(firsts))
        return rules.add("members", " | ".join(reversed(firsts))) + ("" if must else "?")

    def _python(self, key: str, schema: Any) -> str:
        """A keyword argument. Values are JSON, which Python's are but for three words."""
        return f"{quoted(f'{key}=')} {self._json(schema, words=('True', 'False', 'None'), **_SAME_ESCAPES)}"

    def _tags(self, key: str, schema: Any) -> str:
        """An argument between tags: text as it is, other values as JSON."""
        tags = self._form.tags
        assert tags is not None
        head = self._rules.write(f"{tags.open}{key}{tags.named}")
        types = self._types.of(schema)
        if "string" in types:
            return f"{head} {self._text(schema, types, tags)}"
        words = ("True", "False", "None") if tags.words else ()
        return f"{head} {self._json(schema, words)} {self._rules.write(tags.close)}"

    def _text(self, schema: Any, types: frozenset[str], tags: TagForm) -> str:
        """A text as it is, up to its end."""
        found = self._resolved(schema)
        either = not {"anyOf", "oneOf"}.isdisjoint(found) and self._is_either(found) and not self._strict
        if types != {"string"} or either:
            return self._mixed(found, tags)
        self._check(found, _STRING)
        if (values := _values(found)) is not None:
            chosen = self._rules.counted(" | ".join(quoted(str(value)) for value in values))
            return f"({chosen}) {self._rules.write(tags.close)}"
        return self._ended(tags, _count(found))

    def _mixed(self, schema: dict[str, Any], tags: TagForm) -> str:
        """One of several texts, or types of which one is text: where any text will do, what else may be is text too."""
        listed, others = [], []
        for each in self._alternatives(schema):
            if self._types.of(each) == {"string"}:
                listed.append(_values(each))
            else:
                others.append(each)
        if None in listed:
            return self._ended(tags, "")
        words = ("True", "False", "None") if tags.words else ()
        texts = [quoted(value) for values in listed for value in values or () if isinstance(value, str)]
        self._rules.counted(" | ".join(texts))
        chosen = texts + [self._json(each, words) for each in others]
        return f"({' | '.join(chosen)}) {self._rules.write(tags.close)}"

    def _alternatives(self, schema: dict[str, Any]) -> list[dict[str, Any]]:
        """A schema for each that a value may be, texts by themselves; what several refer to is looked at once."""
        found: list[dict[str, Any]] = []
        waiting: list[Any] = [schema]
        seen: dict[int, Any] = {}
        while waiting:
            each = self._resolved(waiting.pop())
            if id(each) in seen:
                continue
            seen[id(each)] = each
            word = next((word for word in ("anyOf", "oneOf") if isinstance(each.get(word), list)), None)
            if word is not None and self._is_either(each):
                self._check(each, _ABOUT | {word})
                waiting += reversed(each[word])
                continue
            kinds = self._types.of(each)
            if "string" in kinds:
                self._check(each, _STRING, several=len(kinds) > 1)
            found += [{**each, "type": kind} for kind in sorted(kinds)] if "string" in kinds else [each]
            if len(found) > MAX_CHOICES:
                raise ValueError(f"an argument may have {MAX_CHOICES} alternatives, and one has more")
        return found

    def _ended(self, tags: TagForm, count: str) -> str:
        return self._rules.up_to(tags.close, counted=count)

    def _json(self, schema: Any, words: tuple[str, ...] = (), **options: Any) -> str:
        """A value as JSON; true, false and null alone may be other `words`."""
        types = self._types.of(schema)
        whole = self._alone(schema if isinstance(schema, dict) else {})
        written = self._rules.json(whole, relaxed=not self._strict, **options)
        if not words or not types <= {"boolean", "null"} or not types or "enum" in whole or "const" in whole:
            return written
        chosen = (words[:2] if "boolean" in types else ()) + (words[2:] if "null" in types else ())
        return f"({written} | {' | '.join(map(quoted, chosen))})"

    def _alone(self, schema: dict[str, Any]) -> dict[str, Any]:
        """A schema that needs no other: all that it refers to, and what that does, are definitions of its own."""
        if '"$ref"' not in json.dumps(schema):
            return schema
        waiting, defined = set[str](), dict[str, Any]()
        own = self._referring(schema, waiting)
        while waiting:
            reference = waiting.pop()
            if reference not in self._definitions:
                more = set[str]()
                found = self._referring(self._resolved({"$ref": reference}), more)
                self._definitions[reference] = found, more
            found, more = self._definitions[reference]
            if self._names[reference] not in defined:
                defined[self._names[reference]] = found
                waiting |= more
        return {**own, "$defs": defined}

    def _referring(self, value: Any, references: set[str]) -> Any:
        """A copy of a schema that refers to definitions by name; the `references` in it are added to those."""
        if isinstance(value, list):
            return [self._referring(each, references) for each in value]
        if not isinstance(value, dict):
            return value
        made = {}
        for key, each in value.items():
            if key == "$ref" and isinstance(each, str):
                references.add(each)
                made[key] = f"#/$defs/{self._names.setdefault(each, f'd{len(self._names)}')}"
            else:
                made[key] = self._referring(each, references)
        return made

    def _bare(self, key: str, schema: Any) -> str:
        """A member of an object with bare keys."""
        return f"{quoted(f'{key}:')} {self._value(schema)}"

    def _value(self, schema: Any) -> str:
        """A value in the bare notation; one that may hold such again is a rule of its own."""
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        found = self._resolved(schema)
        if not isinstance(reference, str) and self._has_parts(found):
            reference = json.dumps(found)
        if not isinstance(reference, str):
            return self._bare_value(found)
        if reference not in self._references:
            self._references[reference] = name = f"referred_{len(self._references)}_{id(self)}"
            self._rules.define(name, self._bare_value(self._with_parts(found) if self._has_parts(found) else found))
        return self._references[reference]

    def _has_parts(self, schema: Mapping[str, Any]) -> bool:
        """Whether several schemas are to hold together, and a notation has to make do with some of what they say."""
        return not self._strict and isinstance(schema.get("allOf"), list)

    def _with_parts(self, schema: dict[str, Any]) -> dict[str, Any]:
        """A schema with what its parts say, the first that says something of each."""
        found, waiting, seen = dict(schema), list(schema["allOf"]), dict[int, Any]()
        for part in waiting:
            part = self._resolved(part)
            if id(part) not in seen:
                seen[id(part)] = part
                waiting += part["allOf"] if self._has_parts(part) else ()
                for word, value in part.items():
                    found.setdefault(word, value)
        return found

    def _bare_value(self, found: dict[str, Any]) -> str:
        """The same of a schema that refers to no other."""
        for word in ("anyOf", "oneOf"):
            if isinstance(alternatives := found.get(word), list) and self._is_either(found):
                self._check(found, _ABOUT | {word})
                return f"({' | '.join(map(self._value, alternatives))})"
        if (values := _values(found)) is not None and (self._strict or not any(map(_is_nested, values))):
            return f"({' | '.join(map(self._constant, values))})"
        any_type = ["object"] if "properties" in found else ["boolean", "null", "number", "string"]
        types = sorted(self._types.of(found)) or any_type
        return f"({' | '.join(self._of_type(each, found) for each in types)})"

    def _is_either(self, schema: Mapping[str, Any]) -> bool:
        """Whether a schema is one of its alternatives, and not something by itself that they say more of."""
        return self._strict or not {"type", "properties"} & schema.keys()

    def _of_type(self, kind: str, schema: dict[str, Any]) -> str:
        several = isinstance(schema.get("type"), list)
        if kind == "object":
            self._check(schema, _OBJECT, several)
            own = _only(schema, _OBJECT) if self._strict else schema
            return f'"{{" {self._members(own, ",", self._bare)} "}}"'
        if kind == "array":
            self._check(schema, _ARRAY, several)
            return self._items(schema)
        if kind == "string":
            self._check(schema, _STRING, several)
            return self._quoted(_count(schema))
        if kind in ("boolean", "null"):
            return self._rules.json({"type": kind})
        self._check(schema, _NUMBER, several)
        return self._rules.json({**_only(schema, _NUMBER), "type": kind})

    def _items(self, schema: dict[str, Any]) -> str:
        least, most = int(schema.get("minItems", 0)), schema.get("maxItems")
        item = self._rules.add("item", self._value(schema.get("items", {})))
        if most == 0:
            return '"[]"'
        # The library takes no `{0,0}`.
        more = "" if most == 1 else f'("," {item}){{{max(least - 1, 0)},{"" if most is None else int(most) - 1}}}'
        row = f"{item} {more}".rstrip()
        return f'"[" ({row}) "]"' if least else f'"[" ({row})? "]"'

    def _quoted(self, count: str) -> str:
        quote = self._form.quote
        return f"{self._rules.write(quote)} {self._rules.up_to(quote, counted=count)}"

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            return self._rules.write(f"{self._form.quote}{value}{self._form.quote}")
        if _is_nested(value):
            raise ValueError("enum and const may hold texts, numbers and words only in this model's notation")
        return quoted(json.dumps(value))


def _values(schema: Mapping[str, Any]) -> list[Any] | None:
    """The values that a schema lists, if it does."""
    if "const" in schema:
        return [schema["const"]]
    values = schema.get("enum")
    return values if isinstance(values, list) and values else None


def _count(schema: Mapping[str, Any]) -> str:
    """How many letters a text has, as a pattern says it; nothing if any number will do."""
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if not least and most is None:
        return ""
    return f"{{{int(least)},{'' if most is None else int(most)}}}"


def _only(schema: Mapping[str, Any], words: set[str]) -> dict[str, Any]:
    return {word: value for word, value in schema.items() if word in words}


def _is_nested(value: Any) -> bool:
    return isinstance(value, list | dict)

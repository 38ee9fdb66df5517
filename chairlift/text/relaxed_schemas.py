"""Schemas of tools that are not strict: what no grammar can keep to is left out of them.

llguidance passes over keywords and formats that it does not enforce, if it is told to be lenient. What it would refuse
all the same is left out here: patterns that it can't compile, such as those that look ahead, and references that lead
nowhere.
"""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from chairlift.text.schema_patterns import Mender, mended, without_nul
from chairlift.text.schemas import resolved

# llguidance's option: keywords and formats that are not enforced are passed over, and `oneOf` is `anyOf`.
LENIENT = {"lenient": True}
# What is compiled together with a text's pattern.
_OF_TEXT = ("pattern", "format", "minLength", "maxLength")
# What llguidance passes over joins no reference that leads round in a circle. So of single values only those stay that
# it enforces, and of schemas all but those of keywords that it knows and does not: references may lead into others.
_ENFORCED = frozenset(
    {"$ref", "$id", "$anchor", "$dynamicAnchor", "$schema", "type", "const", "additionalProperties", "minProperties"}
    | {"maxProperties", "items", "additionalItems", "minItems", "maxItems", "minimum", "maximum", "exclusiveMinimum"}
    | {"exclusiveMaximum", "multipleOf", *_OF_TEXT}
)
_PASSED_OVER = frozenset(
    {"not", "if", "then", "else", "propertyNames", "contains", "dependencies", "dependentRequired", "dependentSchemas"}
    | {"unevaluatedProperties", "unevaluatedItems"}
)
# What gives a schema a name, to which references may lead.
_NAMES = ('"$id"', '"$anchor"', '"$dynamicAnchor"')
# Characters of schemas that are read for one grammar. Of what is left out nothing is written, so nothing else stops it.
_MOST_READ = 2**23
# Patterns of which it is known whether they compile: clients send the same tools each time.
_MOST_KNOWN = 256


class Relaxer(Mender):
    """Writes the schemas of one grammar.

    Patterns of more characters than `Mender` allows, with what is compiled together with them, are left out as well;
    each counts once.
    """

    def __init__(self) -> None:
        super().__init__()
        self._root: dict[str, Any] = {}
        self._is_named = False
        self._known: dict[str, bool] = {}
        self._read = 0

    def relaxed(self, schema: Mapping[str, Any]) -> dict[str, Any]:
        """A schema, by itself, that compiles as far as patterns and references go. Raises ValueError once they are too
        much to read."""
        self._root = dict(schema)
        written = json.dumps(self._root)
        self._read += len(written)
        if self._read > _MOST_READ:
            problem = f"with all that they refer to, arguments have more than {_MOST_READ} characters to read"
            raise ValueError(f"{problem}; send fewer, or simpler ones")
        self._is_named = any(name in written for name in _NAMES)
        found: dict[str, Any] = self.mended(self._root)
        return found

    def mended(self, schema: Any) -> Any:
        """The same of a part of it."""
        return super().mended(self._kept(schema) if isinstance(schema, dict) else schema)

    def _written(self, pattern: str) -> str:
        return without_nul(pattern)

    def _kept(self, schema: dict[str, Any]) -> dict[str, Any]:
        """What of a schema can be kept to."""
        left_out = {word for word, value in schema.items() if _is_passed_over(word, value)}
        if "$ref" in schema and not self._leads(schema["$ref"]):
            left_out.add("$ref")
        text = {word: schema[word] for word in _OF_TEXT if word in schema}
        if "pattern" in text and not self._compiles({"type": "string", **text}):
            left_out.add("pattern")
        named = schema.get("patternProperties")
        if named and not self._compiles({"type": "object", "patternProperties": dict.fromkeys(named, True)}):
            # What they would allow is not to be barred.
            left_out |= {"patternProperties", "additionalProperties"}
        return {word: value for word, value in schema.items() if word not in left_out}

    def _leads(self, reference: Any) -> bool:
        """Whether a reference leads to a schema."""
        if not isinstance(reference, str):
            return False
        if reference != "#" and not reference.startswith("#/"):
            # By a name: the library finds those.
            return self._is_named
        try:
            resolved({"$ref": reference}, self._root)
        except ValueError:
            return False
        return True

    def _compiles(self, schema: dict[str, Any]) -> bool:
        written = json.dumps(schema)
        if written not in self._known:
            self._left -= len(written)
            self._known[written] = self._left >= 0 and _compiles(written)
        return self._known[written]


def _is_passed_over(word: str, value: Any) -> bool:
    return word in _PASSED_OVER or (word not in _ENFORCED and not isinstance(value, dict | list))


@lru_cache(_MOST_KNOWN)
def _compiles(schema: str) -> bool:
    """Whether llguidance compiles a schema, which is JSON."""
    # Only here: whoever sends no patterns need not load the library.
    from llguidance import LLMatcher, LLParserLimits

    limits = LLParserLimits(initial_lexer_fuel=100_000, max_grammar_size=200_000, verbose_errors=False)
    try:
        grammar = json.dumps({"grammars": [{"json_schema": mended(json.loads(schema))}]})
        return not LLMatcher.validate_grammar(grammar, limits=limits)
    except ValueError:  # of a pattern that names NUL
        return False
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException:  # a panic of the library is no Exception
        return False

"""JSON decoded strictly into typed structs, with errors that say exactly what is wrong and where."""

import difflib
import re
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any, TypeVar, cast

import msgspec
from msgspec import inspect

from chairlift.errors import InvalidRequest

T = TypeVar("T")

_UNKNOWN, _FLOAT = "unknown field", "got `float`"
# As `is_neutral` has it.
_NEUTRAL = re.compile(rb'null|false|""|\[\s*\]|\{\s*\}')
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
# The names of an object's fields, each with the same of the objects in it.
_KnownFields = Mapping[str, "_KnownFields | None"]
# A field of a body with more bytes, or a list of more objects, would take too long to be gone through for unknown ones.
_MOST_BYTES, _MOST_OBJECTS = 2**18, 4096
# Whole ones are integers to clients whose language has only floats. What is longer would not be exact.
_DECIMAL = re.compile(rb"-?\d{1,16}(?:\.\d{1,16})?(?:[eE]\+?\d)?")
_MOST_EXACT = 2**53

# Levels of lists and objects: what is nested deeper is nobody's honest request, and breaks other programs' readers.
MAX_DEPTH = 64
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
_MANY_DIGITS = re.compile(rb"\d{19}")
_INTEGER = re.compile(rb"(?<![\d.eE+-])-?\d{19,}(?![\d.eE])")
_BRACKETS = bytes.maketrans(b"{}", b"[]")
_OTHERS = bytes(set(range(256)) - set(b"[]{}"))
_NEITHER = bytes(set(_OTHERS) - set(b'"'))
# Bytes that are looked through at a time.
_PIECE = 2**20

_AT = " - at `"
# No name of ours is longer, and to compare a name takes as long as it is.
_LONGEST_NAME = 64
_FIELD = re.compile(r"Object (?:contains unknown|missing required) field `(.*)`", re.DOTALL)


def decode(body: bytes, decoder: "msgspec.json.Decoder[T]", what: str = "the body") -> T:
    """Decode a body, or `what` it is, or raise InvalidRequest that names the field."""
    try:
        found = decoder.decode(body)
    except msgspec.ValidationError as error:
        mended = _mended(body, decoder, str(error))
        if mended is None:
            raise _describe(str(error), known=_fields_of(decoder), what=what) from None
        return decode(mended, decoder, what)
    except RecursionError:
        raise _too_deep(what) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{what} is not valid JSON: {error}", code="invalid_json") from None
    if is_deep(body):
        raise _too_deep(what)
    return found


def convert(value: Any, kind: type[T], where: str) -> T:
    """Plain data as what `kind` says, or InvalidRequest that names the field; `where` is the data's own."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        known = _known_of(cast(Any, kind)) if _UNKNOWN in str(error) else None
        mended = value if known is None else _without_neutral(value, known)
        if mended == value:
            raise _describe(str(error), where) from None
    return convert(mended, kind, where)


def is_neutral(value: Any) -> bool:
    """Whether a field that has this value asks for nothing, whatever it may mean: null, false, or empty."""
    return value is None or value is False or (isinstance(value, str | list | dict) and not value)


def is_deep(raw: bytes) -> bool:
    """Whether JSON, which must be well-formed, is nested more than MAX_DEPTH levels deep."""
    if raw.count(b"[") + raw.count(b"{") <= MAX_DEPTH:
        return False
    # What is left of strings without brackets is two quotes. Where there are others, or escaped ones, the slow way.
    nested = raw.translate(_BRACKETS, _NEITHER).replace(b'""', b"") if b"\\" not in raw else b'"'
    if b'"' in nested:
        nested = _STRING.sub(b"", raw).translate(_BRACKETS, _OTHERS)
    for _ in range(MAX_DEPTH):
        nested = nested.replace(b"[]", b"")
    return bool(nested)


def has_more_lists(raw: bytes, most: int) -> bool:
    """Whether JSON has more lists and objects than `most`, which take far more to make than their bytes.

    It need not be well-formed. Brackets in strings don't count.
    """
    if raw.count(b"[") + raw.count(b"{") <= most:
        return False
    if b"\\" in raw:
        raw = raw.replace(rb"\\", b"").replace(rb"\"", b"")
    found = quotes = 0
    # A piece at a time, so that others have their turns.
    for start in range(0, len(raw), _PIECE):
        parts = raw[start : start + _PIECE].split(b'"')
        outside = b"".join(parts[quotes % 2 :: 2])
        found += outside.count(b"[") + outside.count(b"{")
        quotes += len(parts) - 1
    return found > most


def check_integers(raw: bytes, field: str) -> None:
    """Raise InvalidRequest if JSON has integers beyond 64 bits, which would not get to a worker."""
    if _MANY_DIGITS.search(raw) is None:
        return
    for digits in _INTEGER.findall(_STRING.sub(b"", raw)):
        if not -(2**63) <= int(digits) < 2**64:
            raise InvalidRequest(f"{field} has an integer beyond 64 bits", field)


def _mended(body: bytes, decoder: "msgspec.json.Decoder[T]", problem: str) -> bytes | None:
    """The body without what is no harm, if that may be the problem and it has any.

    No harm are fields that are unknown and ask for nothing, and whole numbers that are written as floats, `2.0`.
    """
    known = _known_of(cast(Any, decoder.type))
    if known is None or not (_UNKNOWN in problem or _FLOAT in problem):
        return None
    try:
        given = _fields.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    kept = {name: raw for name, raw in given.items() if name in known or not _NEUTRAL.fullmatch(raw)}
    if _FLOAT in problem:
        kept = {name: _as_integer(raw) or raw for name, raw in kept.items()}
    else:
        kept = {name: _mended_field(raw, known.get(name)) for name, raw in kept.items()}
    return msgspec.json.encode(kept) if kept != given else None


def _mended_field(raw: msgspec.Raw, known: _KnownFields | None) -> msgspec.Raw:
    """A field whose objects have those fields, without the ones in them that are unknown and ask for nothing."""
    if known is None or memoryview(raw).nbytes > _MOST_BYTES:
        return raw
    try:
        given = msgspec.json.decode(raw)
        kept = _without_neutral(given, known)
        return msgspec.Raw(msgspec.json.encode(kept)) if kept != given else raw
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError):
        # What is wrong with it is for the decoder to say; integers beyond 64 bits can't be written again.
        return raw


def _without_neutral(given: Any, known: _KnownFields) -> Any:
    """An object, or a list of such, without fields that are unknown and ask for nothing."""
    if isinstance(given, list) and len(given) <= _MOST_OBJECTS:
        return [_without_neutral(each, known) for each in given]
    if not isinstance(given, dict):
        return given
    kept = {name: value for name, value in given.items() if name in known or not is_neutral(value)}
    within = {name: _without_neutral(kept[name], inner) for name, inner in known.items() if inner and name in kept}
    return kept | within


@cache
def _known_of(kind: Any) -> _KnownFields | None:
    """The fields of the objects that a type says, in whatever list they may be; None if it says none."""
    return _known_in(inspect.type_info(kind))


def _known_in(kind: inspect.Type) -> _KnownFields | None:
    match kind:
        case inspect.Metadata():
            return _known_in(kind.type)
        case inspect.ListType():
            return _known_in(kind.item_type)
        case inspect.UnionType():
            # No body takes objects of two kinds in one place.
            return next(filter(None, map(_known_in, kind.types)), None)
        case inspect.StructType():
            known = {field.encode_name: _known_in(field.type) for field in kind.fields}
            return known if kind.tag_field is None else {**known, kind.tag_field: None}
    return None


def _as_integer(raw: msgspec.Raw) -> msgspec.Raw | None:
    """A whole number as an integer."""
    if not _DECIMAL.fullmatch(raw):
        return None
    value = float(bytes(raw))
    return msgspec.Raw(b"%d" % value) if value.is_integer() and abs(value) < _MOST_EXACT else None


def _fields_of(decoder: "msgspec.json.Decoder[Any]") -> tuple[str, ...]:
    """The names of the fields that a body may have; none if it is not one struct."""
    kind = decoder.type
    return kind.__struct_encode_fields__ if isinstance(kind, type) and issubclass(kind, msgspec.Struct) else ()


def _too_deep(what: str) -> InvalidRequest:
    return InvalidRequest(f"{what} is nested more than {MAX_DEPTH} levels deep", code="invalid_json")


def _describe(message: str, where: str = "", known: Iterable[str] = (), what: str = "the body") -> InvalidRequest:
    """Turn msgspec's "Expected `int`, got `str` - at `$.n`" into our words and the field's name.

    `known` are the fields of the outermost object, of which one may have been meant by an unknown one; `what` is that
    object's own name.
    """
    problem, place = _split_place(message)
    path = (where + place).lstrip(".")
    if field := _FIELD.fullmatch(problem):
        name = f"{path}.{field[1]}" if path else field[1]
        if "unknown" in problem:
            close = difflib.get_close_matches(name[:_LONGEST_NAME], () if path else known, 1, 0.75)
            meant = f"; did you mean {close[0]!r}?" if close else ""
            return InvalidRequest(f"unknown field {name!r}{meant}", name, "unknown_field")
        return InvalidRequest(f"the field {name!r} is required", name, "missing_field")
    problem = problem.replace("`", "")
    return InvalidRequest(f"{path or what}: {problem[:1].lower()}{problem[1:]}", path or None)


def _split_place(message: str) -> tuple[str, str]:
    """What msgspec found, and where below the outermost value: "Expected `int`, got `str`" and ".n".

    By hand, since the names of fields are a client's, and a pattern may take very long for them.
    """
    problem, at, place = message.rpartition(_AT)
    place = place.removeprefix("key in ")
    within_a_name = "field `" in problem and not problem.endswith("`")
    if not at or within_a_name or not place.startswith("$") or not place.endswith("`"):
        return message, ""
    return problem, place[1:-1]

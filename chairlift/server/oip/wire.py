"""Messages of gRPC, made from their bytes once these are known to hold no more than a message may.

Two bytes of an empty message within another become hundreds when they are parsed, so they are counted before.
"""

from collections.abc import Callable
from typing import Any

from google.protobuf import descriptor_pb2
from google.protobuf.message import DecodeError

from chairlift.errors import InvalidRequest
from chairlift.server.oip import protobuf

FromBytes = Callable[[bytes], Any]
# A thousand inputs with their names, types, shapes, contents and parameters have fewer.
MAX_FIELDS = 10_000
_MAX_VARINT = 10
# The wire types: what the low bits of a field's key say of how it goes on.
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_REPEATED = descriptor_pb2.FieldDescriptorProto.LABEL_REPEATED


class _Nested(dict[int, "_Nested"]):
    """The fields that hold messages of which each may hold any number of others, by number, and theirs."""


def parser_of(descriptor: Any) -> FromBytes:
    """What makes a message of its bytes. Raises InvalidRequest."""
    parse, nested = protobuf.message(descriptor.name).FromString, _nested(descriptor)

    def checked(raw: bytes) -> Any:
        _check(raw, nested)
        try:
            return parse(raw)
        except DecodeError as error:
            raise _malformed(str(error)) from None

    return checked


def _nested(descriptor: Any) -> _Nested:
    return _Nested({number: _nested(each) for number, each in _many(descriptor) if _many(each)})


def _many(descriptor: Any) -> list[tuple[int, Any]]:
    """The fields of which each may be there any number of times with a message in it, by number, and its type."""
    proto = descriptor_pb2.DescriptorProto()
    descriptor.CopyToProto(proto)
    repeated = [field.number for field in proto.field if field.label == _REPEATED]
    fields = [(number, descriptor.fields_by_number[number].message_type) for number in repeated]
    return [(number, kind) for number, kind in fields if kind is not None]


def _check(raw: bytes, nested: _Nested) -> None:
    """Raise for bytes with too many fields, or that have no fields at all.

    Numbers in one field (packed, as all clients send them) and the contents of a tensor are not counted: they take a
    few times what they have on the wire.
    """
    left = MAX_FIELDS
    spans = [(0, len(raw), nested)]
    while spans:
        start, end, inner = spans.pop()
        while start < end:
            left -= 1
            if left < 0:
                what = "those of its inputs, outputs and parameters included"
                raise InvalidRequest(f"the message has more than {MAX_FIELDS} fields, {what}")
            key, start = _varint(raw, start)
            number, kind = key >> 3, key & 7
            if kind == _VARINT:
                _, start = _varint(raw, start)
            elif kind == _LENGTH:
                length, start = _varint(raw, start)
                if length and number in inner:
                    spans.append((start, start + length, inner[number]))
                start += length
            elif kind in (_FIXED32, _FIXED64):
                start += 4 if kind == _FIXED32 else 8
            else:
                raise _malformed(f"a field of wire type {kind}")
        if start != end:
            raise _malformed("a field goes beyond the end")


def _varint(raw: bytes, start: int) -> tuple[int, int]:
    """A number of up to ten bytes, and where it ends."""
    value = shift = 0
    for place in range(start, min(start + _MAX_VARINT, len(raw))):
        value |= (raw[place] & 0x7F) << shift
        if raw[place] < 0x80:
            return value, place + 1
        shift += 7
    raise _malformed("a number without an end")


def _malformed(problem: str) -> InvalidRequest:
    return InvalidRequest(f"the message can't be decoded: {problem}")

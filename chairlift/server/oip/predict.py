"""POST /v1/models/{name}:predict, as KServe v1 has it: instances in, predictions out, all of it JSON.

A model that streams gives parts as they come to clients that accept text/event-stream or application/x-ndjson; others
get all parts of an instance in a list.
"""

import contextlib
from collections.abc import AsyncGenerator, Iterable
from typing import Any

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from chairlift.bodies import check_integers, decode
from chairlift.errors import InvalidRequest, RequestFailed
from chairlift.runners.items import ItemInfo, TensorSpec
from chairlift.server.http.api_errors import ApiError, oip_shape
from chairlift.server.http.exchange import (
    DONE,
    INLINE_SIZE,
    PartStream,
    Terms,
    encode_line,
    off_loop,
    one_line,
    read_body,
    terms_of,
    until_gone,
)
from chairlift.server.models.item_service import ItemService, timing_headers
from chairlift.server.models.registry import model_in_path
from chairlift.server.models.result_size import size_of
from chairlift.server.oip.codec import TensorArray, from_values
from chairlift.server.oip.metadata import tensor_model
from chairlift.server.oip.tensor_items import (
    check_inputs,
    check_json_size,
    check_lists,
    encode_json,
    join,
    signature,
    sizes_of,
    split,
    takes_json,
    takes_texts,
)

PATH = "/v1/models/{name:path}:predict"
# What streams as: what goes before and after each part, and at the end.
STREAM_KINDS = {"text/event-stream": (b"data: ", b"\n\n", DONE), "application/x-ndjson": (b"", b"\n", b"")}


class InstancesBody(msgspec.Struct, forbid_unknown_fields=True):
    """One item for each instance: any JSON for a model that declares no tensors, else its tensors by name.

    Where there is one input, an instance may be its bare value.
    """

    instances: list[Any]


_decoder = msgspec.json.Decoder(InstancesBody)


async def predict(request: Request) -> Response:
    """A prediction for each instance."""
    service = tensor_model(model_in_path(request, request.path_params["name"]))
    info, terms = service.loaded(), terms_of(request.scope)
    raw = await read_body(request, tensors=not takes_texts(info))
    check_json_size(len(raw), info, request.app.state.config)
    instances = await off_loop(len(raw), lambda: read_instances(raw))
    kind = _stream_kind(request)
    if kind is not None:
        if not info.streams:
            raise InvalidRequest(f"`{service.name}` does not stream; accept application/json")
        payloads = await _payloads(service, info, instances, len(raw))
        return _stream(kind, service, info, payloads, terms)
    async with until_gone(request.receive):
        payloads = await _payloads(service, info, instances, len(raw))
        answers = await service.infer(payloads, terms, sizes_of(payloads))
        values = [answer.value for answer in answers]
        written = await off_loop(
            size_of(values, INLINE_SIZE), lambda: write_predictions(_prediction(info, value) for value in values)
        )
    return Response(written, headers=timing_headers(answers), media_type="application/json")


def read_instances(raw: bytes) -> list[Any]:
    """What a body asks predictions for."""
    check_lists(raw)
    instances = decode(raw, _decoder).instances
    if not instances:
        raise InvalidRequest("instances must not be empty", "instances")
    check_integers(raw, "instances")
    return instances


def write_predictions(predictions: Iterable[Any]) -> bytes:
    """The body of an answer. Raises RequestFailed, which names the instance whose result can't be in it."""
    found = list(predictions)
    try:
        return encode_json({"predictions": found})
    except RequestFailed:
        for index, prediction in enumerate(found):
            try:
                encode_json(prediction)
            except RequestFailed as error:
                raise RequestFailed(f"instances[{index}]: {error}") from None
        raise


def _stream(kind: str, service: ItemService, info: ItemInfo, payloads: list[Any], terms: Terms) -> PartStream:
    before, after, end = STREAM_KINDS[kind]

    async def parts() -> AsyncGenerator[bytes, None]:
        async with contextlib.aclosing(service.stream(payloads, terms)) as stream:
            async for index, part in stream:
                yield before + one_line(encode_json({"instance": index, "part": _plain(info, part)})) + after
        if end:
            yield end

    def last(error: ApiError) -> bytes:
        return before + encode_line(oip_shape(error)[1]) + after

    return PartStream(kind, parts(), last)


def _stream_kind(request: Request) -> str | None:
    accepted = request.headers.get("accept", "")
    return next((kind for kind in STREAM_KINDS if kind in accepted), None)


async def _payloads(service: ItemService, info: ItemInfo, instances: list[Any], size: int) -> list[Any]:
    """A payload for each of the instances, which came in a body of so many bytes."""
    service.check_count(len(instances))
    if takes_json(info):
        return instances
    tensors = await off_loop(size, lambda: [_tensors(info, each, index) for index, each in enumerate(instances)])
    if takes_texts(info):
        return await split(service, {name: np.concatenate([each[name] for each in tensors]) for name in tensors[0]})
    return [payload for each in tensors for payload in await split(service, each)]


def _tensors(info: ItemInfo, instance: Any, index: int) -> dict[str, TensorArray]:
    """One instance as a request's tensors."""
    specs = signature(info).inputs
    if len(specs) == 1 and not (isinstance(instance, dict) and instance.keys() == {specs[0].name}):
        instance = {specs[0].name: instance}
    if not isinstance(instance, dict):
        names = ", ".join(spec.name for spec in specs)
        raise InvalidRequest(f"instances[{index}] must be an object with {names}", f"instances[{index}]")
    known = {spec.name: spec for spec in specs}
    tensors = {name: _array(info, known.get(name), name, value) for name, value in instance.items()}
    check_inputs(info, tensors)
    return {name: array.reshape(1) for name, array in tensors.items()} if takes_texts(info) else tensors


def _array(info: ItemInfo, spec: TensorSpec | None, name: str, value: Any) -> TensorArray:
    if spec is None:
        raise InvalidRequest(f"there is no input {name!r}", name)
    shape = _shape(value)
    return from_values(name, spec.datatype, [1, *shape] if info.batch_axis else shape, value)


def _shape(value: Any) -> list[int]:
    """The lengths of nested lists, by the first of each; uneven ones are found when they become an array."""
    shape: list[int] = []
    while isinstance(value, list):
        shape.append(len(value))
        value = value[0] if value else None
    return shape


def _prediction(info: ItemInfo, value: Any) -> Any:
    """An item's result, or of a streaming model the list of its parts."""
    return [_plain(info, part) for part in value] if info.streams else _plain(info, value)


def _plain(info: ItemInfo, value: Any) -> Any:
    """A result as plain values: any JSON, tensors by name, or the value alone where there is one."""
    if takes_json(info):
        return value
    outputs: dict[str, TensorArray] = join(info, [value])
    plain = {name: _values(array[0, ...] if info.batch_axis else array) for name, array in outputs.items()}
    return next(iter(plain.values())) if len(plain) == 1 else plain


def _values(array: TensorArray) -> Any:
    return _texts(array.tolist()) if array.dtype == object else array.tolist()


def _texts(values: Any) -> Any:
    if isinstance(values, list):
        return [_texts(value) for value in values]
    return values.decode("utf-8", "replace") if isinstance(values, bytes) else values

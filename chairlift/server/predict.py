"""POST /v1/models/{name}:predict, as KServe v1 has it: instances in, predictions out, all of it JSON."""

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from chairlift.errors import InvalidRequest
from chairlift.runners.oneshot import OneShotInfo, TensorSpec
from chairlift.server.config import ServerConfig
from chairlift.server.endpoint import Endpoint, terms_of, timing_headers, until_gone
from chairlift.server.errors import oip_shape
from chairlift.server.limits import decode, read_body
from chairlift.server.oip.codec import Array, from_values
from chairlift.server.oip.items import encode_json, join, signature, sizes_of, split, takes_json
from chairlift.server.oip.metadata import one_shot
from chairlift.server.registry import Models


class PredictBody(msgspec.Struct, forbid_unknown_fields=True):
    """One item for each instance: any JSON for a model that declares no tensors, else its tensors by name.

    Where there is one input, an instance may be its bare value.
    """

    instances: list[Any]


_decoder = msgspec.json.Decoder(PredictBody)


async def predict(request: Request) -> Response:
    """A prediction for each instance."""
    config: ServerConfig = request.app.state.config
    models: Models = request.app.state.models
    service = one_shot(models, request.path_params["name"], None)
    body = decode(await read_body(request, config.max_body_bytes, config.body_timeout_s), _decoder)
    if not body.instances:
        raise InvalidRequest("instances must not be empty", "instances")
    info, terms = service.loaded(), terms_of(request)
    async with until_gone(request):
        if takes_json(info):
            payloads = body.instances
        else:
            payloads = [
                payload
                for index, instance in enumerate(body.instances)
                for payload in await split(service, _tensors(info, instance, index))
            ]
        answers = await service.infer(
            payloads, sizes=sizes_of(payloads), priority=terms.priority, timeout=terms.timeout
        )
    values = [answer.value for answer in answers]
    predictions = values if takes_json(info) else [_plain(info, value) for value in values]
    raw = encode_json({"predictions": predictions})
    return Response(raw, headers=timing_headers(answers), media_type="application/json")


def _tensors(info: OneShotInfo, instance: Any, index: int) -> dict[str, Array]:
    """One instance as a request's tensors."""
    specs = signature(info).inputs
    if len(specs) == 1 and not (isinstance(instance, dict) and instance.keys() == {specs[0].name}):
        instance = {specs[0].name: instance}
    if not isinstance(instance, dict):
        names = ", ".join(spec.name for spec in specs)
        raise InvalidRequest(f"instances[{index}] must be an object with {names}", f"instances[{index}]")
    known = {spec.name: spec for spec in specs}
    return {name: _array(info, known.get(name), name, value) for name, value in instance.items()}


def _array(info: OneShotInfo, spec: TensorSpec | None, name: str, value: Any) -> Array:
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


def _plain(info: OneShotInfo, value: Any) -> Any:
    """An item's result: its tensors by name, or the value alone where there is one."""
    outputs: dict[str, Array] = join(info, [value])
    plain = {name: _values(array[0, ...] if info.batch_axis else array) for name, array in outputs.items()}
    return next(iter(plain.values())) if len(plain) == 1 else plain


def _values(array: Array) -> Any:
    return _texts(array.tolist()) if array.dtype == object else array.tolist()


def _texts(values: Any) -> Any:
    if isinstance(values, list):
        return [_texts(value) for value in values]
    return values.decode("utf-8", "replace") if isinstance(values, bytes) else values


PREDICT = Route("/v1/models/{name:path}:predict", Endpoint(predict, oip_shape), methods=["POST"])

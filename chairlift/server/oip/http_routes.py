"""OIP v2 over HTTP: metadata, health, inference with JSON or binary tensors, and the model repository."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from chairlift.bodies import decode
from chairlift.errors import InvalidRequest, Unavailable
from chairlift.runners.items import ItemInfo
from chairlift.server.http.buffered import HeldBody, buffers_full
from chairlift.server.http.exchange import (
    HELD,
    INLINE_SIZE,
    as_json,
    off_loop,
    read_body,
    stays,
    terms_of,
    until_gone,
)
from chairlift.server.http.tenants import TENANT, Tenant
from chairlift.server.models.item_service import ItemService, timing_headers
from chairlift.server.models.registry import model_in_path, models_of
from chairlift.server.models.result_size import size_of
from chairlift.server.oip.codec import TensorArray, from_raw, from_values, to_raw, to_values
from chairlift.server.oip.load_config import read_changes
from chairlift.server.oip.metadata import index, model_metadata, named_models, server_metadata, tensor_model
from chairlift.server.oip.parameters import check_own, read_flag, read_size, read_terms, refuse_others
from chairlift.server.oip.shared_memory import PLACE, Fetch, Place, SharedRegions, place_of
from chairlift.server.oip.statistics import model_config, model_statistics
from chairlift.server.oip.tensor_items import (
    bare_input,
    check_json_size,
    check_lists,
    infer,
    signature,
    takes_json,
    takes_texts,
)

_HEADER_LENGTH = "inference-header-content-length"
_MAX_DIGITS = 18
Parameters = dict[str, Any] | None
Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
T = TypeVar("T")


class InputTensor(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An input: its values as JSON, or as so many bytes after the JSON (`binary_data_size`)."""

    name: str
    shape: list[int]
    datatype: str
    parameters: Parameters = None
    data: Any = msgspec.UNSET


class OutputRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """An output that is wanted, and whether as bytes (`binary_data`)."""

    name: str
    parameters: Parameters = None


class InferBody(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The JSON of an inference request. `model_name`, if it is there, must be the path's."""

    inputs: list[InputTensor]
    outputs: list[OutputRequest] | None = None
    id: str | None = None
    parameters: Parameters = None
    model_name: str | None = None


class IndexBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a repository index request."""

    ready: bool = False


class ChangeBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a load or unload request."""

    parameters: Parameters = None


class ShareBody(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a registration of shared memory: bytes of what its owner has called `key`."""

    key: str
    byte_size: Bytes
    offset: Bytes = 0


_share_decoder = msgspec.json.Decoder(ShareBody)
_infer_decoder = msgspec.json.Decoder(InferBody)
_index_decoder = msgspec.json.Decoder(IndexBody)
_change_decoder = msgspec.json.Decoder(ChangeBody)


async def infer_route(request: Request) -> Response:
    """Run a model on tensors."""
    path = request.path_params
    service = _asked(request)
    info = service.loaded()
    # Triton's clients send no Content-Type.
    raw = await read_body(request, binary=True, untyped=True, tensors=not takes_texts(info))
    regions, owner = _regions(request)
    body, tensors = await _read(request, raw, info)
    if body.model_name not in (None, path["name"]):
        raise InvalidRequest(f"model_name is {body.model_name!r}, but the path names {path['name']!r}", "model_name")
    wanted = _wanted(body, info, owner)
    if stays(request.receive) and any(binary and place is None for _, binary, place in wanted):
        problem = "a line's answer is JSON: leave the parameters binary_data_output and binary_data out, or set false"
        raise InvalidRequest(problem, "binary_data_output")
    terms = read_terms(body.parameters, terms_of(request.scope), also=("binary_data_output",))
    async with until_gone(request.receive):
        outputs, answers = await infer(service, tensors, terms)
    about = {"model_name": service.name, "model_version": service.version}
    if body.id:
        about["id"] = body.id
    size = size_of(list(outputs.values()), INLINE_SIZE)
    answer, headers = await off_loop(size, lambda: _write(about, outputs, info, wanted, regions))
    kind = "application/octet-stream" if headers else "application/json"
    return Response(answer, headers=headers | timing_headers(answers), media_type=kind)


def _asked(request: Request) -> ItemService:
    path = request.path_params
    return tensor_model(model_in_path(request, path["name"], path.get("version")))


def _regions(request: Request) -> tuple[SharedRegions, str]:
    """The memory that clients share, and whose of it a request may use."""
    tenant: Tenant | None = request.scope.get(TENANT)
    return request.app.state.regions, (tenant.name or "") if tenant is not None else ""


async def _read(request: Request, raw: bytes, info: ItemInfo) -> tuple[InferBody, dict[str, TensorArray]]:
    """What a body says, and its tensors. Without any JSON it is the one input, and the answer is bytes as well."""
    length = request.headers.get(_HEADER_LENGTH)
    end = _end_of_json(raw, length)
    # Of a model that takes JSON the bytes are documents, which are decoded too.
    check_json_size(len(raw) if takes_json(info) else end, info, request.app.state.config)
    if length == "0":
        tensors = await off_loop(len(raw), lambda: bare_input(info, raw))
        return InferBody(inputs=[], parameters={"binary_data_output": True}), tensors
    regions, owner = _regions(request)

    def read_json() -> tuple[InferBody, int]:
        check_lists(raw[:end])
        body = decode(raw[:end], _infer_decoder)
        return body, regions.size_of((each.parameters for each in body.inputs), owner)

    body, shared = await off_loop(end, read_json)
    # A few bytes may ask for a large region, whose bytes count like those of a body.
    held: HeldBody | None = request.scope.get(HELD)
    if shared and held is not None and not held.take(shared):
        raise buffers_full()
    work = partial(_inputs, body, memoryview(raw)[end:], regions.fetcher(owner))
    return body, await off_loop(len(raw) + shared, work)


def _end_of_json(raw: bytes, length: str | None) -> int:
    """Where the bytes after the JSON begin."""
    if length is None:
        return len(raw)
    if not length.isdecimal() or len(length) > _MAX_DIGITS or int(length) > len(raw):
        raise InvalidRequest(f"Inference-Header-Content-Length must be a number up to the body's, got {length!r}")
    return int(length)


def _inputs(body: InferBody, binary: memoryview, fetch: Fetch) -> dict[str, TensorArray]:
    tensors: dict[str, TensorArray] = {}
    start = 0
    for each in body.inputs:
        if each.name in tensors:
            raise InvalidRequest(f"input {each.name!r} is there twice", each.name)
        check_own(each.parameters, "binary_data_size", *PLACE)
        size = read_size(each.parameters, "binary_data_size")
        shared = fetch(each.parameters)
        if [size is None, each.data is msgspec.UNSET, shared is None].count(False) != 1:
            raise InvalidRequest(f"input {each.name!r} needs either data or binary_data_size", each.name)
        if shared is not None:
            tensors[each.name] = from_raw(each.name, each.datatype, each.shape, shared)
            continue
        if size is None:
            tensors[each.name] = from_values(each.name, each.datatype, each.shape, each.data)
            continue
        if start + size > len(binary):
            raise InvalidRequest(f"the binary data ends before input {each.name!r} does", each.name)
        tensors[each.name] = from_raw(each.name, each.datatype, each.shape, binary[start : start + size])
        start += size
    if start != len(binary):
        raise InvalidRequest(f"the body has {len(binary) - start} bytes of binary data that belong to no input")
    return tensors


def _wanted(body: InferBody, info: ItemInfo, owner: str) -> list[tuple[str, bool, Place | None]]:
    """The outputs to send, in order, each with whether it goes as bytes, and where to if not into the answer."""
    default = read_flag(body.parameters, "binary_data_output", False)
    names = [spec.name for spec in signature(info).outputs]
    if not body.outputs:
        return [(name, default, None) for name in names]
    seen: set[str] = set()
    for output in body.outputs:
        check_own(output.parameters, "binary_data", *PLACE)
        if output.name in seen:
            raise InvalidRequest(f"output {output.name!r} is there twice", output.name)
        seen.add(output.name)
        if output.name not in names:
            raise InvalidRequest(f"there is no output {output.name!r}, only {', '.join(names)}", output.name)
    return [
        (output.name, read_flag(output.parameters, "binary_data", default), place_of(output.parameters, owner))
        for output in body.outputs
    ]


def _write(
    about: Mapping[str, Any],
    outputs: Mapping[str, TensorArray],
    info: ItemInfo,
    wanted: Sequence[tuple[str, bool, Place | None]],
    regions: SharedRegions,
) -> tuple[bytes, dict[str, str]]:
    """The body of an answer, and the header that it needs if part of it is binary."""
    datatypes = {spec.name: spec.datatype for spec in signature(info).outputs}
    described: list[dict[str, Any]] = []
    chunks: list[bytes] = []
    for name, binary, place in wanted:
        array, datatype = outputs[name], datatypes[name]
        output: dict[str, Any] = {"name": name, "datatype": datatype, "shape": array.shape}
        if place is not None:
            output["parameters"] = regions.write(place, to_raw(array, datatype)).parameters
        elif binary:
            chunks.append(to_raw(array, datatype))
            output["parameters"] = {"binary_data_size": len(chunks[-1])}
        else:
            output["data"] = to_values(name, array, datatype)
        described.append(output)
    header = msgspec.json.encode({**about, "outputs": described})
    if not chunks:
        return header, {}
    return b"".join((header, *chunks)), {"Inference-Header-Content-Length": str(len(header))}


async def server_route(request: Request) -> Response:
    """What this server is, and what it can do."""
    return as_json(server_metadata(request.app.state.config))


async def live_route(request: Request) -> Response:
    """The process answers, and minds its workers."""
    if (problem := models_of(request).problem) is not None:
        raise Unavailable(problem)
    return as_json({"live": True})


async def ready_route(request: Request) -> Response:
    """200 while all models take requests."""
    if not models_of(request).ready:
        raise Unavailable("not every model is ready")
    return as_json({"ready": True})


async def model_route(request: Request) -> Response:
    """What a model takes and gives."""
    return as_json(model_metadata(models_of(request), _asked(request)))


async def config_route(request: Request) -> Response:
    """How a model is served."""
    return as_json(model_config(_asked(request)))


async def statistics_route(request: Request) -> Response:
    """What a model, or all of them, did so far."""
    name, version = request.path_params.get("name", ""), request.path_params.get("version")
    if name:
        model_in_path(request, name, version)
    return as_json({"model_stats": model_statistics(named_models(models_of(request), name, version))})


async def model_ready_route(request: Request) -> Response:
    """200 while a model takes requests."""
    path = request.path_params
    model = model_in_path(request, path["name"], path.get("version"))
    if not model.ready:
        raise Unavailable(f"the model `{model.name}` is {model.state}")
    return as_json({"name": model.name, "ready": True})


async def index_route(request: Request) -> Response:
    """All models that there are, loaded or not."""
    body = await _optional(request, _index_decoder, IndexBody())
    return as_json(index(models_of(request), body.ready))


async def load_route(request: Request) -> Response:
    """Load a model, or load it anew, with the settings that a configuration changes."""
    body = await _optional(request, _change_decoder, ChangeBody())
    models, name = models_of(request), request.path_params["name"]
    await models.load(name, read_changes(models, name, body.parameters))
    return Response()


async def unload_route(request: Request) -> Response:
    """Take a model out of service."""
    body = await _optional(request, _change_decoder, ChangeBody())
    refuse_others(body.parameters, "unload_dependents")
    read_flag(body.parameters, "unload_dependents", False)  # nothing depends on a model here, so both are the same
    await models_of(request).unload(request.path_params["name"])
    return Response()


async def share_route(request: Request) -> Response:
    """Take a region of shared memory into use."""
    regions, owner = _regions(request)
    body = decode(await read_body(request, untyped=True), _share_decoder)
    regions.register(owner, request.path_params["name"], body.key, body.offset, body.byte_size)
    return Response()


async def unshare_route(request: Request) -> Response:
    """Let go of a region of shared memory, or of all."""
    regions, owner = _regions(request)
    regions.unregister(owner, request.path_params.get("name", ""))
    return Response()


async def shared_route(request: Request) -> Response:
    """The regions of shared memory in use, or one of them."""
    regions, owner = _regions(request)
    return as_json(regions.status(owner, request.path_params.get("name", "")))


async def _optional(request: Request, decoder: "msgspec.json.Decoder[T]", default: T) -> T:
    raw = await read_body(request, untyped=True)
    return decode(raw, decoder) if raw else default

"""OIP's gRPC messages, read as tensors and written from them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from chairlift.errors import InvalidRequest
from chairlift.runners.items import ItemInfo
from chairlift.server.http.exchange import Terms
from chairlift.server.models.item_service import ItemService
from chairlift.server.oip import protobuf
from chairlift.server.oip.codec import TensorArray, from_raw, from_values, to_raw
from chairlift.server.oip.parameters import EMPTY_FINAL, check_own, read_size, read_terms
from chairlift.server.oip.shared_memory import PLACE, Fetch, Place, SharedRegions, place_of
from chairlift.server.oip.tensor_items import signature

_CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


class Call(NamedTuple):
    """What a ModelInferRequest asks for."""

    tensors: dict[str, TensorArray]
    outputs: dict[str, Place | None]
    terms: Terms


def read_request(request: Any, info: ItemInfo, terms: Terms, regions: SharedRegions) -> Call:
    """Take a ModelInferRequest apart. Raises InvalidRequest naming what is wrong."""
    terms = read_terms(parameters_of(request.parameters), terms, also=(EMPTY_FINAL, "binary_data_output"))
    owner = owner_of(terms)
    known = [spec.name for spec in signature(info).outputs]
    wanted: dict[str, Place | None] = {}
    for output in request.outputs:
        # Whatever `binary_data` says: here all outputs go as bytes.
        parameters = parameters_of(output.parameters)
        check_own(parameters, "binary_data", *PLACE)
        wanted[output.name] = place_of(parameters, owner)
        if output.name not in known:
            raise InvalidRequest(f"there is no output {output.name!r}, only {', '.join(known)}", output.name)
    return Call(_tensors(request, regions.fetcher(owner)), wanted or dict.fromkeys(known), terms)


def shared_size(request: Any, terms: Terms, regions: SharedRegions) -> int:
    """The bytes that a ModelInferRequest's tensors have in shared memory, before any is read."""
    return regions.size_of((parameters_of(tensor.parameters) for tensor in request.inputs), owner_of(terms))


def owner_of(terms: Terms) -> str:
    """Whose shared memory a request may use."""
    return (terms.tenant.name or "") if terms.tenant is not None else ""


def _tensors(request: Any, fetch: Fetch) -> dict[str, TensorArray]:
    raw = request.raw_input_contents
    elsewhere = sum("shared_memory_region" in tensor.parameters for tensor in request.inputs)
    if raw and len(raw) != len(request.inputs) - elsewhere:
        raise InvalidRequest(f"raw_input_contents has {len(raw)} entries for {len(request.inputs)} inputs")
    tensors: dict[str, TensorArray] = {}
    index = 0
    for tensor in request.inputs:
        name, datatype, shape = tensor.name, tensor.datatype, list(tensor.shape)
        if name in tensors:
            raise InvalidRequest(f"input {name!r} is there twice", name)
        parameters = parameters_of(tensor.parameters)
        check_own(parameters, "binary_data_size", *PLACE)
        if (shared := fetch(parameters)) is not None:
            tensors[name] = from_raw(name, datatype, shape, shared)
            continue
        size = read_size(parameters, "binary_data_size")
        if size is not None and (not raw or size != len(raw[index])):
            given = f"{len(raw[index])} bytes" if raw else "none"
            raise InvalidRequest(f"input {name!r} is to have {size} bytes of raw data, got {given}", name)
        if raw:
            if tensor.HasField("contents"):
                raise InvalidRequest(f"input {name!r} has both contents and raw_input_contents", name)
            tensors[name] = from_raw(name, datatype, shape, raw[index])
            index += 1
        elif datatype in _CONTENTS:
            tensors[name] = from_values(name, datatype, shape, list(getattr(tensor.contents, _CONTENTS[datatype])))
        else:
            raise InvalidRequest(f"input {name!r}: {datatype} has no typed contents; use raw_input_contents", name)
    return tensors


def write_response(
    service: ItemService,
    info: ItemInfo,
    request_id: str,
    regions: SharedRegions,
    outputs: Mapping[str, TensorArray],
    wanted: Mapping[str, Place | None],
) -> bytes:
    """A ModelInferResponse of what is wanted, serialized."""
    response = protobuf.ModelInferResponse(model_name=service.name, model_version=service.version, id=request_id)
    _add_outputs(response, info, regions, outputs, wanted)
    raw: bytes = response.SerializeToString()
    return raw


def write_part(
    service: ItemService,
    info: ItemInfo,
    request_id: str,
    regions: SharedRegions,
    outputs: Mapping[str, TensorArray],
    wanted: Mapping[str, Place | None],
    final: bool,
) -> bytes:
    """A ModelStreamInferResponse of the same; `final` is what Triton's streams say in `triton_final_response`."""
    part = protobuf.ModelStreamInferResponse()
    response = part.infer_response
    response.model_name, response.model_version, response.id = service.name, service.version, request_id
    _add_outputs(response, info, regions, outputs, wanted)
    response.parameters["triton_final_response"].bool_param = final
    raw: bytes = part.SerializeToString()
    return raw


def _add_outputs(
    response: Any,
    info: ItemInfo,
    regions: SharedRegions,
    outputs: Mapping[str, TensorArray],
    wanted: Mapping[str, Place | None],
) -> None:
    datatypes = {spec.name: spec.datatype for spec in signature(info).outputs}
    for name, place in wanted.items():
        array, datatype = outputs[name], datatypes[name]
        output = response.outputs.add(name=name, datatype=datatype, shape=array.shape)
        if place is None:
            response.raw_output_contents.append(to_raw(array, datatype))
            continue
        # Clients count by it.
        response.raw_output_contents.append(b"")
        for parameter, value in regions.write(place, to_raw(array, datatype)).parameters.items():
            kind = "string_param" if isinstance(value, str) else "int64_param"
            setattr(output.parameters[parameter], kind, value)


def parameters_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """A map of parameters as plain values."""
    return {name: getattr(value, value.WhichOneof("parameter_choice") or "", None) for name, value in given.items()}

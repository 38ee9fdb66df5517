"""A request's tensors as items that share batches with others', and the items' results as tensors again.

The first dimension of every tensor counts items, unless the model has no batch axis: then a request is one item.
Models that declare no tensors get some: those that take texts have `text` (and `query`), a Python model takes `input`
and gives `output`, a JSON document for each item.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from chairlift.bodies import check_integers, decode, has_more_lists
from chairlift.config.server import ServerConfig
from chairlift.errors import InvalidRequest, RequestFailed
from chairlift.runners.items import TEXT_TASKS, Encoding, ItemInfo, TensorSpec
from chairlift.runners.tensors import datatype_of, dtype_of, itemsize_of
from chairlift.server.http.api_errors import ApiError
from chairlift.server.http.exchange import INLINE_SIZE, Terms, off_loop
from chairlift.server.items.embeddings import MAX_NUMBERS
from chairlift.server.items.texts import from_pairs, from_texts
from chairlift.server.models.item_service import ItemService
from chairlift.server.models.result_size import size_of
from chairlift.server.oip.codec import TensorArray, from_raw

_any = msgspec.json.Decoder()
_TEXT = TensorSpec("text", "BYTES", ())
_QUERY = TensorSpec("query", "BYTES", ())
# Lists and objects in JSON, of which as many bytes as a body may have would keep everybody waiting. What fits into a
# body of another route has hardly as many.
_MOST_LISTS = 2**20


class Signature(NamedTuple):
    """The tensors of one item."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]


def takes_json(info: ItemInfo) -> bool:
    """Whether an item is any JSON value."""
    return info.task == "python"


def takes_texts(info: ItemInfo) -> bool:
    """Whether an item is a text, or a pair of texts."""
    return info.task in TEXT_TASKS


def signature(info: ItemInfo) -> Signature:
    """What a model takes and gives."""
    match info.task:
        case "embed":
            return Signature((_TEXT,), (TensorSpec("embedding", "FP32", (info.dimensions or -1,)),))
        case "classify":
            return Signature((_TEXT,), (TensorSpec("logits", "FP32", (len(info.labels) or -1,)),))
        case "rerank":
            return Signature((_QUERY, _TEXT), (TensorSpec("score", "FP32", (1,)),))
    if takes_json(info):
        return Signature((TensorSpec("input", "BYTES", ()),), (TensorSpec("output", "BYTES", ()),))
    return Signature(info.inputs, info.outputs)


def bare_input(info: ItemInfo, raw: bytes) -> dict[str, TensorArray]:
    """One item of a model with one input, from nothing but that input's bytes: a text or document as it is."""
    specs = signature(info).inputs
    if len(specs) != 1:
        raise InvalidRequest(f"a body of bytes alone is for models with one input; this one has {len(specs)}")
    spec = specs[0]
    shape = [1, *spec.shape] if info.batch_axis else list(spec.shape)
    if spec.datatype == "BYTES":
        return {spec.name: as_objects([raw]).reshape([1] * len(shape))}
    open_ends = [place for place, length in enumerate(shape) if length < 0]
    if len(open_ends) > 1:
        problem = "has several lengths that are open, so its shape must be sent along"
        raise InvalidRequest(f"input {spec.name!r} {problem}", spec.name)
    for place in open_ends:
        rest = math.prod(length for length in shape if length >= 0) * itemsize_of(spec.datatype)
        shape[place] = len(raw) // max(rest, 1)
    return {spec.name: from_raw(spec.name, spec.datatype, shape, raw)}


async def split(service: ItemService, tensors: Mapping[str, TensorArray]) -> list[Any]:
    """A payload for each item. Raises InvalidRequest naming the tensor that does not fit."""
    info = service.loaded()
    number = check_inputs(info, tensors)
    service.check_count(number)
    if takes_json(info):
        documents = tensors["input"].ravel().tolist()
        return await off_loop(sum(map(len, documents)), lambda: list(map(_parse, documents)))
    if takes_texts(info):
        _check_answer(info, number)
        return list(await _encode(service, tensors))
    if not info.batch_axis:
        return [dict(tensors)]
    specs = [(spec, tensors[spec.name]) for spec in info.inputs]
    columns = {spec.name: array if spec.shape else array.reshape(number) for spec, array in specs}
    return [{name: array[index, ...] for name, array in columns.items()} for index in range(number)]


def check_inputs(info: ItemInfo, tensors: Mapping[str, TensorArray]) -> int:
    """The number of items, if the tensors are those that the model takes."""
    specs = signature(info).inputs
    for name in tensors:
        if all(name != spec.name for spec in specs):
            expected = ", ".join(spec.name for spec in specs)
            raise InvalidRequest(f"unexpected input {name!r}; this model takes {expected}", name)
    lengths: set[int] = set()
    for spec in specs:
        if spec.name not in tensors:
            raise InvalidRequest(f"input {spec.name!r} is missing", spec.name)
        lengths.add(_check(spec, tensors[spec.name], info.batch_axis))
    if len(lengths) != 1 or 0 in lengths:
        raise InvalidRequest("the first dimension of all inputs must be the same number of items, at least 1")
    return lengths.pop()


def _check(spec: TensorSpec, array: TensorArray, batch_axis: bool) -> int:
    """The number of items in one tensor."""
    if array.dtype.newbyteorder("=") != dtype_of(spec.datatype):
        raise InvalidRequest(f"input {spec.name!r} must be {spec.datatype}, got {datatype_of(array.dtype)}", spec.name)
    shape = array.shape[1:] if batch_axis else array.shape
    if batch_axis and not spec.shape and shape == (1,):
        shape = ()  # one value an item may come as [n] or, as Triton's clients send it, [n, 1]
    fits = len(shape) == len(spec.shape) and all(w in (-1, g) for w, g in zip(spec.shape, shape, strict=True))
    if not fits or (batch_axis and not array.ndim):
        message = f"input {spec.name!r} must have shape {shape_of(spec, batch_axis)}, got {list(array.shape)}"
        raise InvalidRequest(message, spec.name)
    return array.shape[0] if batch_axis else 1


def shape_of(spec: TensorSpec, batch_axis: bool) -> list[int]:
    """A tensor's shape as clients see it."""
    return [-1, *spec.shape] if batch_axis else list(spec.shape)


def join(info: ItemInfo, values: Sequence[Any]) -> dict[str, TensorArray]:
    """The results of all items, stacked. Raises RequestFailed where they don't have one shape."""
    if takes_json(info):
        return {"output": as_objects([encode_json(value) for value in values])}
    outputs = signature(info).outputs
    if takes_texts(info):
        rows = np.asarray(values, dtype=np.float32)
        return {outputs[0].name: rows.reshape(len(values), -1)}
    try:
        if not info.batch_axis:
            return {spec.name: np.asarray(values[0][spec.name], dtype_of(spec.datatype)) for spec in outputs}
        return {spec.name: _stack([value[spec.name] for value in values], spec) for spec in outputs}
    except KeyError as error:
        raise RequestFailed(f"the model gave no output {error}") from None
    except ValueError as error:
        raise RequestFailed(f"the items' outputs can't be one tensor: {error}; send them one by one") from None


def _stack(arrays: Sequence[Any], spec: TensorSpec) -> TensorArray:
    dtype = dtype_of(spec.datatype)
    if len(arrays) == 1:
        return np.asarray(arrays[0], dtype)[np.newaxis]
    return np.stack([np.asarray(array, dtype) for array in arrays])


def as_objects(elements: Sequence[bytes]) -> TensorArray:
    """A BYTES tensor with one dimension."""
    array = np.empty(len(elements), dtype=np.object_)
    array[:] = elements
    return array


def check_json_size(size: int, info: ItemInfo, config: ServerConfig) -> None:
    """Raise a 413 for more JSON with tensors or instances than is decoded: nobody else has a turn meanwhile."""
    most = config.max_tensor_json_bytes
    if size <= most or takes_texts(info):
        return
    problem = f"the body has {size} bytes of JSON, more than the limit of {most} (max_tensor_json_bytes)"
    instead = "send fewer items at once"
    if not takes_json(info):
        instead += ", or tensors as bytes to /v2/models/{name}/infer (binary_data_size)"
    raise ApiError(413, f"{problem}; {instead}", code="body_too_large")


def check_lists(raw: bytes, what: str = "the body") -> None:
    """Raise InvalidRequest for JSON, which need not be well-formed, that has more lists and objects than are read."""
    if has_more_lists(raw, _MOST_LISTS):
        problem = f"{what} has more than {_MOST_LISTS} lists and objects"
        raise InvalidRequest(f"{problem}; send fewer, or tensors as bytes", code="too_many_lists")


def _check_answer(info: ItemInfo, number: int) -> None:
    """Refuse texts of which so many answers would be too many numbers."""
    (output,) = signature(info).outputs
    numbers = number * max(output.shape[0], 1)
    if numbers > MAX_NUMBERS:
        problem = f"{number} texts of {output.shape[0]} numbers each are more than {MAX_NUMBERS} numbers"
        raise InvalidRequest(f"{problem}; send fewer at once", "text")


async def _encode(service: ItemService, tensors: Mapping[str, TensorArray]) -> list[Encoding]:
    columns = {name: [_text(name, raw) for raw in array.ravel().tolist()] for name, array in tensors.items()}
    if "query" in columns:
        return await from_pairs(service, list(zip(columns["query"], columns["text"], strict=True)), None, "text")
    return await from_texts(service, columns["text"], None, "text")


def _text(name: str, raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise InvalidRequest(f"input {name!r} is not UTF-8 text", name) from None


def _parse(raw: bytes) -> Any:
    check_lists(raw, "input 'input'")
    try:
        found = decode(raw, _any)
    except InvalidRequest as error:
        raise InvalidRequest(f"input 'input' is not a JSON document: {error}", "input") from None
    check_integers(raw, "input")
    return found


def encode_json(value: Any) -> bytes:
    """A model's result as JSON, arrays and NumPy's numbers included."""
    try:
        return msgspec.json.encode(value, enc_hook=_plain)
    except (TypeError, ValueError, ArithmeticError, NotImplementedError, RecursionError) as error:
        raise RequestFailed(f"the model's result can't be written as JSON: {error}") from None


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise NotImplementedError(f"a {type(value).__name__} is no JSON value")


def sizes_of(payloads: Sequence[Any]) -> list[float] | None:
    """What batches are counted in: tokens where payloads are texts."""
    if not payloads or not isinstance(payloads[0], Encoding):
        return None
    return [float(len(payload.token_ids)) for payload in payloads]


async def infer(
    service: ItemService, tensors: Mapping[str, TensorArray], terms: Terms
) -> "tuple[dict[str, TensorArray], list[Any]]":
    """Output tensors for input tensors, and the answers that they came from."""
    info = service.loaded()
    if info.streams and not takes_json(info):
        # Its parts are tensors each, of any number: one answer has no place for them.
        ways = "ask ModelStreamInfer over gRPC, or :predict"
        raise InvalidRequest(f"`{service.name}` streams, so one answer can't hold its tensors; {ways}", "model_name")
    payloads = await split(service, tensors)
    answers = await service.infer(payloads, terms, sizes_of(payloads))
    values = [answer.value for answer in answers]
    return await off_loop(size_of(values, INLINE_SIZE), lambda: join(info, values)), answers

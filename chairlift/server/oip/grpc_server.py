"""OIP v2 over gRPC, beside the HTTP server and on the same event loop. Needs `pip install chairlift[grpc]`."""

import asyncio
import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

from chairlift.config.keys import Right
from chairlift.config.server import ServerConfig
from chairlift.errors import ConfigError, InvalidRequest
from chairlift.server.http.api_errors import ApiError, as_api_error
from chairlift.server.http.exchange import Terms, terms_in, timing_headers
from chairlift.server.http.tenants import Keys, Tenant, admitted, no_key
from chairlift.server.http.tls import Certificates, Tls
from chairlift.server.models.registry import Models
from chairlift.server.oip import protobuf
from chairlift.server.oip.grpc_messages import parameters_of, read_request, write_response
from chairlift.server.oip.metadata import index, model_metadata, server_metadata, tensor_model
from chairlift.server.oip.parameters import EMPTY_FINAL, read_flag, refuse_others, sooner
from chairlift.server.oip.tensor_items import infer, join, split

RpcContext = Any
Unary = Callable[[Any, RpcContext], Awaitable[Any]]

_CODES = {
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
# Methods that need no key, since probes look there, and the rights that others need.
_OPEN = frozenset({"ServerLive", "ServerReady"})
_RIGHTS: dict[str, Right] = {
    "ModelInfer": "infer",
    "ModelStreamInfer": "infer",
    "RepositoryModelLoad": "admin",
    "RepositoryModelUnload": "admin",
}
# Requests of one stream that may be under way at once; more are read as these end.
_STREAM_WIDTH = 64
# What gRPC says when there is no deadline is a very long time.
_NO_DEADLINE_S = 1e6


def make_grpc_server(
    models: Models, config: ServerConfig, port: int, keys: Keys, tls: Tls | None = None
) -> tuple[Any, int]:
    """A server that is yet to be started, and the port that it got (`port` 0 takes any). Raises ConfigError."""
    server = grpc.aio.server(
        options=(("grpc.max_receive_message_length", config.max_body_bytes), ("grpc.max_send_message_length", -1))
    )
    server.add_generic_rpc_handlers((_handlers(_Service(models, keys, config.model_control)),))
    host = f"[{config.host}]" if ":" in config.host else config.host
    add = server.add_insecure_port
    if tls is not None:
        add = functools.partial(server.add_secure_port, server_credentials=_credentials(tls))
    try:
        return server, add(f"{host}:{port}")
    except RuntimeError as error:
        raise ConfigError(f"can't listen on {config.host} port {port}: {error}; see --grpc-port") from None


def _credentials(tls: Tls) -> Any:
    """The server's side of TLS, as of each new connection."""
    used = tls.certificates

    def renewed() -> Any:
        nonlocal used
        if tls.certificates is used:
            return None
        used = tls.certificates
        return _as_grpc(used)

    return grpc.dynamic_ssl_server_credentials(_as_grpc(used), renewed, used.authority is not None)


def _as_grpc(made: Certificates) -> Any:
    return grpc.ssl_server_certificate_configuration([(made.key, made.certificate)], made.authority)


def _handlers(service: "_Service") -> grpc.GenericRpcHandler:
    """What gRPC needs to know of each method, from the protocol's own description."""
    made: dict[str, Any] = {}
    for method in protobuf.methods():
        handler = getattr(service, method.name)
        request = protobuf.message(method.input_type.name).FromString
        response = protobuf.message(method.output_type.name).SerializeToString
        kind = grpc.stream_stream_rpc_method_handler if method.client_streaming else grpc.unary_unary_rpc_method_handler
        made[method.name] = kind(handler if method.client_streaming else service.guarded(handler), request, response)
    return grpc.method_handlers_generic_handler(protobuf.SERVICE, made)


class _Service:
    """The protocol's methods, named as in it."""

    def __init__(self, models: Models, keys: Keys, model_control: bool) -> None:
        self._models = models
        self._keys = keys
        self._model_control = model_control

    def guarded(self, handler: Unary) -> Unary:
        """The method, its errors as gRPC's, and asking for a key that may, except where probes look."""
        is_open, right = handler.__name__ in _OPEN, _RIGHTS.get(handler.__name__)

        async def call(request: Any, context: RpcContext) -> Any:
            try:
                if is_open:
                    return await handler(request, context)
                with admitted(self._tenant(context), right, self._model_control):
                    return await handler(request, context)
            except Exception as error:
                await _abort(context, as_api_error(error))

        return call

    def _tenant(self, context: RpcContext) -> Tenant | None:
        """Who calls, where keys are asked for. Raises a 401."""
        if not self._keys.needed:
            return None
        given = dict(context.invocation_metadata() or ()).get("authorization", "")
        tenant = self._keys.find(given.encode()) if isinstance(given, str) else None
        if tenant is None:
            raise no_key("metadata 'authorization: Bearer KEY'")
        return tenant

    def _terms(self, context: RpcContext) -> Terms:
        """What the call's metadata and its deadline ask for, and whose it is."""
        metadata = context.invocation_metadata() or ()
        terms = terms_in((key.encode(), value.encode()) for key, value in metadata if isinstance(value, str))
        terms, left = terms._replace(tenant=self._tenant(context)), context.time_remaining()
        return terms if left is None or left > _NO_DEADLINE_S else terms._replace(timeout=sooner(terms.timeout, left))

    async def ServerLive(self, request: Any, context: RpcContext) -> Any:
        """The process answers."""
        return protobuf.ServerLiveResponse(live=True)

    async def ServerReady(self, request: Any, context: RpcContext) -> Any:
        """Whether all models take requests."""
        return protobuf.ServerReadyResponse(ready=self._models.ready)

    async def ModelReady(self, request: Any, context: RpcContext) -> Any:
        """Whether a model takes requests."""
        return protobuf.ModelReadyResponse(ready=self._models.get(request.name, request.version).ready)

    async def ServerMetadata(self, request: Any, context: RpcContext) -> Any:
        """What this server is."""
        return protobuf.ServerMetadataResponse(**server_metadata())

    async def ModelMetadata(self, request: Any, context: RpcContext) -> Any:
        """What a model takes and gives."""
        service = tensor_model(self._models, request.name, request.version)
        return protobuf.ModelMetadataResponse(**model_metadata(self._models, service))

    async def ModelInfer(self, request: Any, context: RpcContext) -> Any:
        """Run a model on tensors."""
        service = tensor_model(self._models, request.model_name, request.model_version)
        call = read_request(request, service.loaded(), self._terms(context))
        outputs, answers = await infer(service, call.tensors, call.terms)
        context.set_trailing_metadata(_timings(answers))
        return write_response(service, request.id, {name: outputs[name] for name in call.outputs})

    async def ModelStreamInfer(self, requests: AsyncIterator[Any], context: RpcContext) -> AsyncIterator[Any]:
        """Run a model on tensors, request by request as they arrive; a streaming model's parts are answers each."""
        tenant, right = None, _RIGHTS["ModelStreamInfer"]
        try:
            tenant = self._tenant(context)
            if tenant is not None:
                tenant.check_right(right)
        except ApiError as error:
            await _abort(context, error)
        answers: asyncio.Queue[Any] = asyncio.Queue(_STREAM_WIDTH)
        places = asyncio.Semaphore(_STREAM_WIDTH)

        async def answer(request: Any) -> None:
            try:
                with admitted(tenant, right, self._model_control):
                    async for response in self._stream(request, context):
                        await answers.put(protobuf.ModelStreamInferResponse(infer_response=response))
            except Exception as error:
                message = str(as_api_error(error))
                failed = protobuf.ModelInferResponse(id=request.id, model_name=request.model_name)
                await answers.put(protobuf.ModelStreamInferResponse(error_message=message, infer_response=failed))
            finally:
                places.release()

        async def read() -> None:
            async with asyncio.TaskGroup() as tasks:
                async for request in requests:
                    await places.acquire()
                    tasks.create_task(answer(request))
            await answers.put(None)

        reading = asyncio.create_task(read())
        try:
            while (response := await answers.get()) is not None:
                yield response
            await reading
        finally:
            reading.cancel()

    async def _stream(self, request: Any, context: RpcContext) -> AsyncIterator[Any]:
        service = tensor_model(self._models, request.model_name, request.model_version)
        info = service.loaded()
        call = read_request(request, info, self._terms(context))
        if not info.streams:
            outputs, _ = await infer(service, call.tensors, call.terms)
            yield write_response(service, request.id, {name: outputs[name] for name in call.outputs}, final=True)
            return
        payloads = await split(service, call.tensors)
        if len(payloads) != 1:
            raise InvalidRequest("a model that streams takes one item a request")
        async for _, part in service.stream(payloads, call.terms):
            outputs = join(info, [part])
            yield write_response(service, request.id, {name: outputs[name] for name in call.outputs}, final=False)
        if read_flag(parameters_of(request.parameters), EMPTY_FINAL, False):
            yield write_response(service, request.id, {}, final=True)

    async def RepositoryIndex(self, request: Any, context: RpcContext) -> Any:
        """All models that there are, loaded or not."""
        _check_repository(request)
        return protobuf.RepositoryIndexResponse(models=index(self._models, request.ready))

    async def RepositoryModelLoad(self, request: Any, context: RpcContext) -> Any:
        """Load a model, or load it anew."""
        _check_repository(request)
        refuse_others(parameters_of(request.parameters))
        await self._models.load(request.model_name)
        return protobuf.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(self, request: Any, context: RpcContext) -> Any:
        """Take a model out of service."""
        _check_repository(request)
        given = parameters_of(request.parameters)
        refuse_others(given, "unload_dependents")
        read_flag(given, "unload_dependents", False)  # nothing depends on a model here, so both are the same
        await self._models.unload(request.model_name)
        return protobuf.RepositoryModelUnloadResponse()


def _check_repository(request: Any) -> None:
    if request.repository_name:
        raise InvalidRequest("repository_name must be empty: there is one repository", "repository_name")


def _timings(answers: Any) -> tuple[tuple[str, str], ...]:
    return tuple((name.lower(), value) for name, value in timing_headers(answers).items())


async def _abort(context: RpcContext, error: ApiError) -> None:
    code = _CODES.get(error.status)
    if code is None:
        code = grpc.StatusCode.INVALID_ARGUMENT if error.status < 500 else grpc.StatusCode.INTERNAL
    trailing = tuple((name.lower(), value) for name, value in error.headers.items())
    await context.abort(code, str(error), trailing)

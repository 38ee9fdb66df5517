"""OIP v2 over gRPC, beside the HTTP server and on the same event loop. Needs `pip install chairlift[grpc]`."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import grpc

from chairlift.config.keys import Right
from chairlift.config.server import ServerConfig
from chairlift.errors import ConfigError, InvalidRequest
from chairlift.runners.items import ItemInfo
from chairlift.server.http.api_errors import ApiError, as_api_error
from chairlift.server.http.buffered import Buffered, HeldBody, buffers_full
from chairlift.server.http.exchange import INLINE_SIZE, Terms, off_loop, out_of_time, terms_in
from chairlift.server.http.places import Places
from chairlift.server.http.tenants import Keys, Tenant, admitted, no_key
from chairlift.server.http.tls import Certificates, Tls
from chairlift.server.models.item_service import timing_headers
from chairlift.server.models.registry import Models
from chairlift.server.models.result_size import size_of
from chairlift.server.oip import protobuf
from chairlift.server.oip.grpc_calls import COPIES, Door, Rpc, RpcContext, RpcPlace, calls_full, client_of, most_bytes
from chairlift.server.oip.grpc_messages import (
    Call,
    owner_of,
    parameters_of,
    read_request,
    shared_size,
    write_part,
    write_response,
)
from chairlift.server.oip.grpc_streams import STREAM_WIDTH, Answers, RpcStream, RpcStreams
from chairlift.server.oip.load_config import read_changes
from chairlift.server.oip.metadata import index, model_metadata, named_models, server_metadata, tensor_model
from chairlift.server.oip.parameters import EMPTY_FINAL, read_flag, refuse_others, sooner
from chairlift.server.oip.shared_memory import SharedRegions
from chairlift.server.oip.statistics import model_config, model_statistics
from chairlift.server.oip.tensor_items import infer, join, split
from chairlift.server.oip.wire import FromBytes, parser_of

Unary = Callable[[Any, Rpc], Awaitable[Any]]

_CODES = {
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
# Methods of probes, which bring no key, and a message with nothing in it; and the rights that others need.
_OPEN = frozenset({"ServerLive", "ServerReady"})
_RIGHTS: dict[str, Right] = {
    "ModelInfer": "infer",
    "ModelStreamInfer": "infer",
    "SystemSharedMemoryStatus": "infer",
    "SystemSharedMemoryRegister": "infer",
    "SystemSharedMemoryUnregister": "infer",
    "RepositoryModelLoad": "admin",
    "RepositoryModelUnload": "admin",
}
# What gRPC says when there is no deadline is a very long time.
_NO_DEADLINE_S = 1e6


def make_grpc_server(
    models: Models,
    config: ServerConfig,
    port: int,
    keys: Keys,
    tls: Tls | None = None,
    buffered: Buffered | None = None,
) -> tuple[Any, int]:
    """A server that is yet to be started, and the port that it got (`port` 0 takes any). Raises ConfigError.

    `buffered` is given where others hold bytes beside it.
    """
    service = _Service(models, config, keys, buffered or Buffered(config.max_buffered_bytes))
    alive_ms = int(config.write_timeout_s * 1000)
    server = grpc.aio.server(
        options=(
            ("grpc.max_receive_message_length", most_bytes(config)),
            ("grpc.max_send_message_length", -1),
            ("grpc.max_allowed_incoming_connections", config.max_connections),
            # Another server on the same port would get a part of the calls, and nobody would know.
            ("grpc.so_reuseport", 0),
            # A call that has no leave to send its message yet can send what fits this window. It must not grow.
            ("grpc.http2.bdp_probe", 0),
            # A client that reads nothing answers no ping either, and its connection is closed.
            ("grpc.keepalive_time_ms", alive_ms),
            ("grpc.keepalive_timeout_ms", alive_ms),
        )
    )
    server.add_generic_rpc_handlers((_handlers(service),))
    host = f"[{config.host}]" if ":" in config.host else config.host
    add = server.add_insecure_port
    if tls is not None:
        add = partial(server.add_secure_port, server_credentials=_credentials(tls))
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
    """What gRPC needs to know of each method, from the protocol's own description.

    To gRPC all of them take streams of bytes: then a message is read when its handler says so, not before.
    """
    made: dict[str, Any] = {}
    for method in protobuf.methods():
        parse = parser_of(method.input_type)
        if method.client_streaming:
            made[method.name] = grpc.stream_stream_rpc_method_handler(service.stream(parse))
        else:
            handler = getattr(service, method.name)
            made[method.name] = grpc.stream_unary_rpc_method_handler(service.unary(handler, parse))
    return grpc.method_handlers_generic_handler(protobuf.SERVICE, made)


class _Service:
    """The protocol's methods, named as in it."""

    def __init__(self, models: Models, config: ServerConfig, keys: Keys, buffered: Buffered) -> None:
        self._models = models
        self._config = config
        self._keys = keys
        self._regions = SharedRegions(config)
        self._buffered = buffered
        self._door = Door(config, self._buffered)
        self._streams = RpcStreams(config, self._buffered)
        self._places = Places(config.max_connections)

    def unary(self, handler: Unary, parse: FromBytes) -> Callable[[Any, RpcContext], Awaitable[bytes]]:
        """The method: one message in, one out. The key is asked for, except where probes look, before it is read.

        A handler that may have much to say gives bytes, not a message: it has them made off the event loop.
        """
        is_open, right = handler.__name__ in _OPEN, _RIGHTS.get(handler.__name__)

        async def call(_: Any, context: RpcContext) -> bytes:
            reply = b""
            try:
                if is_open:
                    rpc = Rpc(context, HeldBody(self._buffered))
                    reply = (await handler(None, rpc)).SerializeToString()
                else:
                    tenant, rpc, place = self._enter(context)
                    with admitted(tenant, right, self._config.model_control):
                        async with asyncio.timeout(self._config.request_timeout_s):
                            answer = await handler(await self._read(rpc, place, parse), rpc)
                            reply = answer if isinstance(answer, bytes) else answer.SerializeToString()
                    # The answer takes the place of the message.
                    rpc.held.release()
                    if not rpc.held.take(COPIES * len(reply)):
                        raise buffers_full()
            except Exception as error:
                await _abort(context, self._refusal(error))
            return reply

        return call

    def _refusal(self, error: Exception) -> ApiError:
        if isinstance(error, TimeoutError):
            error = out_of_time(self._config.request_timeout_s)
        return as_api_error(error)

    def _enter(self, context: RpcContext) -> tuple[Tenant | None, Rpc, RpcPlace]:
        """Let a call in, if it may come and there are not too many. What it holds is let go when it is over."""
        tenant = self._tenant(context)
        place, held = RpcPlace(client_of(tenant, context)), HeldBody(self._buffered)
        if self._places.enter(place.client, place) > 0:
            self._places.leave(place)
            raise calls_full(self._config)
        context.add_done_callback(partial(self._leave, place, held))
        return tenant, Rpc(context, held), place

    def _leave(self, place: RpcPlace, held: HeldBody, context: RpcContext) -> None:
        self._places.leave(place)
        held.release()

    async def _read(self, rpc: Rpc, place: RpcPlace, parse: FromBytes) -> Any:
        raw = await self._door.read(rpc, place)
        return await off_loop(len(raw), partial(parse, raw))

    def _tenant(self, context: RpcContext) -> Tenant | None:
        """Who calls, where keys are asked for. Raises a 401."""
        if not self._keys.needed:
            return None
        metadata = context.invocation_metadata() or ()
        headers = [(key.encode(), value.encode()) for key, value in metadata if isinstance(value, str)]
        tenant = self._keys.find_in({"headers": headers})
        if tenant is None:
            raise no_key("metadata 'authorization: Bearer KEY' or 'x-api-key: KEY'")
        return tenant

    def _terms(self, context: RpcContext) -> Terms:
        """What the call's metadata and its deadline ask for, and whose it is."""
        metadata = context.invocation_metadata() or ()
        terms = terms_in([(key.encode(), value.encode()) for key, value in metadata if isinstance(value, str)])
        terms, left = terms._replace(tenant=self._tenant(context)), context.time_remaining()
        return terms if left is None or left > _NO_DEADLINE_S else terms._replace(timeout=sooner(terms.timeout, left))

    async def ServerLive(self, request: Any, rpc: Rpc) -> Any:
        """Whether the process minds its workers."""
        return protobuf.ServerLiveResponse(live=self._models.problem is None)

    async def ServerReady(self, request: Any, rpc: Rpc) -> Any:
        """Whether all models take requests."""
        return protobuf.ServerReadyResponse(ready=self._models.ready)

    async def ModelReady(self, request: Any, rpc: Rpc) -> Any:
        """Whether a model takes requests; one that there is not does not, as in Triton."""
        try:
            ready = self._models.get(request.name, request.version).ready
        except ApiError:
            ready = False
        return protobuf.ModelReadyResponse(ready=ready)

    async def ServerMetadata(self, request: Any, rpc: Rpc) -> Any:
        """What this server is."""
        return protobuf.ServerMetadataResponse(**server_metadata(self._config))

    async def ModelMetadata(self, request: Any, rpc: Rpc) -> Any:
        """What a model takes and gives."""
        service = tensor_model(self._models.get(request.name, request.version))
        return protobuf.ModelMetadataResponse(**model_metadata(self._models, service))

    async def ModelConfig(self, request: Any, rpc: Rpc) -> Any:
        """How a model is served."""
        service = tensor_model(self._models.get(request.name, request.version))
        return protobuf.ModelConfigResponse(config=model_config(service))

    async def ModelStatistics(self, request: Any, rpc: Rpc) -> Any:
        """What a model, or all of them, did so far."""
        services = named_models(self._models, request.name, request.version)
        return protobuf.ModelStatisticsResponse(model_stats=model_statistics(services))

    async def ModelInfer(self, request: Any, rpc: Rpc) -> Any:
        """Run a model on tensors."""
        service = tensor_model(self._models.get(request.model_name, request.model_version))
        info, request_id = service.loaded(), request.id
        call = await self._call_of(request, info, rpc)
        # The tensors are copies, and one of them is enough.
        del request
        outputs, answers = await infer(service, call.tensors, call.terms)
        rpc.context.set_trailing_metadata(_timings(answers))
        write = partial(write_response, service, info, request_id, self._regions, outputs, call.outputs)
        return await off_loop(size_of(list(outputs.values()), INLINE_SIZE), write)

    async def _call_of(self, request: Any, info: ItemInfo, rpc: Rpc) -> Call:
        """A ModelInferRequest, off the event loop if it is large, or its tensors in shared memory are."""
        terms, size = self._terms(rpc.context), rpc.size
        shared = shared_size(request, terms, self._regions)
        if shared and not rpc.held.take(shared):
            raise buffers_full()
        return await off_loop(size + shared, partial(read_request, request, info, terms, self._regions))

    def stream(self, parse: FromBytes) -> Callable[[Any, RpcContext], Awaitable[None]]:
        """ModelStreamInfer, let in like the others, and if there are not too many of its kind."""

        async def call(_: Any, context: RpcContext) -> None:
            try:
                tenant, _, place = self._enter(context)
                # Which streams have to make room is not told by what has come of them.
                place.settle()
                if tenant is not None:
                    tenant.check_right(_RIGHTS["ModelStreamInfer"])
                async with self._streams.place(place.client) as stream:
                    await self._infer_stream(context, tenant, parse, stream)
            except ApiError as error:
                await _abort(context, error)

        return call

    async def _infer_stream(
        self, context: RpcContext, tenant: Tenant | None, parse: FromBytes, stream: RpcStream
    ) -> None:
        """Run a model on tensors, request by request as they arrive; a streaming model's parts are answers each."""
        answers, places = Answers(context, self._buffered, stream), asyncio.Semaphore(STREAM_WIDTH)

        def done() -> None:
            places.release()
            stream.finish()

        async def read() -> None:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    await places.acquire()
                    raw = await context.read()
                    if raw is grpc.aio.EOF:
                        break
                    stream.begin()
                    rpc = Rpc(context, HeldBody(self._buffered))
                    rpc.held.charge(stream.client)
                    tasks.create_task(self._answer(raw, rpc, tenant, parse, answers, done))
                    del raw
            await answers.end()

        reading = asyncio.create_task(read())
        try:
            await answers.send(self._config.write_timeout_s)
            await reading
        finally:
            reading.cancel()
            await asyncio.wait([reading])
            answers.drop()

    async def _answer(
        self,
        raw: bytes,
        rpc: Rpc,
        tenant: Tenant | None,
        parse: FromBytes,
        answers: Answers,
        done: Callable[[], None],
    ) -> None:
        """Run a model on one request of a stream, and put what it gives, or the error, among the stream's answers."""
        request_id = name = ""
        try:
            has_room = rpc.held.take(COPIES * len(raw))
            request = await off_loop(len(raw), partial(parse, raw))
            del raw
            request_id, name = request.id, request.model_name
            if not has_room:
                raise buffers_full()
            responses = self._stream(request, rpc)
            del request
            with admitted(tenant, _RIGHTS["ModelStreamInfer"], self._config.model_control):
                async with asyncio.timeout(self._config.request_timeout_s):
                    async for response in responses:
                        await answers.put(response)
        except Exception as error:
            failed = protobuf.ModelInferResponse(id=request_id, model_name=name)
            message = str(self._refusal(error))
            last = protobuf.ModelStreamInferResponse(error_message=message, infer_response=failed)
            await answers.put(last.SerializeToString(), force=True)
        finally:
            rpc.held.release()
            done()

    async def _stream(self, request: Any, rpc: Rpc) -> AsyncIterator[bytes]:
        """The messages that answer a request of a stream, each written off the event loop if it is large."""
        service = tensor_model(self._models.get(request.model_name, request.model_version))
        info, request_id = service.loaded(), request.id
        call = await self._call_of(request, info, rpc)
        write = partial(write_part, service, info, request_id, self._regions)
        wants_last = read_flag(parameters_of(request.parameters), EMPTY_FINAL, False)
        del request
        if not info.streams:
            outputs, _ = await infer(service, call.tensors, call.terms)
            size = size_of(list(outputs.values()), INLINE_SIZE)
            yield await off_loop(size, lambda: write(outputs, call.outputs, True))
            return
        payloads = await split(service, call.tensors)
        if len(payloads) != 1:
            raise InvalidRequest("a model that streams takes one item a request")

        def written(part: Any) -> bytes:
            return write(join(info, [part]), call.outputs, False)

        async for _, part in service.stream(payloads, call.terms):
            yield await off_loop(size_of(part, INLINE_SIZE), partial(written, part))
        if wants_last:
            yield write({}, {}, True)

    async def RepositoryIndex(self, request: Any, rpc: Rpc) -> Any:
        """All models that there are, loaded or not."""
        _check_repository(request)
        return protobuf.RepositoryIndexResponse(models=index(self._models, request.ready))

    async def RepositoryModelLoad(self, request: Any, rpc: Rpc) -> Any:
        """Load a model, or load it anew, with the settings that a configuration changes."""
        _check_repository(request)
        changes = read_changes(self._models, request.model_name, parameters_of(request.parameters))
        await self._models.load(request.model_name, changes)
        return protobuf.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(self, request: Any, rpc: Rpc) -> Any:
        """Take a model out of service."""
        _check_repository(request)
        given = parameters_of(request.parameters)
        refuse_others(given, "unload_dependents")
        read_flag(given, "unload_dependents", False)  # nothing depends on a model here, so both are the same
        await self._models.unload(request.model_name)
        return protobuf.RepositoryModelUnloadResponse()

    async def SystemSharedMemoryStatus(self, request: Any, rpc: Rpc) -> Any:
        """The regions of shared memory in use."""
        found = self._regions.status(owner_of(self._terms(rpc.context)), request.name)
        return protobuf.SystemSharedMemoryStatusResponse(regions={each["name"]: each for each in found})

    async def SystemSharedMemoryRegister(self, request: Any, rpc: Rpc) -> Any:
        """Take a region of shared memory into use."""
        owner = owner_of(self._terms(rpc.context))
        self._regions.register(owner, request.name, request.key, request.offset, request.byte_size)
        return protobuf.SystemSharedMemoryRegisterResponse()

    async def SystemSharedMemoryUnregister(self, request: Any, rpc: Rpc) -> Any:
        """Let go of a region of shared memory, or of all."""
        self._regions.unregister(owner_of(self._terms(rpc.context)), request.name)
        return protobuf.SystemSharedMemoryUnregisterResponse()


def _check_repository(request: Any) -> None:
    if request.repository_name:
        raise InvalidRequest("repository_name must be empty: there is one repository", "repository_name")


def _timings(answers: Any) -> tuple[tuple[str, str], ...]:
    return tuple((name.lower(), value) for name, value in timing_headers(answers).items())


async def _abort(context: RpcContext, error: ApiError) -> None:
    code = _CODES.get(error.status)
    if code is None:
        code = grpc.StatusCode.INVALID_ARGUMENT if error.status < 500 else grpc.StatusCode.INTERNAL
    trailing = tuple((name.lower(), value) for name, value in error.headers.items() if name != "Connection")
    await context.abort(code, str(error), trailing)

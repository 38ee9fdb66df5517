"""The table of routes: what the application serves, and errors, batches and the documentation read.

Another endpoint is a file with its handler and the struct of its body, and a row here.
"""

from collections.abc import Mapping
from functools import partial
from typing import get_args

from starlette.routing import compile_path

from chairlift.folders.kind import Task
from chairlift.runners.items import TEXT_TASKS
from chairlift.server import (
    forecast_routes,
    recording_routes,
    request_routes,
    settings_routes,
    status,
    traffic_routes,
)
from chairlift.server.anthropic import message_body, message_routes
from chairlift.server.batches import batch_routes as batches
from chairlift.server.batches import file_routes as files
from chairlift.server.http import docs
from chairlift.server.http.api_errors import Shape, anthropic_shape, oip_shape, openai_shape, rerank_shape, tei_shape
from chairlift.server.http.endpoint import Endpoint
from chairlift.server.items import embeddings, pooling, rerank, tei
from chairlift.server.live import live_page, live_routes
from chairlift.server.oip import http_routes as oip
from chairlift.server.oip import predict
from chairlift.server.openai import body_types, chat, completions, token_routes
from chairlift.server.responses import response_body
from chairlift.server.responses import response_routes as responses
from chairlift.server.twin import settings_change

_ITEM_TASKS: tuple[str, ...] = get_args(Task)
_generate = partial(
    Endpoint,
    tag="language models",
    answer="JSON, or with `stream` server-sent events",
    tasks=("generate",),
    batchable=True,
    right="infer",
)
_tokens = partial(_generate, "POST", answer="JSON", batchable=False)
_messages = partial(_generate, "POST", shape=anthropic_shape, batchable=False)
_kept = partial(Endpoint, tag="language models", right="infer")
_items = partial(Endpoint, tag="embeddings, ranks and predictions", right="infer")
_rank = partial(_items, "POST", handler=rerank.rerank, shape=rerank_shape, tasks=("rerank",))
_tei = partial(_items, shape=tei_shape)
_oip = partial(Endpoint, tag="Open Inference Protocol", shape=oip_shape)
_infer = partial(
    _oip,
    "POST",
    bodies=(oip.InferBody,),
    media=("application/json", "application/octet-stream"),
    answer="JSON, and the bytes of binary outputs after it",
    tasks=_ITEM_TASKS,
    hot=True,
    right="infer",
)
_control = partial(_oip, "POST", bodies=(oip.ChangeBody,), answer="nothing", right="admin")
_stored = partial(Endpoint, tag="files and batches", right="batch")
_server = partial(Endpoint, tag="server")
_look = partial(_server, "GET", counted=False)

# A model's name may have slashes, so what is longer comes first.
_MODEL = "/v2/models/{name:path}"
_VERSION = f"{_MODEL}/versions/{{version}}"
_REPOSITORY = "/v2/repository/models/{name:path}"
_RESPONSE = "/v1/responses/{response}"
_SHARED = "/v2/systemsharedmemory/region/{name}"
_PARTS = "JSON, or parts as text/event-stream or application/x-ndjson"

ENDPOINTS: tuple[Endpoint, ...] = (
    _generate("POST", "/v1/chat/completions", chat.chat_completions, "Answer a conversation", (body_types.ChatBody,)),
    _generate("POST", "/v1/completions", completions.completions, "Continue prompts", (body_types.CompletionBody,)),
    _generate(
        "POST", "/v1/responses", responses.create_response, "Answer a conversation", (response_body.ResponseBody,)
    ),
    _tokens(
        "/v1/responses/input_tokens",
        responses.count_input_tokens,
        "The tokens of a response's input",
        (response_body.InputBody,),
    ),
    _kept("GET", _RESPONSE, responses.show_response, "A response that is kept", query=responses.SHOW_QUERY),
    _kept("DELETE", _RESPONSE, responses.delete_response, "Delete a response"),
    _kept("POST", f"{_RESPONSE}/cancel", responses.cancel_response, "Cancel a response in the background"),
    _kept(
        "GET",
        f"{_RESPONSE}/input_items",
        responses.list_input_items,
        "What came with a response",
        query=responses.ITEMS_QUERY,
    ),
    _messages(
        "/v1/messages",
        message_routes.create_message,
        "Answer a conversation, as Anthropic has it",
        (message_body.MessageBody,),
    ),
    _messages(
        "/v1/messages/count_tokens",
        message_routes.count_tokens,
        "The tokens of a conversation, as Anthropic has it",
        (message_body.CountBody,),
        answer="JSON",
    ),
    _tokens(
        "/tokenize",
        tei.tokenize,
        "The tokens of a prompt or a chat, or of texts as TEI has it",
        (token_routes.TokenizeBody, tei.TeiTokenizeBody),
        tasks=("generate", *TEXT_TASKS),
    ),
    _tokens("/detokenize", token_routes.detokenize, "The text of tokens", (token_routes.DetokenizeBody,)),
    _items(
        "POST",
        "/v1/embeddings",
        embeddings.embeddings,
        "Embed texts",
        (embeddings.EmbeddingBody,),
        tasks=("embed",),
        batchable=True,
    ),
    _rank("/v1/rerank", about="Documents by relevance", bodies=(rerank.RerankBody,), batchable=True),
    _rank("/v2/rerank", about="Documents by relevance, for Cohere's clients", bodies=(rerank.RerankBody,)),
    _rank(
        "/rerank",
        about="Documents by relevance, or texts as TEI has it",
        bodies=(rerank.RerankBody, tei.RanksBody),
        batchable=True,
    ),
    *(
        _items(
            "POST",
            path,
            pooling.score,
            "How well texts go together, as vLLM has it",
            (pooling.ScoreBody,),
            tasks=("rerank", "embed"),
            batchable=True,
        )
        for path in ("/v1/score", "/score")
    ),
    _items(
        "POST",
        "/classify",
        pooling.classify,
        "Labels of texts, as vLLM has it",
        (pooling.ClassifyBody,),
        tasks=("classify", "rerank"),
    ),
    _items(
        "POST",
        "/pooling",
        pooling.pooling,
        "What a model gives for texts or their tokens, as vLLM has it",
        (pooling.PoolingBody,),
        tasks=TEXT_TASKS,
    ),
    _tei("POST", "/embed", tei.embed, "Embed texts, as TEI has it", (tei.EmbedBody,), tasks=("embed",)),
    _tei("POST", "/embed_all", tei.embed_all, "Embed tokens, as TEI has it", (tei.EmbedAllBody,), tasks=("embed",)),
    _tei(
        "POST",
        "/embed_sparse",
        tei.embed_sparse,
        "Weigh the words of texts, as TEI has it",
        (tei.EmbedAllBody,),
        tasks=("embed",),
    ),
    _tei(
        "POST", "/similarity", tei.similarity, "Compare texts, as TEI has it", (tei.SimilarityBody,), tasks=("embed",)
    ),
    _tei("POST", "/decode", tei.decode_ids, "Texts of tokens, as TEI has it", (tei.DecodeBody,), tasks=TEXT_TASKS),
    _tei(
        "POST",
        "/predict",
        tei.predict,
        "Classify texts or pairs of them, as TEI has it",
        (tei.TeiPredictBody,),
        tasks=("classify", "rerank"),
    ),
    _tei(
        "POST",
        "/",
        tei.default,
        "What the model does, as TEI has it",
        (tei.EmbedBody, tei.TeiPredictBody, tei.RanksBody),
        tasks=TEXT_TASKS,
    ),
    _tei(
        "GET",
        "/info",
        tei.info,
        "A model and its limits, as TEI has it",
        tasks=TEXT_TASKS,
        query={"model": str},
        right=None,
    ),
    _items(
        "POST",
        predict.PATH,
        predict.predict,
        "A prediction for each instance, as KServe v1 has it",
        (predict.InstancesBody,),
        answer=_PARTS,
        shape=oip_shape,
        tasks=_ITEM_TASKS,
        batchable=True,
        hot=True,
    ),
    _infer(f"{_VERSION}/infer", oip.infer_route, "Run a version of a model on tensors"),
    _infer(f"{_MODEL}/infer", oip.infer_route, "Run a model on tensors"),
    _oip("GET", "/v2", oip.server_route, "What this server is, and what it can do"),
    _oip("GET", "/v2/health/live", oip.live_route, "200 while the process minds its workers"),
    _oip("GET", "/v2/health/ready", oip.ready_route, "200 while all models take requests"),
    _oip("GET", f"{_VERSION}/ready", oip.model_ready_route, "200 while it takes requests"),
    _oip("GET", f"{_MODEL}/ready", oip.model_ready_route, "200 while it takes requests"),
    _oip("GET", f"{_VERSION}/config", oip.config_route, "How a version of a model is served"),
    _oip("GET", f"{_MODEL}/config", oip.config_route, "How a model is served"),
    _oip("GET", "/v2/models/stats", oip.statistics_route, "What all models did so far"),
    _oip("GET", f"{_VERSION}/stats", oip.statistics_route, "What a version of a model did so far"),
    _oip("GET", f"{_MODEL}/stats", oip.statistics_route, "What a model did so far"),
    _oip("GET", _VERSION, oip.model_route, "The tensors of a version of a model"),
    _oip("GET", _MODEL, oip.model_route, "The tensors of a model"),
    _oip("POST", "/v2/repository/index", oip.index_route, "All models, loaded or not", (oip.IndexBody,)),
    _oip("GET", "/v2/systemsharedmemory/status", oip.shared_route, "Shared memory in use", right="infer"),
    _oip("GET", f"{_SHARED}/status", oip.shared_route, "A region of shared memory in use", right="infer"),
    _oip(
        "POST",
        f"{_SHARED}/register",
        oip.share_route,
        "Use shared memory",
        (oip.ShareBody,),
        answer="nothing",
        right="infer",
    ),
    _oip(
        "POST", f"{_SHARED}/unregister", oip.unshare_route, "Let go of shared memory", answer="nothing", right="infer"
    ),
    _oip(
        "POST",
        "/v2/systemsharedmemory/unregister",
        oip.unshare_route,
        "Let go of all of it",
        answer="nothing",
        right="infer",
    ),
    _control(f"{_REPOSITORY}/load", oip.load_route, "Load a model"),
    _control(f"{_REPOSITORY}/unload", oip.unload_route, "Unload a model"),
    _stored("POST", "/v1/files", files.create_file, "Keep a file", (files.FileForm,), media=("multipart/form-data",)),
    _stored("GET", "/v1/files", files.list_files, "List files", query=files.LIST_QUERY),
    _stored("GET", "/v1/files/{file}", files.show_file, "A file"),
    _stored("DELETE", "/v1/files/{file}", files.delete_file, "Delete a file"),
    _stored("GET", "/v1/files/{file}/content", files.file_content, "A file's bytes", answer="the bytes"),
    _stored("POST", "/v1/batches", batches.create_batch, "Begin a batch", (batches.BatchBody,)),
    _stored("GET", "/v1/batches", batches.list_batches, "List batches, newest first", query=batches.LIST_QUERY),
    _stored("GET", "/v1/batches/{batch}", batches.show_batch, "A batch and how far it is"),
    _stored("POST", "/v1/batches/{batch}/cancel", batches.cancel_batch, "Cancel a batch"),
    _look(
        "/v1/requests",
        request_routes.list_requests,
        "Requests under way or ended, and why they wait",
        query=request_routes.LIST_QUERY,
    ),
    _look(
        "/v1/requests/{request}",
        request_routes.show_request,
        "Why a request waits, what became of it, or with `what_if` would have",
        query=request_routes.SHOW_QUERY,
    ),
    _server(
        "GET",
        "/v1/timeline",
        request_routes.show_timeline,
        "Steps and requests of the last minute, for ui.perfetto.dev",
        answer="JSON in Chrome's Trace Event Format",
        right="admin",
        local=True,
    ),
    _server(
        "GET",
        "/v1/recording",
        recording_routes.stream_recording,
        "A trace of what comes from now on; without keys for loopback only",
        answer="lines of JSON",
        right="admin",
        local=True,
        query=recording_routes.RECORDING_QUERY,
    ),
    _server(
        "GET",
        "/v1/traffic",
        traffic_routes.show_traffic,
        "A model's last minutes: requests and steps, no text; without keys for loopback only",
        right="admin",
        local=True,
        query=traffic_routes.TRAFFIC_QUERY,
    ),
    _look("/v1/models", status.list_models, "List models"),
    _look("/v1/models/{model:path}", status.show_model, "A model"),
    _server(
        "POST",
        "/v1/models/{model:path}/forecast",
        forecast_routes.show_forecast,
        "The last minutes with other settings; without keys for loopback only",
        (settings_change.SettingsBody,),
        right="admin",
        local=True,
    ),
    _server(
        "POST",
        "/v1/models/{model:path}/settings",
        settings_routes.change_settings,
        "Other settings for a model that runs; without keys for loopback only",
        (settings_change.SettingsBody,),
        right="admin",
        local=True,
    ),
    _server("GET", "/health", status.ready, "200 while all models take requests"),
    _server("GET", "/", status.root, "200 while all models take requests; a browser gets the live page"),
    _server("GET", "/ping", status.ready, "200 while all models take requests"),
    _server("GET", "/version", status.version, "The release of this server"),
    _server("GET", "/health/live", status.live, "200 while the process answers and minds its workers"),
    _server("GET", "/health/ready", status.ready, "200 while all models take requests"),
    _server("GET", "/metrics", status.metrics, "Metrics for Prometheus", answer="text", right="metrics"),
    _look(
        "/v1/live",
        live_routes.watch_server,
        "Models, slots, tenants, batches as they change; without keys for loopback only",
        answer="server-sent events",
        right="admin",
        local=True,
        query=live_routes.LIVE_QUERY,
    ),
    _server("GET", "/live/{file}", live_page.show_page_file, "A file of the live page", answer="the file"),
    _server("GET", "/openapi.json", docs.show_openapi, "This description"),
    _server("GET", "/docs", docs.show_page, "This description, as a page", answer="HTML"),
)

_EXACT = {row.path: row.shape for row in ENDPOINTS}
_PATTERNS = [(compile_path(row.path)[0], row.shape) for row in ENDPOINTS if "{" in row.path]


def shape_of(path: str) -> Shape:
    """The shape that clients of a path expect, whether it is one of the table's or not."""
    if path in _EXACT:
        return _EXACT[path]
    beside = next((shape for start, shape in _BESIDE.items() if path.startswith(start)), openai_shape)
    return next((shape for pattern, shape in _PATTERNS if pattern.match(path)), beside)


def hint_for(path: str) -> str:
    """What to add to the refusal of a path that would be right with another base URL."""
    if _is_route(f"{_BASE}{path}"):
        return f"; did you mean {_BASE}{path}? A client's base URL ends in {_BASE}"
    if path.startswith(f"{_BASE}{_BASE}/") and _is_route(meant := path.removeprefix(_BASE)):
        return f"; did you mean {meant}? Leave one {_BASE} out of the client's base URL"
    if path == _UPLOADS or path.startswith(f"{_UPLOADS}/"):
        return f"; a file comes in one piece: POST it to {_BASE}/files"
    return ""


def _is_route(path: str) -> bool:
    return path in _EXACT or any(pattern.match(path) for pattern, _ in _PATTERNS)


_BASE = "/v1"
_UPLOADS = f"{_BASE}/uploads"
# Of paths that begin so, and are no routes.
_BESIDE: Mapping[str, Shape] = {"/v2/": oip_shape, "/v1/messages/": anthropic_shape}

"""A collector of spans as OpenTelemetry's exporters speak to it: OTLP over HTTP, as protobuf."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import pytest

pytest.importorskip("opentelemetry.proto")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector:
    """Takes what is posted, for as long as the `with` statement runs; answers with `status`, once `open` is set."""

    def __init__(self) -> None:
        self.status = 200
        self.open = threading.Event()
        self.open.set()
        self.raw: list[bytes] = []
        self.paths: list[str] = []
        self.resource: dict[str, Any] = {}
        self._spans: list[Span] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.open.wait()
                if collector.status == 200:
                    collector.take(self.path, body)
                self.send_response(collector.status)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.open.set()
        self._server.shutdown()
        self._server.server_close()

    def take(self, path: str, body: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(body)
        self.paths.append(path)
        self.raw.append(body)
        for each in request.resource_spans:
            self.resource |= {pair.key: plain(pair.value) for pair in each.resource.attributes}
            for scope in each.scope_spans:
                self._spans += scope.spans

    @property
    def spans(self) -> list[Span]:
        """All that came, the first that began first."""
        return sorted(self._spans, key=lambda span: span.start_time_unix_nano)


def attributes(span: Span) -> dict[str, Any]:
    return {pair.key: plain(pair.value) for pair in span.attributes}


def plain(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [plain(each) for each in value.array_value.values]
    return getattr(value, str(kind))

"""Hostile requests for every route, the same for a seed, and a client that sends bytes as they are."""

import asyncio
import copy
import json
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

HANG_SECONDS = 60.0
_CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello world"}], "max_tokens": 2}
_TENSOR = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 0, 0, 0]}
_BYTES = {"name": "input", "shape": [2], "datatype": "BYTES", "data": ["a", "b"]}
_ITEMS: Any = [
    {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
    {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "so"}]},
    {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "1", "output": "2"},
]
_TURNS: Any = [
    {"role": "user", "content": [{"type": "text", "text": "hello"}]},
    {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "add", "input": {"a": 1}}]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "2"}]},
]
_SCHEMA: Any = {
    "type": "object",
    "properties": {"a": {"type": "string", "pattern": "^x[0-9]{1,3}$"}, "b": {"enum": [1, "2", None]}},
    "required": ["a"],
    "additionalProperties": False,
}
_FORM: Any = {"type": "json_schema", "json_schema": {"name": "it", "schema": _SCHEMA, "strict": True}}
_FLAT_FORM: Any = {"type": "json_schema", **_FORM["json_schema"]}
_FUNCTION: Any = {"name": "add", "description": "sums", "parameters": _SCHEMA}
_TOOLS: Any = {"tools": [{"type": "function", "function": _FUNCTION}], "parallel_tool_calls": False}
_NAMED: Any = {"type": "function", "function": {"name": "add"}}
_BLOCK_TOOLS: Any = {"tools": [{"name": "add", "input_schema": _SCHEMA}], "tool_choice": {"type": "any"}}
_FLAT_TOOLS: Any = {"tools": [{"type": "function", **_FUNCTION, "strict": True}], "tool_choice": "required"}
# What brings a form of the answer, tools, or items in turns: the routes that came last, and what they share.
NEW_BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", {"model": "chat", **_CHAT, "response_format": _FORM, "temperature": 0}),
    ("/v1/chat/completions", {"model": "chat", **_CHAT, **_TOOLS, "tool_choice": "required", "stream": True}),
    ("/v1/chat/completions", {"model": "chat", **_CHAT, **_TOOLS, "tool_choice": _NAMED, "reasoning_effort": "low"}),
    ("/v1/completions", {"model": "chat", "prompt": "a", "structured_outputs": {"regex": "(ab|c){2}"}}),
    ("/v1/completions", {"model": "chat", "prompt": "a", "structured_outputs": {"grammar": "root ::= [a-c]+"}}),
    ("/v1/completions", {"model": "chat", "prompt": "a", "guided_choice": ["a", "b"], "bad_words": ["c"]}),
    ("/v1/responses", {"model": "chat", "input": _ITEMS, **_FLAT_TOOLS, "max_output_tokens": 2}),
    (
        "/v1/responses",
        {"model": "chat", "input": "a", "text": {"format": {**_FORM["json_schema"], "type": "json_schema"}}},
    ),
    ("/v1/responses", {"model": "chat", "input": "a", "previous_response_id": "resp_1", "truncation": "auto"}),
    ("/v1/messages", {"model": "chat", "messages": _TURNS, "max_tokens": 2, **_BLOCK_TOOLS}),
    ("/v1/score", {"model": "bert", "text_1": "a", "text_2": ["b", "c"]}),
    ("/classify", {"model": "bert", "input": ["a", "b"]}),
    ("/pooling", {"model": "bert", "input": ["a", [1, 2]], "encoding_format": "float"}),
    ("/embed_all", {"inputs": ["a"], "truncate": True}),
    ("/embed_sparse", {"inputs": ["a"]}),
    ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b", "c"]}}),
    ("/decode", {"ids": [[5, 6]], "skip_special_tokens": True}),
)
BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    *NEW_BODIES,
    ("/v1/chat/completions", {"model": "chat", **_CHAT}),
    ("/v1/chat/completions", {"model": "chat", **_CHAT, "stream": True, "stop": ["x", "yz"], "logprobs": True}),
    ("/v1/chat/completions", {"model": "chat", **_CHAT, "chat_template_kwargs": {"a": [1]}, "n": 2, "seed": 1}),
    ("/v1/completions", {"model": "chat", "prompt": "hello", "max_tokens": 2, "logprobs": 1, "echo": True}),
    ("/v1/completions", {"model": "chat", "prompt": [[1, 2], [3]], "max_tokens": 1, "n": 2, "temperature": 0.5}),
    ("/v1/completions", {"model": "chat", "prompt": ["a", "b"], "logit_bias": {"5": 1.5}, "stop_token_ids": [7]}),
    ("/v1/responses", {"model": "chat", "input": "hello", "instructions": "be brief", "max_output_tokens": 2}),
    ("/v1/responses", {"model": "chat", "input": _ITEMS, "stream": True, "max_output_tokens": 2, "store": False}),
    ("/v1/responses", {"model": "chat", "input": "hello", "background": True, "max_output_tokens": 1}),
    ("/v1/messages", {"model": "chat", **_CHAT, "system": "be brief", "stop_sequences": ["x"], "stream": True}),
    ("/v1/messages", {"model": "chat", "messages": _TURNS, "max_tokens": 2, "temperature": 0.5}),
    ("/v1/messages/count_tokens", {"model": "chat", "messages": _TURNS}),
    ("/tokenize", {"model": "chat", "prompt": "hello world", "return_token_strs": True}),
    ("/tokenize", {"model": "chat", "messages": _CHAT["messages"], "add_generation_prompt": False}),
    ("/detokenize", {"model": "chat", "tokens": [1, 2, 3]}),
    ("/v1/embeddings", {"model": "bert", "input": ["hello", "world"], "encoding_format": "base64"}),
    ("/v1/embeddings", {"model": "bert", "input": [[5, 6], [7]], "dimensions": 4}),
    ("/embed", {"inputs": ["hello"], "truncate": True, "normalize": False}),
    ("/predict", {"inputs": [["a", "b"]]}),
    ("/rerank", {"query": "a", "texts": ["b", "c"], "return_text": True}),
    ("/v1/rerank", {"model": "bert", "query": "a", "documents": ["b", {"text": "c"}], "top_n": 1}),
    ("/v2/rerank", {"model": "bert", "query": "a", "documents": ["b"]}),
    ("/v1/models/doubles:predict", {"instances": [1, [2, 3], {"a": 4}]}),
    ("/v1/models/counts:predict", {"instances": [2]}),
    ("/v1/models/chat/forecast", {"strategy": "continuous", "max_num_seqs": 4, "target_itl_ms": 50.5}),
    ("/v1/models/bert/forecast", {"max_batch_size": 4, "max_wait_ms": 1, "target_latency_ms": None}),
    ("/v2/models/linear/infer", {"id": "1", "inputs": [_TENSOR], "outputs": [{"name": "y"}]}),
    ("/v2/models/doubles/infer", {"inputs": [_BYTES], "parameters": {"timeout": 1000000, "priority": 1}}),
    ("/v2/models/doubles/versions/3/infer", {"inputs": [_BYTES]}),
    ("/v2/repository/index", {"ready": True}),
    ("/v2/repository/models/nobody/load", {"parameters": {}}),
    ("/v1/batches", {"input_file_id": "file-1", "endpoint": "/v1/completions", "completion_window": "24h"}),
)
READS = (
    *(
        "/v1/models",
        "/v1/models/chat",
        "/health",
        "/health/live",
        "/health/ready",
        "/metrics",
        "/openapi.json",
        "/docs",
    ),
    *(
        "/v2",
        "/v2/health/live",
        "/v2/models/linear",
        "/v2/models/linear/ready",
        "/v2/models/doubles/versions/3",
        "/info",
    ),
    *(
        "/v1/files?limit=2",
        "/v1/files/file-1",
        "/v1/files/file-1/content",
        "/v1/batches?after=x",
        "/v1/batches/batch-1",
        "/v1/responses/resp_1",
        "/v1/responses/resp_1/input_items?limit=2",
        "/v1/requests?status=ended&limit=2",
        "/v1/requests/chatcmpl-1",
        "/v1/requests/chatcmpl-1?what_if=true",
    ),
)
_KINDS = ("valid", "tree", "tree", "tree", "tree", "bytes", "headers", "raw", "path", "upload", "read")
_HEADERS = (
    *("Content-Length: 5", "Content-Length: -1", "Content-Length: 99999999999999999999", "Transfer-Encoding: chunked"),
    *(
        "Content-Encoding: gzip",
        "Content-Encoding: zz",
        "Content-Type: text/plain",
        "Content-Type: application/json; x",
    ),
    *("Host: evil.example", "Origin: https://evil.example", "Sec-Fetch-Site: cross-site", "Expect: 100-continue"),
    *(
        "X-Request-Timeout-Ms: 1",
        "X-Request-Timeout-Ms: nan",
        "Inference-Header-Content-Length: 10",
        "X-Priority: 1e99",
    ),
    *("Inference-Header-Content-Length: -3", "Upgrade: websocket", "Connection: Upgrade", "Accept: text/event-stream"),
    *("Authorization: Bearer \xff", "X-Request-Id: " + "r" * 4000, "Range: bytes=0-", "Cookie: " + "c" * 8000),
)


class Fuzzer:
    """Makes requests out of valid ones, those of `bodies`. None is larger than about ten kilobytes."""

    def __init__(self, seed: int, bodies: Sequence[tuple[str, dict[str, Any]]] = BODIES) -> None:
        self.rng = random.Random(seed)
        self._bodies = bodies

    def request(self) -> tuple[str, bytes]:
        """The kind of a request, and its bytes."""
        kind = self.rng.choice(_KINDS)
        return kind, getattr(self, f"_{kind}")()

    def nasty(self, depth: int = 0) -> Any:
        """Any JSON value that a careless server stumbles over."""
        rng = self.rng
        if depth < 3 and rng.random() < 0.15:
            return [self.nasty(depth + 1) for _ in range(rng.randrange(4))]
        if depth < 3 and rng.random() < 0.1:
            return {self._text(20): self.nasty(depth + 1) for _ in range(rng.randrange(3))}
        return rng.choice((self._number, self._scalar, lambda: self._text(rng.choice((3, 60, 9000))), self._deep))()

    def _number(self) -> Any:
        rng = self.rng
        edges = (0, -1, 2**31, 2**53 + 1, 2**63, -(2**63) - 1, 2**64, 10**40, 1e308, -0.0, 1e-320, 0.5, float("nan"))
        return rng.choice((*edges, float("inf"), rng.randrange(-5, 70), rng.uniform(-3, 3)))

    def _scalar(self) -> Any:
        return self.rng.choice((None, True, False, [], {}, "", "0", "null", [[]], [None], {"": None}))

    def _deep(self) -> Any:
        opening, closing = self.rng.choice((("[", "]"), ('{"a":', "}")))
        depth = self.rng.choice((20, 150, 600))
        return json.loads(opening * depth + "1" + closing * depth)

    def _text(self, most: int) -> str:
        rng = self.rng
        pieces = (
            "a",
            "\x00",
            "\u202e",
            "\U0001f600",
            "é",
            "\ud800",
            "<|im_end|>",
            "<s>",
            "[SEP]",
            "\n",
            '"',
            "\\",
            "{{",
            "../",
        )
        size = rng.randrange(most)
        return (rng.choice(pieces) * size)[:size] if rng.random() < 0.5 else "".join(rng.choices(pieces, k=size // 3))

    def mutate(self, value: Any) -> Any:
        """Change one place of a JSON value, in place where it can."""
        rng = self.rng
        if isinstance(value, dict) and value and rng.random() < 0.85:
            name = rng.choice(list(value))
            match rng.randrange(6):
                case 0:
                    del value[name]
                case 1:
                    value[self._text(30)] = self.nasty()
                case 2:
                    value[name] = self.nasty()
                case _:
                    value[name] = self.mutate(value[name])
            return value
        if isinstance(value, list) and value and rng.random() < 0.85:
            place = rng.randrange(len(value))
            match rng.randrange(4):
                case 0:
                    value *= rng.choice((0, 2, 300))
                case 1:
                    value[place] = self.nasty()
                case _:
                    value[place] = self.mutate(value[place])
            return value
        return self.nasty()

    def body(self) -> tuple[str, Any]:
        """A path and what may be sent to it."""
        path, body = self.rng.choice(self._bodies)
        return path, copy.deepcopy(body)

    def _valid(self) -> bytes:
        path, body = self.body()
        return self._post(path, json.dumps(body).encode())

    def _tree(self) -> bytes:
        path, body = self.body()
        for _ in range(self.rng.randint(1, 4)):
            body = self.mutate(body)
        return self._post(path, json.dumps(body).encode("utf-8", "surrogatepass"))

    def _bytes(self) -> bytes:
        path, body = self.body()
        raw = bytearray(json.dumps(body).encode())
        for _ in range(self.rng.randint(1, 6)):
            place = self.rng.randrange(len(raw) + 1)
            match self.rng.randrange(3):
                case 0:
                    raw[place : place + 1] = self.rng.randbytes(1)
                case 1:
                    del raw[place : place + self.rng.randrange(20)]
                case _:
                    raw[place:place] = raw[: self.rng.randrange(50)]
        return self._post(path, bytes(raw))

    def _headers(self) -> bytes:
        path, body = self.body()
        return self._post(path, json.dumps(body).encode(), self.rng.sample(_HEADERS, self.rng.randint(1, 3)))

    def _raw(self) -> bytes:
        valid = bytearray(self._valid())
        head = valid.index(b"\r\n\r\n") + 4
        for _ in range(self.rng.randint(1, 8)):
            valid[self.rng.randrange(head)] = self.rng.randrange(256)
        return bytes(valid) if self.rng.random() < 0.8 else self.rng.randbytes(self.rng.randrange(1, 3000))

    def _path(self) -> bytes:
        path, body = self.body()
        raw = json.dumps(body).encode()
        odd = (
            "%00",
            "%ff",
            "//",
            "/../",
            "?model=",
            "%2e%2e%2f",
            "é",
            "a" * 3000,
            ":predict",
            "/versions/9999999999999999999",
        )
        place = self.rng.randrange(len(path))
        path = path[:place] + self.rng.choice(odd) + path[self.rng.choice((place, len(path))) :]
        method = self.rng.choice(
            ("POST", "GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "BREW", "CONNECT")
        )
        return self._post(path, raw, method=method)

    def _upload(self) -> bytes:
        line = {
            "custom_id": "1",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": "chat", "prompt": "hello", "max_tokens": 2},
        }
        lines = [json.dumps(self.mutate(copy.deepcopy(line))) for _ in range(self.rng.randrange(4))]
        purpose = self.rng.choice(("batch", "batch", "fine-tune", self._text(50)))
        name = self.rng.choice(("a.jsonl", "../../x", self._text(200), ""))
        mark = self.rng.choice(("mark", "m" * 70, "é"))
        parts = f'--{mark}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n{purpose}\r\n--{mark}\r\n'
        parts += f'Content-Disposition: form-data; name="file"; filename="{name}"\r\n\r\n' + "\n".join(lines)
        raw = f"{parts}\r\n--{mark}--\r\n".encode("utf-8", "surrogatepass")
        raw = raw[: self.rng.randrange(len(raw))] if self.rng.random() < 0.3 else raw
        return self._post("/v1/files", raw, [f"Content-Type: multipart/form-data; boundary={mark}"])

    def _read(self) -> bytes:
        path = self.rng.choice(READS)
        if self.rng.random() < 0.5:
            separator = "&" if "?" in path else "?"
            name = self.rng.choice(("limit", "after", "order", "model", "x"))
            path += f"{separator}{name}={self.rng.choice(('-1', '1e9', '%00', 'a' * 2000))}"
        method = self.rng.choice(("GET", "GET", "HEAD", "DELETE" if path.startswith("/v1/files") else "GET"))
        return self._post(path, b"", method=method)

    def _post(self, path: str, body: bytes, headers: list[str] | None = None, method: str = "POST") -> bytes:
        lines = [f"{method} {path} HTTP/1.1", "Connection: close"]
        given = {line.partition(":")[0].lower() for line in headers or ()}
        usual = {"Host": "127.0.0.1", "Content-Type": "application/json", "Content-Length": str(len(body))}
        lines += [f"{name}: {value}" for name, value in usual.items() if name.lower() not in given]
        return "\r\n".join([*lines, *(headers or ()), "", ""]).encode("utf-8", "surrogatepass") + body


@dataclass
class Report:
    """What came back: counts by kind and status ("closed" where there was none), and each that should not have been."""

    answers: Counter[tuple[str, str]] = field(default_factory=Counter)
    bad: list[tuple[bytes, bytes]] = field(default_factory=list)
    hung: list[bytes] = field(default_factory=list)

    def note(self, kind: str, request: bytes, answer: bytes | None) -> None:
        """Count an answer; None is one that did not come."""
        if answer is None:
            self.hung.append(request)
            return
        status = answer[9:12].decode("latin-1") if answer.startswith(b"HTTP/1.") else "closed"
        self.answers[kind, status] += 1
        if status.startswith("5") and status not in ("503", "504", "507"):
            self.bad.append((request, answer))


async def send(port: int, request: bytes) -> bytes | None:
    """Send bytes, and return all that comes back until the server closes; None if it does not."""
    try:
        async with asyncio.timeout(HANG_SECONDS):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(request)
                await writer.drain()
                return await reader.read(-1)
            finally:
                writer.close()
    except ConnectionError:
        return b""
    except TimeoutError:
        return None


async def storm(port: int, fuzzer: Fuzzer, count: int, report: Report, concurrency: int = 16) -> None:
    """Send so many requests, so many at a time."""

    async def client(share: int) -> None:
        for _ in range(share):
            kind, request = fuzzer.request()
            report.note(kind, request, await send(port, request))

    shares = [count // concurrency + (number < count % concurrency) for number in range(concurrency)]
    await asyncio.gather(*map(client, shares))


def grpc_requests(fuzzer: Fuzzer, message: Any) -> bytes:
    """A ModelInferRequest, as a client of gRPC would send it, or broken. `message` is its class."""
    rng = fuzzer.rng
    request = message(
        model_name=rng.choice(("linear", "doubles", "bert", "counts", "chat", fuzzer._text(50).replace("\ud800", "")))
    )
    tensor = request.inputs.add(
        name=rng.choice(("x", "input", "")), datatype=rng.choice(("FP32", "BYTES", "INT64", "BOOL", "FP16", "z"))
    )
    tensor.shape.extend(rng.choice(([1, 4], [2], [], [-1], [2**62, 2**62], [0], [1] * 300)))
    match rng.randrange(4):
        case 0:
            tensor.contents.fp32_contents.extend(rng.uniform(-1, 1) for _ in range(rng.choice((4, 0, 3))))
        case 1:
            tensor.contents.bytes_contents.extend(
                rng.randbytes(rng.randrange(9)) for _ in range(rng.choice((2, 0, 40)))
            )
        case 2:
            request.raw_input_contents.append(rng.randbytes(rng.choice((16, 0, 3, 4000))))
        case _:
            tensor.contents.int64_contents.extend([2**40] * 4)
    if rng.random() < 0.3:
        request.parameters[rng.choice(("timeout", "priority", "x"))].int64_param = rng.choice((1, -1, 2**62))
    raw = bytearray(request.SerializeToString())
    if rng.random() < 0.4:
        for _ in range(rng.randint(1, 5)):
            if raw:
                raw[rng.randrange(len(raw))] = rng.randrange(256)
    return bytes(raw)

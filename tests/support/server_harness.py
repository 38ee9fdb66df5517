"""A front without a model: a scripted engine client, and a caller that speaks ASGI, so tests see every write."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Iterable
from typing import Any

from support.text_tokenizers import build

from chairlift.config.sequences import SequenceConfig
from chairlift.config.server import ServerConfig
from chairlift.core.finished import FinishReason
from chairlift.core.sequences.overload import Foreseen, LoadShedder
from chairlift.core.sequences.request import Request
from chairlift.core.sequences.standing import Standing
from chairlift.core.sequences.step import TokenLogprob
from chairlift.engine.sequences.client import Stream
from chairlift.engine.sequences.messages import EngineStats, SequenceUpdate
from chairlift.errors import QueueFull, Unavailable
from chairlift.runners.sequences import SequenceInfo
from chairlift.server.app import create_app, make_feed
from chairlift.server.batches.service import Batches
from chairlift.server.http.tenants import Keys
from chairlift.server.models.registry import Models
from chairlift.server.models.sequence_service import SequenceService
from chairlift.server.responses.response_store import ResponseStore
from chairlift.text.chat_template import ChatTemplate
from chairlift.text.model_dialect import model_dialect_of
from chairlift.text.tokenizer import Tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}a: {% endif %}"
)
INFO = SequenceInfo(
    vocab_size=330,
    max_model_len=200,
    num_blocks=1000,
    block_size=16,
    dtype="float32",
    device="cpu",
    ops="reference",
    weight_bytes=0,
    kv_bytes=0,
)


def tokenizer() -> Tokenizer:
    backend = build("bytelevel")
    end = backend.token_to_id("<|end|>")
    return Tokenizer(backend, eos_ids=(end,), chat_template=ChatTemplate({"default": TEMPLATE}, {}))


class FakeClient:
    """Answers every request with the tokens of `reply`, one a step; or, with `manual`, with what the test pushes."""

    def __init__(self, reply: Iterable[int] = (), manual: bool = False) -> None:
        self.config = self.configured = SequenceConfig(model="tiny")
        self.info: SequenceInfo | None = INFO
        self.state = "ready"
        self.failure: str | None = None
        self.stats = EngineStats()
        self.shedder = LoadShedder()
        self.standings: dict[str, Standing] = {}
        self.foreseen: dict[str, Foreseen] = {}
        self.restarts = 0
        self.on_step: Callable[[EngineStats], None] | None = None
        self.refusal: Exception | None = None
        self.requests: list[Request] = []
        self.submitted: list[tuple[Any, float | None]] = []
        self.streams: list[Stream] = []
        self.cancelled: list[str] = []
        self._reply = list(reply)
        self._manual = manual
        self._tasks: list[asyncio.Task[None]] = []
        self.most_at_once = 0

    @property
    def ready(self) -> bool:
        return self.state == "ready"

    def check_load(self, priority: int) -> None:
        pass

    async def explain(self, request_ids: Collection[str]) -> dict[str, Standing]:
        return {each: self.standings[each] for each in request_ids if each in self.standings}

    def foresee(self, request_ids: Collection[str]) -> dict[str, Foreseen]:
        return {each: self.foreseen[each] for each in request_ids if each in self.foreseen}

    def retune(self, config: SequenceConfig) -> None:
        self.config = config

    def submit(self, *requests: Request, group: Any = None, timeout: float | None = None) -> list[Stream]:
        self.submitted.append((group, timeout))
        if self.refusal is not None:
            raise self.refusal
        if not self.ready:
            raise Unavailable(f"the model is {self.state}")
        self.requests += requests
        streams = [Stream(request, self._cancel) for request in requests]
        self.streams += streams
        if not self._manual:
            self._tasks = [task for task in self._tasks if not task.done()]
            self._tasks.append(asyncio.create_task(self._answer(streams)))
            self.most_at_once = max(self.most_at_once, len(self._tasks))
        return streams

    def _cancel(self, stream: Stream) -> None:
        self.cancelled.append(stream.request.id)
        stream.close()

    async def _answer(self, streams: list[Stream]) -> None:
        for step in range(max(stream.request.max_tokens for stream in streams)):
            await asyncio.sleep(0)
            for stream in streams:
                if step < stream.request.max_tokens and stream.request.id not in self.cancelled:
                    stream.push(self._update(stream.request, step))

    def _update(self, request: Request, step: int) -> SequenceUpdate:
        token = self._reply[step % len(self._reply)]
        reason: FinishReason | None = None
        detail = None
        if token in request.stop_ids:
            reason, detail = FinishReason.STOP, token
        elif step + 1 == request.max_tokens:
            reason = FinishReason.LENGTH
        count = request.params.logprobs
        logprobs = None if count is None else [_logprob(token, count)]
        prompt_logprobs = None
        if step == 0 and request.params.prompt_logprobs is not None:
            prompt_logprobs = [_logprob(t, request.params.prompt_logprobs) for t in request.prompt_ids[1:]]
        return SequenceUpdate(request.id, [token], reason, detail, logprobs, prompt_logprobs, 3, request.arrival)


def _logprob(token: int, count: int) -> TokenLogprob:
    return TokenLogprob(token, -0.5, 1, [(token + i, -0.5 - i) for i in range(count)])


class Answer:
    """An HTTP answer, write by write."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.writes: list[bytes] = []
        self.complete = False

    @property
    def body(self) -> bytes:
        return b"".join(self.writes)

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> Any:
        assert set(self.json()) == {"error"}
        assert set(self.json()["error"]) == {"message", "type", "param", "code"}
        return self.json()["error"]

    def events(self) -> list[Any]:
        """The events' JSON; the end mark must be there and is left out."""
        lines = self.body.decode().split("\n\n")
        assert lines[-2:] == ["data: [DONE]", ""], lines[-2:]
        return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


class Front:
    """The application with a fake client behind it."""

    def __init__(self, client: FakeClient | None = None, words: Tokenizer | None = None, **settings: Any) -> None:
        self.tokenizer = words or tokenizer()
        self.client = client or FakeClient(self.tokenizer.encode("hello world! "))
        config = ServerConfig(**settings)
        model_dialect = model_dialect_of(self.tokenizer)
        self.service = SequenceService(self.client, self.tokenizer, "tiny", config, model_dialect=model_dialect)
        self.keys = Keys(config)
        self.responses = ResponseStore(config)
        self.models = Models([self.service], aliases=config.model_aliases)
        batches = Batches(self.models, config)
        self.live = make_feed(self.models, config, batches, self.keys)
        self.app = create_app(self.models, config, batches, self.keys, self.responses, self.live)
        self.gone = asyncio.Event()

    async def call(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: dict[str, str] | None = None,
        chunks: list[bytes] | None = None,
        answer: Answer | None = None,
        query: str = "",
        client: str = "test",
    ) -> Answer:
        """Send a request; set `gone` to play a client that hangs up."""
        answer = Answer() if answer is None else answer
        raw = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        parts = [raw] if chunks is None else chunks
        incoming = [
            {"type": "http.request", "body": part, "more_body": i + 1 < len(parts)} for i, part in enumerate(parts)
        ]
        given = {"content-type": "application/json"} | (headers or {})

        async def receive() -> dict[str, Any]:
            if incoming:
                return incoming.pop(0)
            await self.gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                answer.status = message["status"]
                answer.headers = {k.decode().lower(): v.decode() for k, v in message["headers"]}
            else:
                if message.get("body"):
                    answer.writes.append(message["body"])
                answer.complete = not message.get("more_body", False)

        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "scheme": "http",
            "headers": [(k.lower().encode(), v.encode()) for k, v in given.items()],
            "client": (client, 1),
            "server": ("test", 80),
        }
        await self.app(scope, receive, send)  # type: ignore[arg-type]
        return answer

    async def post(self, path: str, body: Any, **more: Any) -> Answer:
        return await self.call("POST", path, body, **more)

    async def complete(self, **body: Any) -> Answer:
        return await self.post("/v1/completions", {"prompt": "hello"} | body)

    async def chat(self, **body: Any) -> Answer:
        return await self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]} | body)


def full(retry_after: float) -> QueueFull:
    return QueueFull("the line is full", retry_after)


def run(test: Callable[[], Awaitable[Any]]) -> None:
    """Run a test on an event loop, for at most a minute."""
    asyncio.run(asyncio.wait_for(test(), 60))


async def until(is_so: Callable[[], Any]) -> None:
    """Wait for something to become so."""
    while not is_so():
        await asyncio.sleep(0.001)

"""A real HTTP server over models that are computed here: small, deterministic, and as slow or broken as wanted."""

import asyncio
import contextlib
import functools
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from support.text_tokenizers import build
from tokenizers import processors

from chairlift.config.server import ServerConfig
from chairlift.core.items.limits import BatchLimits
from chairlift.engine.items.call import CallResult, OnParts
from chairlift.engine.items.dispatcher import Answer, Dispatcher
from chairlift.folders.sentence_files import ChatFormat, SentenceFiles
from chairlift.runners.items import Encoding, ItemInfo, TensorSpec
from chairlift.server.app import create_app
from chairlift.server.batches.service import Batches
from chairlift.server.http.buffered import Buffered
from chairlift.server.http.protocol import make_server
from chairlift.server.http.tenants import Keys
from chairlift.server.http.tls import make_tls
from chairlift.server.models.item_service import ItemService
from chairlift.server.models.registry import Models, ModelService
from chairlift.text.encoding import TextEncoder

DIMENSIONS = 8
MAX_TOKENS = 40
CALL_S = 0.002
Compute = Callable[[list[Any]], list[Any]]


class Computing:
    """An executor that computes in this very process, at once or when it is let go."""

    def __init__(self, dispatcher: "LocalDispatcher") -> None:
        self._dispatcher = dispatcher

    async def run(self, payloads: Sequence[Any], on_parts: OnParts | None = None) -> CallResult:
        dispatcher = self._dispatcher
        while dispatcher.held:
            await asyncio.sleep(0.001)
        dispatcher.batches.append(len(payloads))
        if dispatcher.held_from is not None and sum(dispatcher.batches) >= dispatcher.held_from:
            dispatcher.held, dispatcher.held_from = True, None
        began = time.monotonic()
        results = dispatcher.compute(list(payloads))
        for index, value in enumerate(results):
            while on_parts is not None and isinstance(value, list) and value:
                part = value.pop(0)
                if isinstance(part, Exception):
                    results[index] = value = part
                else:
                    on_parts({index: part})
                    await asyncio.sleep(0)
        # It takes at least as long as it says.
        await asyncio.sleep(max(began + CALL_S - time.monotonic(), 0.0))
        return CallResult(results, CALL_S)


class LocalDispatcher(Dispatcher):
    """A real dispatcher with a fake executor; it notes what came, and refuses as it is told."""

    def __init__(self, compute: Compute, **limits: Any) -> None:
        super().__init__(BatchLimits(**({"max_waiting": 4096} | limits)), [Computing(self)])
        self.compute = compute
        self.refusal: Exception | None = None
        self.held = False
        # So many items after which it is held by itself.
        self.held_from: int | None = None
        self.submitted: list[dict[str, Any]] = []
        self.batches: list[int] = []

    def submit(self, payload: Any, **more: Any) -> asyncio.Future[Answer]:
        if self.refusal is not None:
            raise self.refusal
        self.submitted.append({"payload": payload} | more)
        return super().submit(payload, **more)

    @property
    def waiting(self) -> int:
        return self.num_unfinished


@functools.cache
def encoder(max_tokens: int = MAX_TOKENS, default_prompt: str | None = None) -> TextEncoder:
    backend = build("wordpiece")
    ids = [(token, backend.token_to_id(token)) for token in ("<s>", "<|end|>")]
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A <|end|>", pair="<s> $A <|end|> $B:1 <|end|>:1", special_tokens=ids
    )
    with tempfile.TemporaryDirectory() as folder:
        backend.save(f"{folder}/tokenizer.json")
        files = SentenceFiles(prompts={"query": "hello "}, default_prompt=default_prompt)
        return TextEncoder(folder, max_tokens, files)


# A chat of any roles.
CHAT = "{% for m in messages %}<s>{{ m.role }} {{ m.content }}<|end|>{% endfor %}"


def chat_encoder(judges: bool, max_tokens: int = MAX_TOKENS) -> TextEncoder:
    """An encoder whose texts, or pairs, are messages of a chat, in which by default the system says hello."""
    files = SentenceFiles(
        prompts={"it": "hello", "none": ""}, default_prompt="it", chat=ChatFormat(False, {}), judges=judges
    )
    with tempfile.TemporaryDirectory() as folder:
        build("wordpiece").save(f"{folder}/tokenizer.json")
        Path(folder, "chat_template.jinja").write_text(CHAT)
        return TextEncoder(folder, max_tokens, files)


def chat_ids(**said: str) -> list[int]:
    """The tokens of what each role says in such a chat."""
    prompt = "".join(f"<s>{role} {text}<|end|>" for role, text in said.items())
    ids: list[int] = build("wordpiece").encode(prompt, add_special_tokens=False).ids
    return ids


def ids_of(text: str) -> list[int]:
    """A text's tokens, special ones too, however many."""
    return encoder(10_000).encode_texts([text])[0].token_ids


def pair_of(first: str, second: str) -> Encoding:
    return encoder().encode_pairs([(first, second)])[0]


def embedding(token_ids: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
    """What the fake embedder makes of tokens: a unit vector that depends on all of them."""
    places = np.arange(1, len(token_ids) + 1)
    angles = np.outer(np.arange(1, DIMENSIONS + 1), np.asarray(token_ids) * places)
    vector = np.cos(angles / 7).sum(axis=1).astype(np.float32)
    return vector / np.linalg.norm(vector)


def embedded(payload: Encoding) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The vector of a text, or the vectors of its tokens, each as if it were alone."""
    ids = payload.token_ids
    return np.stack([embedding([each]) for each in ids]) if payload.every_token else embedding(ids)


def embedder(name: str = "embedder", **more: Any) -> tuple[ItemService, LocalDispatcher]:
    info = ItemInfo(
        task="embed",
        device="cpu",
        dtype="float32",
        max_tokens=MAX_TOKENS,
        dimensions=DIMENSIONS,
        hidden_size=DIMENSIONS,
        pooling="mean",
        normalized=more.pop("normalized", True),
        vocab_size=120,
    )
    limits = {"max_waiting": more.pop("max_waiting")} if "max_waiting" in more else {}
    dispatcher = LocalDispatcher(lambda payloads: [embedded(each) for each in payloads], **limits)
    made = more.pop("encoder", None) or encoder(default_prompt=more.pop("default_prompt", None))
    return ItemService(name, dispatcher, info=info, encoder=made, **more), dispatcher


def relevance(payload: Encoding) -> np.ndarray[Any, np.dtype[np.float32]]:
    """A logit: how many tokens of the second text are in the first, less one."""
    assert payload.type_ids is not None
    parts: list[set[int]] = [set(), set()]
    for token, kind in zip(payload.token_ids, payload.type_ids, strict=True):
        parts[kind].add(token)
    return np.array([len(parts[0] & parts[1]) - 1], dtype=np.float32)


def reranker(name: str = "reranker", made: TextEncoder | None = None) -> tuple[ItemService, LocalDispatcher]:
    info = ItemInfo(task="rerank", device="cpu", dtype="float32", max_tokens=MAX_TOKENS, labels=("relevant",))
    dispatcher = LocalDispatcher(lambda payloads: [relevance(each) for each in payloads])
    return ItemService(name, dispatcher, info=info, encoder=made or encoder()), dispatcher


def classifier(name: str = "classifier") -> tuple[ItemService, LocalDispatcher]:
    labels = ("short", "long", "pair")
    info = ItemInfo(task="classify", device="cpu", dtype="float32", max_tokens=MAX_TOKENS, labels=labels)

    def classify(each: Encoding) -> np.ndarray[Any, np.dtype[np.float32]]:
        number = len(each.token_ids)
        return np.array([6 - number, number - 6, 9 if each.type_ids else -9], dtype=np.float32)

    dispatcher = LocalDispatcher(lambda payloads: [classify(each) for each in payloads])
    return ItemService(name, dispatcher, info=info, encoder=encoder()), dispatcher


def adder(name: str = "adder") -> tuple[ItemService, LocalDispatcher]:
    """Two tensors and a text in; their sum, its mean and the text in capitals out."""
    info = ItemInfo(
        task="tensors",
        device="cpu",
        dtype="",
        inputs=(TensorSpec("a", "FP32", (-1,)), TensorSpec("b", "FP32", (-1,)), TensorSpec("word", "BYTES", ())),
        outputs=(TensorSpec("sum", "FP32", (-1,)), TensorSpec("mean", "FP64", ()), TensorSpec("loud", "BYTES", ())),
        shape_keys=True,
    )

    def add(item: dict[str, Any]) -> dict[str, Any]:
        total = item["a"] + item["b"]
        return {"sum": total, "mean": total.mean(), "loud": item["word"].item().upper()}

    dispatcher = LocalDispatcher(lambda payloads: [add(each) for each in payloads])
    return ItemService(name, dispatcher, info=info), dispatcher


def function(name: str = "function") -> tuple[ItemService, LocalDispatcher]:
    """A Python function of any JSON: doubles numbers, and fails as it is told."""
    info = ItemInfo(task="python", device="cpu", dtype="")

    def double(item: Any) -> Any:
        return {"twice": np.float32(item["x"]) * 2, "list": np.arange(2)} if isinstance(item, dict) else item * 2

    dispatcher = LocalDispatcher(lambda payloads: [double(each) for each in payloads])
    return ItemService(name, dispatcher, info=info), dispatcher


def counter(name: str = "counter") -> tuple[ItemService, LocalDispatcher]:
    """A Python function that streams: counts up to a number."""
    info = ItemInfo(task="python", device="cpu", dtype="", streams=True)
    dispatcher = LocalDispatcher(
        lambda payloads: [[{"count": i, "text": "a\u2028b"} for i in range(each)] for each in payloads]
    )
    return ItemService(name, dispatcher, info=info), dispatcher


class Listening:
    """A server on a port of its own, in a thread of its own."""

    def __init__(self, models: Models, **settings: Any) -> None:
        self.models = models
        self.config = ServerConfig(**settings)
        self._ready = threading.Event()
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]
        self.tls = make_tls(self.config)
        self.url = f"{'http' if self.tls is None else 'https'}://127.0.0.1:{self.port}"
        self.batches = Batches(models, self.config)
        self.buffered = Buffered(self.config.max_buffered_bytes)
        self.keys = Keys(self.config)
        app = create_app(models, self.config, self.batches, self.keys)
        self.server = make_server(app, self.config, self.tls, self.buffered)
        self.grpc_port = 0
        self._with_grpc = False
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    async def _serve(self) -> None:
        grpc = None
        if self._with_grpc:
            from chairlift.server.oip.grpc_server import make_grpc_server

            grpc, self.grpc_port = make_grpc_server(self.models, self.config, 0, self.keys, self.tls, self.buffered)
            await grpc.start()
        self._ready.set()
        await self.server.serve(sockets=[self._socket])
        await self.batches.close()
        if grpc is not None:
            await grpc.stop(None)

    def start(self, with_grpc: bool) -> None:
        self._with_grpc = with_grpc
        self._thread.start()
        self._ready.wait()

    def stop(self) -> None:
        self.server.should_exit = True
        self._thread.join()


@contextlib.contextmanager
def listening(
    *models: ModelService, registry: Models | None = None, grpc: bool = False, **settings: Any
) -> Iterator[Listening]:
    it = Listening(registry if registry is not None else Models(models), **settings)
    it.start(grpc)
    try:
        yield it
    finally:
        it.stop()


def threads_of(monkeypatch: pytest.MonkeyPatch, *functions: tuple[ModuleType, str]) -> list[str]:
    """The names of the threads in which these functions of modules are called from now on, in that order."""
    threads: list[str] = []

    def watch(module: ModuleType, name: str) -> None:
        plain = getattr(module, name)

        def watched(*given: Any) -> Any:
            threads.append(threading.current_thread().name)
            return plain(*given)

        monkeypatch.setattr(module, name, watched)

    for module, name in functions:
        watch(module, name)
    return threads

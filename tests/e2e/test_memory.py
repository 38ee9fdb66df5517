"""What the front takes of memory when many clients send large messages at once."""

import asyncio
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from support.serve_process import Server

grpc = pytest.importorskip("grpc")
service_pb2 = pytest.importorskip("tritonclient.grpc.service_pb2")

pytestmark = [pytest.mark.processes, pytest.mark.slow]

MODELS = """
import time

class Echo:
    inputs = [("x", "FP32", [-1])]
    outputs = [("y", "FP32", [-1])]

    def predict(self, batch):
        time.sleep(0.2)
        return [{"y": each["x"] * 2} for each in batch]

class Length:
    def predict(self, batch):
        time.sleep(0.2)
        return [len(each) for each in batch]
"""
CALLS, BYTES = 200, 3_900_000
# Bodies of HTTP are whole before they are decoded, and there are more of them.
MOST_MB, MOST_HTTP_MB = 600, 700


def tensors() -> bytes:
    values = np.ones((1, BYTES // 4), np.float32)
    request = service_pb2.ModelInferRequest(model_name="echo", raw_input_contents=[values.tobytes()])
    request.inputs.add(name="x", datatype="FP32", shape=values.shape)
    return bytes(request.SerializeToString())


def document() -> bytes:
    raw = b'"' + b"a" * BYTES + b'"'
    request = service_pb2.ModelInferRequest(model_name="length")
    request.raw_input_contents.append(np.uint32(len(raw)).tobytes() + raw)
    request.inputs.add(name="input", datatype="BYTES", shape=[1])
    return bytes(request.SerializeToString())


def peak_mb(server: Server) -> int:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    assert found
    return int(found[1]) // 1024


async def over_grpc(server: Server, message: bytes) -> Counter[str]:
    """The codes of many calls at once, over several connections."""
    options = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
    channels = [grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}", options) for _ in range(8)]

    async def unary(number: int) -> str:
        infer = channels[number % 8].unary_unary("/inference.GRPCInferenceService/ModelInfer")
        try:
            await infer(message, timeout=120)
        except grpc.aio.AioRpcError as error:
            return str(error.code().name)
        return "OK"

    codes = Counter(await asyncio.gather(*(unary(number) for number in range(CALLS))))
    for channel in channels:
        await channel.close()
    return codes


def over_streams(server: Server, message: bytes) -> Counter[str]:
    """What becomes of as many streams with one message each."""
    codes: Counter[str] = Counter()
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}", [("grpc.max_receive_message_length", -1)]) as channel:
        infer = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        for call in [infer(iter([message]), timeout=120) for _ in range(CALLS)]:
            try:
                answer = service_pb2.ModelStreamInferResponse.FromString(next(call))
                codes["REFUSED" if answer.error_message else "OK"] += 1
            except grpc.RpcError as error:
                codes[error.code().name] += 1
    return codes


async def over_http(server: Server) -> Counter[str]:
    body = json.dumps({"instances": ["a" * BYTES]}).encode()
    limits = httpx.Limits(max_connections=CALLS)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
        headers = {"Content-Type": "application/json"}
        path = "/v1/models/length:predict"
        answers = await asyncio.gather(*(client.post(path, content=body, headers=headers) for _ in range(CALLS)))
    return Counter({200: "OK", 429: "REFUSED"}.get(answer.status_code, answer.text) for answer in answers)


@pytest.mark.parametrize("way", ["tensors", "document", "stream", "http"])
def test_many_large_requests_at_once(way: str, tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text(MODELS)
    settings = "".join(f'[models.{name.lower()}]\nmodel = "models.py:{name}"\n' for name in ("Echo", "Length"))
    (tmp_path / "chairlift.toml").write_text(settings)

    async def go(server: Server) -> tuple[Counter[str], int]:
        sending: Any = {
            "tensors": lambda: over_grpc(server, tensors()),
            "document": lambda: over_grpc(server, document()),
            "stream": lambda: asyncio.to_thread(over_streams, server, tensors()),
            "http": lambda: over_http(server),
        }
        calls = asyncio.create_task(sending[way]())
        alive = 0
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
            while not calls.done():
                assert (await client.get("/health/live")).status_code == 200
                alive += 1
                await asyncio.wait([calls], timeout=0.05)
        return calls.result(), alive

    with Server(str(tmp_path / "chairlift.toml"), "--grpc-port", "0") as server:
        server.wait_ready()
        before = peak_mb(server)
        codes, alive = asyncio.run(go(server))
        print(f"{way}: {dict(codes)}; {alive} probes; peak {peak_mb(server)} MB, {before} MB before")
        assert codes.total() == CALLS
        assert codes["OK"] > 0
        assert codes.keys() <= {"OK", "RESOURCE_EXHAUSTED", "REFUSED"}, codes
        assert alive > 0
        assert peak_mb(server) < (MOST_HTTP_MB if way == "http" else MOST_MB)

"""Storms of hostile requests: `pytest tests/e2e/test_fuzz.py -m slow -s`, more of them with CHAIRLIFT_FUZZ=50000.

No answer is a 5xx that nobody asked for, none is missing, the front stays as small as it was, no block is left, and
no line of the log is long.
"""

import asyncio
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from support.fuzzing import BODIES, HANG_SECONDS, NEW_BODIES, Fuzzer, Report, grpc_requests, storm
from support.serve_process import WITH_GRPC, Server

pytestmark = [pytest.mark.processes, pytest.mark.slow, pytest.mark.timeout(7200)]
COUNT = int(os.environ.get("CHAIRLIFT_FUZZ", "3000"))
MAX_GROWTH_MB, MAX_LOG_BYTES = 30, 2048
FORBIDDEN = {"UNKNOWN", "INTERNAL", "DATA_LOSS"}


@pytest.fixture
def server(models_settings: Path) -> Iterator[Server]:
    with Server(str(models_settings), *WITH_GRPC, "--body-timeout-s", "3", "--keep-alive-s", "5") as server:
        server.wait_ready()
        yield server


def resident_mb(server: Server) -> float:
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1024


def all_is_well(server: Server, before_mb: float) -> None:
    """What must hold after a storm."""
    deadline = time.monotonic() + HANG_SECONDS
    while server.metric("requests_running", model="chat") or server.metric("kv_blocks_used", model="chat"):
        assert time.monotonic() < deadline, "requests or blocks are left"
        time.sleep(0.1)
    server.wait_ready()
    after_mb = resident_mb(server)
    longest = max(len(line.encode()) for line in server.lines)
    print(
        f"front: {before_mb:.0f} -> {after_mb:.0f} MB; longest line of {len(server.lines)} in the log: {longest} bytes"
    )
    assert longest <= MAX_LOG_BYTES, max(server.lines, key=len)[:3000]
    assert after_mb - before_mb <= MAX_GROWTH_MB


@pytest.mark.parametrize("bodies", [BODIES, NEW_BODIES], ids=["all", "forms and tools"])
def test_http(server: Server, bodies: Sequence[tuple[str, dict[str, Any]]]) -> None:
    report = Report()
    asyncio.run(storm(server.port, Fuzzer(0, bodies), COUNT // 5, report))
    before = resident_mb(server)
    asyncio.run(storm(server.port, Fuzzer(1, bodies), COUNT - COUNT // 5, report))
    statuses: Counter[str] = Counter()
    for (_, status), count in report.answers.items():
        statuses[status] += count
    print(f"\n{COUNT} requests over HTTP: {dict(sorted(statuses.items()))}, {len(report.hung)} without an answer")
    assert not report.bad, (len(report.bad), report.bad[:3])
    assert not report.hung, (len(report.hung), report.hung[:3])
    assert statuses["200"] > COUNT // 20
    all_is_well(server, before)


def test_grpc(server: Server) -> None:
    grpc = pytest.importorskip("grpc")
    from chairlift.server.oip.protobuf import SERVICE, message

    fuzzer, infer = Fuzzer(2), message("ModelInferRequest")
    options = [("grpc.max_receive_message_length", 2**26)]
    codes: Counter[str] = Counter()
    bad: list[tuple[bytes, Any]] = []
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}", options) as channel:
        names = (
            "ModelInfer",
            "ModelInfer",
            "ModelInfer",
            "ModelMetadata",
            "ModelReady",
            "RepositoryIndex",
            "ServerLive",
            "NoSuch",
        )
        before = 0.0
        for number in range(COUNT // 5 // 32 + 1):
            if number == 40:
                before = resident_mb(server)
            calls = []
            for _ in range(32):
                raw = grpc_requests(fuzzer, infer)
                call = channel.unary_unary(f"/{SERVICE}/{fuzzer.rng.choice(names)}")
                calls.append((raw, call.future(raw, timeout=HANG_SECONDS)))
            for raw, call in calls:
                code = call.code().name
                codes[code] += 1
                if code in FORBIDDEN or code == "DEADLINE_EXCEEDED":
                    bad.append((raw, call.details()))
    print(f"\n{sum(codes.values())} calls over gRPC: {dict(codes)}")
    assert not bad, (len(bad), bad[:3])
    all_is_well(server, before or resident_mb(server))


def test_what_the_description_allows(server: Server) -> None:
    """Requests that schemathesis makes from /openapi.json. None unloads a model, or begins a stream without an end."""
    schemathesis = pytest.importorskip("schemathesis")
    schema = schemathesis.openapi.from_dict(server.http.get("/openapi.json").json())
    operations = [each.ok() for each in schema.get_all_operations()]
    operations = [each for each in operations if not each.path.endswith(("/load", "/unload", "/live", "/recording"))]
    statuses: Counter[int] = Counter()
    bad: list[tuple[str, Any, str]] = []
    before = resident_mb(server)
    for operation in operations:

        @settings(
            max_examples=max(COUNT // 10 // len(operations), 5),
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
        )
        @given(operation.as_strategy())
        def ask(case: Any) -> None:
            answer = case.call(base_url=server.url, timeout=HANG_SECONDS)
            statuses[answer.status_code] += 1
            if answer.status_code >= 500 and answer.status_code not in (503, 504, 507):
                bad.append((case.formatted_path, case.body, answer.text))

        ask()
    print(f"\n{sum(statuses.values())} requests from the description: {dict(sorted(statuses.items()))}")
    assert not bad, (len(bad), bad[:3])
    all_is_well(server, before)

"""The open-loop client: what it counts, what it sends, and that a server that fails is told apart from a slow one."""

import argparse
import json
import socket
import sys
import threading
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import overload
import serving
import shared_prefix
import workloads
from rate_search import highest_rate
from support.fake_server import FakeServer
from support.serve_process import Server

from chairlift.bench.completion_stream import Outcome, Target
from chairlift.bench.latency import COLUMNS, RATE, Slo, figures, inside, percentiles
from chairlift.bench.load import LATE, Arrival, Load, Phase, changing_loop, closed_loop, open_loop
from chairlift.bench.raw_results import table

SLO = Slo(ttft_ms=1000, tpot_ms=100)
END = b"data: [DONE]\n\n"


def event(text: str, **fields: Any) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "text": text}]} | fields).encode() + b"\n\n"


def usage(tokens: int) -> bytes:
    return b"data: " + json.dumps({"choices": [], "usage": {"completion_tokens": tokens}}).encode() + b"\n\n"


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    it = FakeServer()
    yield it
    it.close()


def only(fake: FakeServer) -> Outcome:
    target = fake.target()
    load = closed_loop(target, [target.request([1, 2], 4)], 1)
    return load.outcomes[0]


def test_usage_counts_tokens_where_an_event_carries_several(fake: FakeServer) -> None:
    fake.pieces = [b": waiting\n", event("a") + event("bc"), event(""), usage(7) + END]
    outcome = only(fake)
    assert (outcome.tokens, len(outcome.times), outcome.error) == (7, 2, None)
    assert outcome.due <= outcome.sent <= outcome.times[0] <= outcome.times[1] <= outcome.ended


def test_events_count_where_there_is_no_usage_however_they_are_cut(fake: FakeServer) -> None:
    raw = b"".join([event("a"), event('"text":"" \\" "usage":{'), event("c", usage=None), END]).replace(b"\n", b"\r\n")
    fake.pieces = [raw[i : i + 7] for i in range(0, len(raw), 7)]
    outcome = only(fake)
    assert (outcome.tokens, outcome.error) == (3, None)


def test_tokens_without_text_end_in_one_moment(fake: FakeServer) -> None:
    fake.pieces = [event(""), usage(3), END]
    outcome = only(fake)
    assert (outcome.tokens, len(outcome.times), outcome.error) == (3, 1, None)


@pytest.mark.parametrize(
    ("status", "pieces", "message"),
    [
        ("429 Too Many Requests", [b'{"error": "full"}'], 'HTTP 429: {"error": "full"}'),
        ("200 OK", [event("a"), b'data: {"error": {"message": "died"}}\n\n'], "died"),
        ("200 OK", [END], "without tokens"),
    ],
)
def test_failures_are_told(fake: FakeServer, status: str, pieces: list[bytes], message: str) -> None:
    fake.status, fake.pieces = status, pieces
    outcome = only(fake)
    assert outcome.error is not None
    assert message in outcome.error


def test_nobody_listens_and_nobody_answers(fake: FakeServer) -> None:
    fake.hangs = True
    target = fake.target()
    load = open_loop(target, [Arrival(0.0, target.request([1], 1))], 0.05, drain=0.1)
    assert [outcome.error for outcome in load.outcomes] == ["not answered in time"]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    load = closed_loop(Target.of(f"http://127.0.0.1:{port}", "m"), [b""], 1)
    assert "no connection" in str(load.outcomes[0].error)


def test_requests_are_greedy_exact_and_carry_extras(fake: FakeServer) -> None:
    fake.pieces = [event("a"), END]
    target = fake.target(cache_prompt=False)
    closed_loop(target, [target.request([5, 6], 9, cache_salt="s")], 1)
    body = fake.bodies[0]
    assert body["prompt"] == [5, 6]
    wanted = {"max_tokens": 9, "ignore_eos": True, "temperature": 0, "cache_prompt": False, "cache_salt": "s"}
    assert wanted.items() <= body.items()


def test_open_loop_sends_everything_whether_or_not_answers_come(fake: FakeServer) -> None:
    fake.pieces = [event("a"), event("b"), usage(2), END]
    target = fake.target()
    arrivals = [Arrival(i / 1000, target.request([i], 2)) for i in range(40)]
    row = figures(open_loop(target, arrivals, 0.2, drain=10), Slo(1e6, 1e6), rate=1000)
    assert (row["requests"], row["failed"], row["tokens"], row["inside_percent"]) == (40, 0, 80, 100)
    assert row["offered"] == pytest.approx(200)
    assert sorted(body["prompt"][0] for body in fake.bodies) == list(range(40))


def test_a_changing_loop_has_as_many_clients_as_each_phase_and_ends_with_the_last(fake: FakeServer) -> None:
    fake.pieces = [event("a"), usage(1), END]
    target, sent, asked = fake.target(), 0, []

    def endless() -> Iterator[bytes]:
        nonlocal sent
        while True:
            sent += 1
            yield target.request([sent], 1)

    load = changing_loop(target, endless(), [Phase(1, 0.1), Phase(4, 0.1), Phase(2, 0.1)], lambda: asked.append(sent))
    # A client that is answered leaves before it sends again, if there are too many.
    moments = sorted([(each.sent, 1) for each in load.outcomes] + [(each.ended, -1) for each in load.outcomes])
    here = most = 0
    for _, step in moments:
        here += step
        most = max(most, here)
    assert most == 4
    assert len(load.outcomes) == sent
    assert asked == sorted(asked)
    assert 0 < asked[0] < asked[2] <= sent
    assert {each.error for each in load.outcomes} <= {None, LATE}
    assert load.seconds >= 0.3


def test_a_client_of_a_changing_loop_that_fails_sends_no_more(fake: FakeServer) -> None:
    fake.status = "500 Oops"
    target = fake.target()
    load = changing_loop(target, repeat(target.request([1], 1)), [Phase(3, 0.1)], lambda: None)
    assert len(load.outcomes) == 3


def test_no_request_leaves_before_its_moment_and_those_of_one_moment_all_leave(fake: FakeServer) -> None:
    fake.pieces = [event("a"), usage(1), END]
    target = fake.target()
    offsets = [0.0, 0.0, 0.0123, 0.0123, 0.0301]
    arrivals = [Arrival(offset, target.request([i], 1)) for i, offset in enumerate(offsets)]
    load = open_loop(target, arrivals, 0.04, drain=10)
    assert sorted(each.due - load.began for each in load.outcomes) == pytest.approx(offsets)
    assert all(each.sent >= each.due for each in load.outcomes)
    assert not [thread for thread in threading.enumerate() if thread.name == "arrivals"]


def test_an_open_loop_ends_when_it_is_given_up(fake: FakeServer) -> None:
    fake.hangs = True
    target = fake.target()
    arrivals = [Arrival(offset, target.request([1], 1)) for offset in (0.0, 1000.0)]
    load = open_loop(target, arrivals, 1000, drain=1000, give_up=lambda outcomes: len(fake.bodies) == 1)
    assert load.given_up
    assert load.seconds < 1000
    assert [outcome.error for outcome in load.outcomes] == ["not answered in time"]


def test_a_search_gives_a_rate_up_once_too_many_have_missed_the_target(fake: FakeServer) -> None:
    fake.status = "500 Internal Server Error"
    args = argparse.Namespace(seconds=1000.0, drain=1000.0, vocab=100, seed=0)
    row = serving.at_rate(fake.target(), 1.0, args, Slo(), needed=99.9)
    assert (row["given_up"], row["inside_percent"]) == (True, 0)


def test_a_search_sends_a_hundred_requests_at_a_rate_that_has_them_in_three_minutes() -> None:
    assert serving.search_seconds(10.0, 20.0) == 20.0
    assert serving.search_seconds(2.0, 20.0) == 50.0
    assert serving.search_seconds(0.1, 20.0) == 180.0


def test_tokens_a_second_are_those_of_the_time_in_which_requests_came() -> None:
    # Due, sent, first text and end since then, tokens, status: done in time, half in time, not begun in time, refused.
    requests = [
        [0.0, 0.0, 1.0, 5.0, 11, "200"],
        [4.0, 0.0, 1.0, 11.0, 11, "200"],
        [9.0, 0.0, 2.0, 3.0, 40, "200"],
        [9.5, 0.0, None, 0.1, 0, "429"],
    ]
    run = {"target": "none", "factor": 1.0, "seconds": 10.0, "requests": requests}
    row = overload.figures(run, {"slo_ttft_ms": 1000.0, "best": 1.0})
    assert row["output_tok_s"] == pytest.approx((11 + 6) / 10)


def answered(ttft: float, tpot: float, tokens: int = 11, due: float = 0.0) -> Outcome:
    times = [due + ttft + i * tpot for i in range(tokens)]
    return Outcome(due, due, times[-1], times, tokens)


def test_inside_needs_both_times_and_no_error() -> None:
    assert inside(answered(0.9, 0.09), SLO)
    assert not inside(answered(1.1, 0.09), SLO)
    assert not inside(answered(0.9, 0.11), SLO)
    assert inside(answered(0.9, 5.0, tokens=1), SLO)
    failed = answered(0.1, 0.01)
    failed.error = "HTTP 500"
    assert not inside(failed, SLO)


def test_figures_of_a_load() -> None:
    failed = Outcome(9.0, 9.5, 9.6, error="HTTP 429")
    # The last one gets 6 of its 11 tokens while requests are still sent.
    outcomes = [answered(0.5, 0.05), answered(2.0, 0.05), answered(0.5, 0.1, due=8.99), failed]
    row = figures(Load(began=0.0, seconds=10.0, outcomes=outcomes, cpu=33e-6), Slo(1000, 101), rate=0.4)
    assert (row["offered"], row["achieved"], row["goodput"]) == pytest.approx((0.4, 0.2, 0.2))
    assert (row["inside_percent"], row["failed"], row["errors"]) == (50, 1, {"HTTP 429": 1})
    assert row["output_tok_s"] == pytest.approx((11 + 11 + 6) / 10)
    assert row["tpot_ms"]["p50"] == pytest.approx(50)
    assert row["ttft_ms"]["p50"] == pytest.approx(500)
    assert row["itl_ms"]["p99"] == pytest.approx(100)
    assert row["e2e_ms"]["p50"] == pytest.approx(1500)
    assert row["client_us_token"] == pytest.approx(1)
    lines = table([row], [RATE], COLUMNS).splitlines()
    assert lines[0].startswith("| rate/s")
    assert "| 50% " in lines[2]


def test_where_all_come_at_once_rates_are_of_the_time_until_the_last_answer() -> None:
    outcomes = [Outcome(5.0, 5.0, 5.0 + each, [5.5, 5.0 + each], 2) for each in (1.0, 2.0, 4.0)]
    row = figures(Load(began=5.0, seconds=0.0, outcomes=outcomes, cpu=0.0), Slo(1000, 10_000))
    assert (row["seconds"], row["offered"], row["achieved"], row["goodput"]) == (4.0, 0.75, 0.75, 0.75)
    assert row["output_tok_s"] == 1.5
    # Of longer ones they are of the time in which requests came.
    row = figures(Load(began=5.0, seconds=3.0, outcomes=outcomes, cpu=0.0), Slo(1000, 10_000))
    assert (row["seconds"], row["achieved"]) == (3.0, 2 / 3)


def test_percentiles_interpolate_and_nothing_is_zero() -> None:
    assert percentiles([0.0, 0.1], (50, 95)) == pytest.approx({"p50": 50, "p95": 95})
    assert percentiles([], (50,)) == {"p50": 0.0}


@pytest.mark.parametrize(("limit", "start"), [(3.3, 1.0), (0.4, 1.0), (1.0, 1.0), (700.0, 5.0)])
def test_search_ends_just_below_the_limit(limit: float, start: float) -> None:
    tried: list[float] = []

    def holds(rate: float) -> bool:
        tried.append(rate)
        return rate <= limit

    best = highest_rate(holds, start)
    assert best is not None
    assert limit / 1.05 <= best <= limit
    assert len(tried) < 16


def test_search_of_a_server_that_never_holds() -> None:
    assert highest_rate(lambda rate: False) is None


def test_requests_are_the_same_for_every_server_but_not_at_another_rate() -> None:
    assert workloads.arrivals(2.0, 20.0, seed=3) == workloads.arrivals(2.0, 20.0, seed=3)
    slow, fast = workloads.arrivals(1.0, 20.0), workloads.arrivals(4.0, 20.0)
    assert all(16 <= len(job.prompt) <= 384 and 1 <= job.length <= 256 and job.offset < 20 for job in fast)
    assert [(len(job.prompt), job.length) for job in slow] == [
        (len(job.prompt), job.length) for job in fast[: len(slow)]
    ]
    assert slow[0].prompt[:8] != fast[0].prompt[:8]
    assert fast[0].offset == pytest.approx(slow[0].offset / 4)


def run(monkeypatch: pytest.MonkeyPatch, demo_server: Server, *arguments: str) -> None:
    command = [
        "serving.py",
        demo_server.url,
        "--model",
        "demo",
        "--vocab",
        "300",
        "--seconds",
        "1",
        "--repeat",
        "1",
        *arguments,
    ]
    monkeypatch.setattr(sys, "argv", command)
    serving.main()


def test_rates_against_the_demo_server(
    demo_server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(monkeypatch, demo_server, "--rates", "5", "10")
    lines = capsys.readouterr().out.splitlines()
    rows = [json.loads(line) for line in lines[:2]]
    for row, rate in zip(rows, (5.0, 10.0), strict=True):
        jobs = workloads.arrivals(rate, 1.0, 300)
        assert (row["requests"], row["failed"], row["errors"]) == (len(jobs), 0, {})
        assert row["tokens"] == sum(job.length for job in jobs)
    assert lines[4].startswith("| rate/s")


def test_search_and_streams_against_the_demo_server(
    demo_server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serving, "SEARCH_SECONDS", 1.0)
    run(monkeypatch, demo_server, "--find", "--rates", "1", "--slo-ttft-ms", "0")
    assert "no rate held" in capsys.readouterr().out
    run(monkeypatch, demo_server, "--concurrency", "64")
    said = capsys.readouterr().out
    row = json.loads(said.splitlines()[0])
    assert (row["requests"], row["tokens"], row["failed"]) == (64, 64 * 64, 0)
    assert "server: strategy continuous" in said
    assert serving.server_of(demo_server.url, "no such model") is None


def test_a_shared_prefix_is_computed_once(demo_server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefix, "REQUESTS", 4)
    monkeypatch.setattr(shared_prefix, "PREFIX", 128)
    alone, shared = shared_prefix.measure(Target.of(demo_server.url, "demo"), 300, 0, 1)
    assert (alone["computed"], alone["cached"]) == (4 * 160, 0)
    assert (shared["computed"], shared["cached"]) == (4 * 32, 4 * 128)
    assert "Prefill work: 80.0% less" in shared_prefix.report([alone, shared])

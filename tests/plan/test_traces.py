"""Traces: every format is read, what is broken is told with its line, and made-up traffic is as described."""

import io
import tracemalloc
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import fmean, pstdev

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.errors import ConfigError
from chairlift.plan.access_log import AccessLog
from chairlift.plan.trace import TraceRequest, duration, prompt_ids, repeated
from chairlift.plan.trace_files import (
    LONGEST_LINE,
    MOST_TOKENS,
    TraceLine,
    _lines,
    read_trace,
    read_trace_or_log,
    write_trace,
)
from chairlift.plan.traffic import Traffic, synthetic

MOONCAKE = """{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 48]}
{"timestamp": 30535, "input_length": 6472, "output_length": 26, "hash_ids": [46, 47, 2366], "session": "x"}
"""
AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:03.9799600,4808,10
2023-11-16 18:17:04.0319600,3180,8
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:00.517335+00:00,2399,6
"""
BURST_GPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118,GPT-4,417,276,693,API log
"""
COMMON = """127.0.0.1 - frank [29/Nov/2026:22:00:01 +0000] "POST /v1/chat/completions HTTP/1.1" 200 512
"""
# nginx writes a line when its answer ends; this one's clock is an hour ahead.
COMBINED = """::1 - - [29/Nov/2026:23:00:05 +0100] "POST /v1/chat/completions?beta=true HTTP/1.1" 200 7 "-" "\\"b\\" c"
::1 - - [29/Nov/2026:23:00:03 +0100] "POST /llm/v1/completions HTTP/2.0" 499 0 "-" "curl/8"
::1 - - [29/Nov/2026:23:00:03 +0100] "POST /v1/embeddings HTTP/2.0" 200 0 "-" "curl/8"
::1 - - [29/Nov/2026:23:00:03 +0100] "POST /login HTTP/2.0" 200 0 "-" "curl/8"
::1 - - [29/Nov/2026:23:00:03 +0100] "POST /v1/chat/completions HTTP/2.0" 401 0 "-" "curl/8"
::1 - - [29/Nov/2026:23:00:04 +0100] "GET /metrics HTTP/2.0" 200 0 "-" "curl/8"
::1 - - [29/Nov/2026:23:00:04 +0100] "\\x16\\x03\\x01" 400 157 "-" "-"
::1 - - [29/Nov/2026:23:00:04 +0100] "" 400 0 "-" "-"
"""


def written(tmp_path: Path, text: str | bytes, name: str = "trace") -> Path:
    path = tmp_path / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_mooncake(tmp_path: Path) -> None:
    first, second = read_trace(written(tmp_path, MOONCAKE))
    assert first == TraceRequest(arrival=0.0, input_length=6955, output_length=52, hash_ids=(46, 47, 48))
    assert second.arrival == pytest.approx(3.053)
    assert prompt_ids(first, 0)[:1024] == prompt_ids(second, 1)[:1024]
    assert prompt_ids(first, 0)[1024] != prompt_ids(second, 1)[1024]
    assert len(prompt_ids(first, 0)) == 6955


def test_a_prompt_is_no_larger_than_it_is_however_large_its_blocks_are() -> None:
    one = TraceRequest(arrival=0.0, input_length=5, hash_ids=(7, 8), block_size=MOST_TOKENS)
    tracemalloc.start()
    assert prompt_ids(one, 0) == [7] * 5
    assert tracemalloc.get_traced_memory()[1] < 10_000
    tracemalloc.stop()


def test_of_a_line_that_is_too_long_no_more_is_read_than_tells_so() -> None:
    file = io.StringIO("{}\n" + "x" * (3 * LONGEST_LINE))
    with pytest.raises(ConfigError, match="line 2: it has more than"):
        list(_lines(Path("trace"), file))
    assert file.tell() == 3 + LONGEST_LINE + 1


def test_azure(tmp_path: Path) -> None:
    first, second = read_trace(written(tmp_path, "\ufeff" + AZURE.replace("\n", "\r\n")))
    assert (first.arrival, first.input_length, first.output_length) == (0.0, 4808, 10)
    assert second.arrival == pytest.approx(0.052, abs=2e-6)
    later = read_trace(written(tmp_path, AZURE_2024))[1]
    assert later.arrival == pytest.approx(0.507405, abs=2e-6)


def test_burst_gpt_without_those_that_failed(tmp_path: Path) -> None:
    first, second = read_trace(written(tmp_path, BURST_GPT))
    assert (first.arrival, first.input_length, first.output_length) == (0.0, 472, 18)
    assert (second.arrival, second.input_length, second.output_length) == (113.0, 417, 276)


def read_log(tmp_path: Path, text: str) -> AccessLog:
    found = read_trace_or_log(written(tmp_path, text, "access.log"))
    assert isinstance(found, AccessLog)
    return found


def test_access_logs(tmp_path: Path) -> None:
    log = read_log(tmp_path, COMMON + COMBINED)
    moments, about = log.moments(in_one_call=False)
    assert moments[0] == 0.0
    assert moments == pytest.approx([0.0, 2.0, 4.0], abs=1.0)
    assert about == (
        "access log: 3 requests to '/v1/chat/completions' (2), '/llm/v1/completions' (1); 6 lines are left out: "
        "3 not POST, 2 to other paths, such as '/v1/embeddings', 1 refused or sent elsewhere"
    )
    moments, about = log.moments(in_one_call=True)
    assert (moments, about.partition(";")[0]) == ([0.0], "access log: 1 requests to '/v1/embeddings' (1)")


def test_an_access_log_of_an_application_of_ones_own(tmp_path: Path) -> None:
    """Where no path is known, all count but those known to be of the other kind."""
    asked, embedded = (COMMON.replace("chat/completions", name) for name in ("ask", "embed"))
    log = read_log(tmp_path, 2 * asked + embedded)
    assert len(log.moments(in_one_call=False)[0]) == 2
    assert len(log.moments(in_one_call=True)[0]) == 1
    with pytest.raises(ConfigError, match="answers in one call: 1 to other paths, such as '/v1/chat/completions'"):
        read_log(tmp_path, COMMON).moments(in_one_call=True)
    with pytest.raises(ConfigError, match="none of its lines is a POST to a language model: 1 not POST"):
        read_log(tmp_path, COMMON.replace("POST", "GET")).moments(in_one_call=False)


def test_requests_of_one_second_are_no_burst(tmp_path: Path) -> None:
    log = read_log(tmp_path, COMMON * 50)
    moments, _ = log.moments(in_one_call=False)
    assert moments == sorted(set(moments))
    assert len(moments) == 50
    assert 0.5 < moments[-1] < 1.0
    assert log.moments(in_one_call=False)[0] == moments
    assert log.moments(in_one_call=False, seed=1)[0] != moments


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("hello", "it is no line of an access log: 'hello'"),
        (COMMON.replace("29/Nov", "31/Nov"), "day is out of range"),
        (COMMON.replace("Nov", "Now"), "Now is no month"),
        (COMMON.replace("22:00:01", "25:00:01"), "hour must be in"),
        (COMMON.replace("+0000", "+9900"), "timedelta"),
        (COMMON.replace('1.1"', "1.1"), "it is no line of an access log"),
        (COMMON.replace("200", "2000"), "it is no line of an access log"),
        pytest.param(COMMON.replace("frank", "x" * LONGEST_LINE), "more than 1048576 characters", id="too long"),
        pytest.param('[29/Nov/2026:22:00:01 +0000] "\\' * 30_000, "it is no line of an access log", id="quotes"),
    ],
)
def test_a_broken_line_of_an_access_log_is_named(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"access.log, line 3: .*{said}") as found:
        read_log(tmp_path, f"{COMMON}\n{line}\n")
    assert len(str(found.value)) < 600


def test_an_access_log_is_read_only_where_lengths_are_given(tmp_path: Path) -> None:
    path = written(tmp_path, COMMON)
    with pytest.raises(ConfigError, match="an access log tells no lengths; it is for `chairlift plan` and"):
        read_trace(path)
    with pytest.raises(ConfigError, match="an access log tells no lengths"):
        synthetic(Traffic(arrivals="poisson:1", input_length=f"trace:{path}"), 10.0)
    assert len(read_log(tmp_path, COMMON * 3)) == 3
    found = read_trace_or_log(written(tmp_path, COMMON * 3), most=2)
    assert isinstance(found, AccessLog)
    assert len(found) == 2


def test_lines_out_of_order_are_put_in_order_and_the_first_so_many_read(tmp_path: Path) -> None:
    lines = "".join(f'{{"timestamp": {at}, "input_length": {at}, "output_length": 1}}\n\n' for at in (30, 10, 20, 5))
    path = written(tmp_path, lines)
    assert [request.input_length for request in read_trace(path)] == [5, 10, 20, 30]
    assert [request.arrival for request in read_trace(path, most=3)] == pytest.approx([0.0, 0.01, 0.02])


sequences = st.builds(
    TraceRequest,
    arrival=st.floats(0, 1e6),
    input_length=st.integers(1, MOST_TOKENS),
    output_length=st.integers(0, MOST_TOKENS),
    max_tokens=st.none() | st.integers(1, MOST_TOKENS),
    hash_ids=st.lists(st.integers(0, 2**63 - 1), max_size=3).map(tuple),
    block_size=st.integers(1, 512),
    model=st.text(max_size=5),
    tenant=st.text(max_size=5),
    priority=st.integers(-9, 9),
    background=st.booleans(),
    timeout=st.none() | st.floats(0, 100),
    items=st.integers(0, 9),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(sequences, min_size=1, max_size=5))
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, trace: list[TraceRequest]) -> None:
    path = tmp_path_factory.mktemp("traces") / "trace.jsonl"
    trace.sort(key=lambda request: request.arrival)
    write_trace(path, trace)
    found = read_trace(path)
    first = trace[0].arrival
    for one, other in zip(found, trace, strict=True):
        assert one.arrival == pytest.approx(other.arrival - first, abs=1e-6)
        assert msgspec.structs.replace(one, arrival=0.0) == msgspec.structs.replace(other, arrival=0.0)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "truncated"),
        ('{"timestamp": 1, "output_length": 5}', "input_length"),
        ('{"timestamp": "soon", "input_length": 5}', "timestamp"),
        ('{"timestamp": -1, "input_length": 5}', "timestamp must be at least 0"),
        ('{"timestamp": 1e400, "input_length": 5}', "out of range"),
        ('{"timestamp": 1, "input_length": 0}', "input_length must be between 1"),
        ('{"timestamp": 1, "input_length": 99999999999}', "input_length must be between 1"),
        ('{"timestamp": 1, "input_length": 5, "output_length": -1}', "output_length must be between 0"),
        ('{"timestamp": 1, "input_length": 5, "max_tokens": 0}', "max_tokens must be between 1"),
        ('{"timestamp": 1, "input_length": 5, "hash_ids": [-1]}', "hash_ids must be between 0"),
        ('{"timestamp": 1, "input_length": 5, "hash_ids": [99999999999999999999]}', "hash_ids"),
        ('{"timestamp": 1, "input_length": 5, "block_size": 0}', "block_size must be between 1"),
        ('{"timestamp": 1, "input_length": 5, "priority": 99999999999}', "priority"),
        ("[1, 2]", "object"),
        ("hello", "malformed"),
        ('{"a": ' * 2000, "recursion"),
        ("x" * (LONGEST_LINE + 1), "more than 1048576 characters"),
    ],
)
def test_a_broken_line_of_json_is_named(tmp_path: Path, line: str, said: str) -> None:
    path = written(tmp_path, f'{{"timestamp": 0, "input_length": 5}}\n\n{line}\n')
    with pytest.raises(ConfigError, match=rf"(?i)trace .*, line 3: .*{said}") as found:
        read_trace(path)
    assert len(str(found.value)) < 600


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("2023-11-16 18:17:03.97,12", "2 columns, and the header 3"),
        ("yesterday,1,1", "yesterday"),
        ("2023-11-16 18:17:03.97,many,1", "many"),
        ("2023-11-16 18:17:03.97,0,1", "input_length must be between 1"),
        ('2023-11-16,"1,1', "unexpected end"),
    ],
)
def test_a_broken_line_of_csv_is_named(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(ConfigError, match=rf"line 4: .*{said}"):
        read_trace(written(tmp_path, f"{AZURE}{line}\n"))


def test_files_that_are_no_traces_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="holds no requests"):
        read_trace(written(tmp_path, "\n\n"))
    with pytest.raises(ConfigError, match="holds no requests"):
        read_trace(written(tmp_path, AZURE.splitlines()[0]))
    with pytest.raises(ConfigError, match="UTF-8"):
        read_trace(written(tmp_path, b"\xff\xfe\x00"))
    with pytest.raises(ConfigError, match=r"line 1: neither JSON nor a header .*TIMESTAMP"):
        read_trace(written(tmp_path, "time,size\n1,2\n"))


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
def test_anything_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("traces") / "trace"
    heads = (b"", b'{"timestamp": 0, "input_length": 5}\n', AZURE.encode(), BURST_GPT.encode(), COMMON.encode())
    for head in heads:
        path.write_bytes(head + content)
        with suppress(ConfigError):
            found = read_trace_or_log(path)
            if isinstance(found, AccessLog):
                times, _ = found.moments(in_one_call=False)
            else:
                times = [request.arrival for request in found]
            assert all(later >= sooner >= 0 for sooner, later in pairwise(times))


def test_a_line_says_nothing_that_is_the_default() -> None:
    assert msgspec.json.encode(TraceLine(timestamp=1.5, input_length=3)) == b'{"timestamp":1.5,"input_length":3}'


def gaps(trace: list[TraceRequest]) -> list[float]:
    return [later.arrival - sooner.arrival for sooner, later in pairwise(trace)]


@pytest.mark.parametrize(("arrivals", "cv"), [("poisson:20", 1.0), ("gamma:20:0.3", 0.3), ("gamma:20:3", 3.0)])
def test_made_up_arrivals_have_their_rate_and_their_bursts(arrivals: str, cv: float) -> None:
    trace = synthetic(Traffic(arrivals=arrivals, input_length="constant:7", output_length="constant:3"), 500.0)
    assert len(trace) / 500 == pytest.approx(20, rel=0.1)
    assert pstdev(gaps(trace)) / fmean(gaps(trace)) == pytest.approx(cv, rel=0.1)
    assert duration(trace) < 500
    assert {(each.input_length, each.output_length) for each in trace} == {(7, 3)}


def test_rates_may_follow_the_time() -> None:
    def count(trace: list[TraceRequest], start: float, end: float) -> int:
        return sum(start <= each.arrival < end for each in trace)

    steps = synthetic(Traffic(arrivals="steps:5x100,40x50", input_length="constant:1"), 300.0)
    assert count(steps, 0, 100) == pytest.approx(500, rel=0.2)
    assert count(steps, 100, 150) == pytest.approx(2000, rel=0.1)
    assert count(steps, 250, 300) == pytest.approx(2000, rel=0.1)
    day = synthetic(Traffic(arrivals="day:20:35:1000", input_length="constant:1"), 1000.0)
    assert len(day) == pytest.approx(20_000, rel=0.05)
    assert count(day, 450, 550) == pytest.approx(3500, rel=0.1)
    assert count(day, 0, 50) + count(day, 950, 1000) == pytest.approx(500, rel=0.2)


def test_made_up_lengths(tmp_path: Path) -> None:
    def inputs(form: str) -> list[int]:
        trace = synthetic(Traffic(arrivals="poisson:100", input_length=form), 100.0)
        return sorted(each.input_length for each in trace)

    uniform = inputs("uniform:10:20")
    assert (uniform[0], uniform[-1]) == (10, 20)
    assert fmean(inputs("exponential:50")) == pytest.approx(50, rel=0.05)
    lognormal = inputs("lognormal:1020:4083")
    assert lognormal[len(lognormal) // 2] == pytest.approx(1020, rel=0.05)
    assert lognormal[int(0.95 * len(lognormal))] == pytest.approx(4083, rel=0.1)
    assert set(inputs(f"trace:{written(tmp_path, AZURE)}")) == {4808, 3180}


def test_shared_prefixes_are_shared() -> None:
    traffic = Traffic(arrivals="poisson:10", input_length="constant:50", shared_prefix=100, num_prefixes=3)
    trace = synthetic(traffic, 20.0)
    heads = {tuple(prompt_ids(each, number)[:100]) for number, each in enumerate(trace)}
    assert len(heads) == 3
    assert len({tuple(prompt_ids(each, number)) for number, each in enumerate(trace)}) == len(trace)
    assert {each.input_length for each in trace} == {150}


def test_another_rate_brings_the_same_requests() -> None:
    slow, fast = (
        synthetic(Traffic(arrivals=f"poisson:{rate}", input_length="uniform:1:99", output_length="uniform:1:9"), 50.0)
        for rate in (2, 4)
    )
    both = zip(slow, fast, strict=False)
    assert all((one.input_length, one.output_length) == (two.input_length, two.output_length) for one, two in both)
    assert synthetic(Traffic(arrivals="poisson:2", input_length="uniform:1:99"), 50.0, seed=1) != slow


@pytest.mark.parametrize(
    "arrivals",
    ["", "poisson", "poisson:0", "poisson:-1", "poisson:nan", "poisson:1e9", "gamma:1", "gamma:1:1e9", "steps:",
     "steps:5", "steps:5x", "steps:5x0", "day:1:9:100", "day:2:1:100", "tides:3"],
)  # fmt: skip
def test_arrivals_that_are_none_are_told(arrivals: str) -> None:
    with pytest.raises(ConfigError, match="poisson"):
        synthetic(Traffic(arrivals=arrivals, input_length="constant:1"), 1e5)


@pytest.mark.parametrize(
    "form",
    [
        "",
        "constant",
        "constant:x",
        "uniform:9:3",
        "lognormal:0:5",
        "lognormal:5",
        "gauss:1",
        "exponential:inf",
        "exponential:nan",
        "exponential:0",
        "lognormal:nan:5",
        "lognormal:10:inf",
        "lognormal:300:80",
        "lognormal:80:1e308",
        "exponential:1e308",
    ],
)
def test_lengths_that_are_none_are_told(form: str) -> None:
    with pytest.raises(ConfigError, match=r"length .* is not constant:N"):
        synthetic(Traffic(arrivals="poisson:1", input_length=form), 10.0)


def test_lengths_of_a_trace_are_those_of_answers(tmp_path: Path) -> None:
    """Whoever was refused has none."""
    answers = [TraceRequest(arrival=0.0, input_length=3, output_length=length) for length in (0, 200, 0, 0)]
    write_trace(tmp_path / "t.jsonl", answers)
    form = f"trace:{tmp_path / 't.jsonl'}"
    drawn = synthetic(Traffic(arrivals="poisson:10", input_length="constant:1", output_length=form), 10.0)
    assert {request.output_length for request in drawn} == {200}
    write_trace(tmp_path / "t.jsonl", answers[:1])
    with pytest.raises(ConfigError, match="has no request with such a length"):
        synthetic(Traffic(arrivals="poisson:1", input_length="constant:1", output_length=form), 10.0)


def test_a_trace_over_and_over_shares_what_most_of_it_shares() -> None:
    trace = [TraceRequest(arrival=0.5 * n, input_length=1000, hash_ids=(7, 100 + n)) for n in range(20)]
    assert repeated(trace, 5) == trace[:5]
    more = repeated(trace, 50)
    assert more[:20] == trace
    assert [each.arrival for each in more] == pytest.approx([0.5 * n for n in range(50)])
    assert {each.hash_ids[0] for each in more} == {7}
    assert len({each.hash_ids[1] for each in more}) == 50

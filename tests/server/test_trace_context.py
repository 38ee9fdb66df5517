"""`traceparent` and `tracestate` as W3C's Trace Context has them: who is whose span, and what is as if not there."""

import pytest

from chairlift.server.http.trace_context import TraceParent, trace_parent

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{SPAN}-01"


def parsed(*parents: str, states: tuple[str, ...] = ()) -> TraceParent | None:
    headers = [(b"host", b"x"), *((b"traceparent", each.encode("latin-1")) for each in parents)]
    return trace_parent([*headers, *((b"tracestate", each.encode("latin-1")) for each in states)])


def state(*states: str) -> str:
    found = parsed(GOOD, states=states)
    assert found is not None, "a wrong state does not make the parent wrong"
    return ",".join(f"{key}={value}" for key, value in found.state)


@pytest.mark.parametrize(
    ("header", "flags"),
    [
        (GOOD, 1),
        (f" {GOOD}\t", 1),
        (f"00-{TRACE}-{SPAN}-00", 0),
        (f"00-{TRACE}-{SPAN}-ff", 255),
        (f"01-{TRACE}-{SPAN}-01", 1),
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-will-be-like", 1),
    ],
)
def test_a_parent(header: str, flags: int) -> None:
    assert parsed(header) == TraceParent(int(TRACE, 16), int(SPAN, 16), flags, ())


@pytest.mark.parametrize(
    "headers",
    [
        (),
        ("",),
        (GOOD, GOOD),
        (f"ff-{TRACE}-{SPAN}-01",),
        (f"0-{TRACE}-{SPAN}-01",),
        (f"00-{TRACE.upper()}-{SPAN}-01",),
        (f"00-{TRACE[1:]}-{SPAN}-01",),
        (f"00-{TRACE}-{SPAN}0-01",),
        (f"00-{'0' * 32}-{SPAN}-01",),
        (f"00-{TRACE}-{'0' * 16}-01",),
        (f"00-{TRACE}-{SPAN}-1",),
        (f"00-{TRACE}-{SPAN}-0g",),
        (f"{GOOD}-more",),
        (f"{GOOD}.",),
        (f"cc-{TRACE}-{SPAN}-01.more",),
        (f"00-{TRACE}-{SPAN[:-1]}\N{SUPERSCRIPT TWO}-01",),
        (f"cc-{TRACE}-{SPAN}-01-{'x' * 10_000}",),
    ],
)
def test_what_is_no_parent(headers: tuple[str, ...]) -> None:
    assert parsed(*headers) is None


def test_a_state_is_passed_on_in_order() -> None:
    assert state("foo=1,bar=2") == "foo=1,bar=2"
    assert state("foo=1", " , bar=2 x\t,") == "foo=1,bar=2 x"
    assert state("1a-2f@foo=bar", "a_-*/=!") == "1a-2f@foo=bar,a_-*/=!"


@pytest.mark.parametrize(
    "header",
    [
        "foo",
        "foo=",
        "=1",
        "Foo=1",
        "1foo=1",
        "foo@=1",
        "@foo=1",
        "foo@bar@baz=1",
        "foo =1",
        "foo=1=2",
        "foo=\x01",
        "foo=\xe9",
        f"{'f' * 257}=1",
        f"foo={'1' * 257}",
        "foo=1,foo=2",
        ",".join(f"k{n}=1" for n in range(33)),
        f"foo=1{' ' * 10_000}",
    ],
)
def test_a_state_with_something_wrong_is_none(header: str) -> None:
    assert state(header) == ""
    assert state("good=1", header) == ""


def test_a_state_keeps_512_characters_and_whole_members() -> None:
    exactly = ",".join(f"k{n:02}={'v' * 59}" for n in range(8))
    assert len(exactly) == 511
    assert state(exactly) == exactly
    most = f"{exactly}v"
    assert state(most) == most
    assert state(f"{most}v") == most[: most.rindex(",")]
    long = f"long={'v' * 124}"
    assert state(f"{long},{exactly}") == exactly, "long ones go first"
    assert state(f"{long},a=1") == f"{long},a=1"

"""The rules of the Trace Event Format, as far as viewers need them: chrome://tracing and ui.perfetto.dev."""

from collections import defaultdict
from typing import Any

Event = dict[str, Any]
_NAMES = {"process_name": "name", "thread_name": "name", "thread_sort_index": "sort_index"}


def check_trace(document: Any) -> dict[str, list[Event]]:
    """Assert that a document is a trace; its events by their kind (`ph`)."""
    assert set(document) == {"displayTimeUnit", "traceEvents", "otherData"}
    assert document["displayTimeUnit"] in ("ms", "ns")
    kinds: dict[str, list[Event]] = defaultdict(list)
    for event in document["traceEvents"]:
        kinds[event["ph"]].append(event)
        assert isinstance(event["name"], str)
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ph"] == "M" or isinstance(event["ts"], int)
    assert set(kinds) <= {"M", "X", "C", "b", "e"}
    _check_names(kinds)
    _check_slices(kinds["X"])
    for event in kinds["C"]:
        assert event["args"], event
        assert all(isinstance(value, int | float) for value in event["args"].values())
    _check_waits(kinds)
    return kinds


def _check_names(kinds: dict[str, list[Event]]) -> None:
    """Every process has a name, and every track with slices."""
    for event in kinds["M"]:
        assert set(event["args"]) == {_NAMES[event["name"]]}, event
    processes = [event["pid"] for event in kinds["M"] if event["name"] == "process_name"]
    tracks = [(event["pid"], event["tid"]) for event in kinds["M"] if event["name"] == "thread_name"]
    assert len(set(processes)) == len(processes)
    assert len(set(tracks)) == len(tracks)
    assert {event["pid"] for kind in kinds.values() for event in kind} == set(processes)
    assert {(event["pid"], event["tid"]) for event in kinds["X"]} == set(tracks)


def _check_slices(slices: list[Event]) -> None:
    """Slices of a track lie beside or within each other, and in that order."""
    open_until: dict[tuple[int, int], list[int]] = defaultdict(list)
    for event in slices:
        assert isinstance(event["dur"], int)
        assert event["dur"] >= 0
        start, end = event["ts"], event["ts"] + event["dur"]
        around = open_until[event["pid"], event["tid"]]
        while around and around[-1] <= start:
            around.pop()
        assert not around or end <= around[-1], event
        around.append(end)


def _check_waits(kinds: dict[str, list[Event]]) -> None:
    """What begins ends once, later, under the same name."""
    begun = {(event["pid"], event["cat"], event["id"]): event for event in kinds["b"]}
    ended = {(event["pid"], event["cat"], event["id"]): event for event in kinds["e"]}
    assert len(begun) == len(kinds["b"])
    assert len(ended) == len(kinds["e"])
    assert begun.keys() == ended.keys()
    for key, event in begun.items():
        assert event["name"] == ended[key]["name"]
        assert event["ts"] < ended[key]["ts"]


def slices(kinds: dict[str, list[Event]], category: str) -> list[Event]:
    return [event for event in kinds["X"] if event["cat"] == category]

"""What the benchmark of tool calls counts."""

import json
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import tool_calls
from tool_calls import OWN, Asked, Counted, make_chats

RIGHT = ("get_weather", {"city": "Paris"})


def counted(choice: Any, *calls: tuple[str, str], reason: str = "tool_calls", status: int = 200) -> Counted:
    """What is counted of one answer."""
    made = [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls]
    body = {"choices": [{"finish_reason": reason, "message": {"content": None, "tool_calls": made}}]}
    found = Counted()
    tool_calls.check(Asked({"tool_choice": choice}, OWN, [RIGHT]), httpx.Response(status, json=body), found)
    return found


def test_a_right_call_and_a_valid_one() -> None:
    right = counted("auto", ("get_weather", '{"city": "Paris"}'))
    assert (right.calls, right.right, right.problems) == (1, 1, [])
    other = counted("required", ("calculate", '{"expression": "1"}'))
    assert (other.calls, other.right, other.problems) == (1, 0, [])
    assert counted("auto", reason="stop").problems == []


@pytest.mark.parametrize("call", [("get_weather", "{}"), ("get_weather", "{"), ("nothing", "{}")])
def test_a_call_that_is_not_valid(call: tuple[str, str]) -> None:
    found = counted("auto", call)
    assert (found.calls, found.right, len(found.problems)) == (1, 0, 1)


def test_what_had_to_be_a_call() -> None:
    assert len(counted("required", reason="stop").problems) == 1
    named = {"type": "function", "function": {"name": "calculate"}}
    assert len(counted(named, ("get_weather", '{"city": "Paris"}')).problems) == 1
    assert len(counted("auto", status=500).problems) == 1


def test_the_last_call_of_what_was_cut_off_may_be_incomplete() -> None:
    found = counted("required", ("get_weather", '{"city": "Paris"}'), ("get_weather", '{"ci'), reason="length")
    assert (found.calls, found.cut_off, found.problems) == (1, 1, [])


@pytest.mark.parametrize("choice", ["auto", "required", "named"])
def test_chats_are_the_same_each_time_and_say_what_is_right(choice: str) -> None:
    chats = make_chats("its own", choice, 0, 20)
    assert chats == make_chats("its own", choice, 0, 20)
    for chat in chats:
        assert chat.right
        named = chat.body["tool_choice"]
        if choice == "named":
            assert {name for name, _ in chat.right} == {named["function"]["name"]}
        assert json.dumps(chat.body)

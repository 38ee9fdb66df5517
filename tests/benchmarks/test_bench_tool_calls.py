"""What the benchmark of tool calls counts."""

import sys
from pathlib import Path
from typing import Any

import httpx
import jsonschema
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
    assert len(counted("auto", status=500).problems) == 1


def test_the_last_call_of_what_was_cut_off_may_be_incomplete() -> None:
    found = counted("required", ("get_weather", '{"city": "Paris"}'), ("get_weather", '{"ci'), reason="length")
    assert (found.calls, found.cut_off, found.problems) == (1, 1, [])


def test_chats_are_the_same_each_time_and_say_what_is_right() -> None:
    chats = make_chats("its own", "auto", 0.5, 20)
    assert chats == make_chats("its own", "auto", 0.5, 20)
    for chat in chats:
        assert chat.right
        for name, given in chat.right:
            jsonschema.validate(given, chat.schemas[name])
        assert (chat.body["tool_choice"], chat.body["temperature"]) == ("auto", 0.5)


def test_chats_with_tools_that_nobody_knows_take_one_call_of_those_declared() -> None:
    chats = make_chats("others", "required", 0, 50)
    assert {name for chat in chats for name in chat.schemas} == set(tool_calls.OTHERS)
    for chat in chats:
        assert [each["function"]["name"] for each in chat.body["tools"]] == list(chat.schemas)
        assert (chat.body["parallel_tool_calls"], chat.right) == (False, None)


def test_every_row_is_measured_at_both_temperatures_and_shown() -> None:
    assert sorted(tool_calls.RUNS) == sorted((model, each) for model in tool_calls.ROWS for each in (0.0, 1.0))
    run = {"model": "demo", "temperature": 0.0, "tools": "its own", "choice": "auto", "chats": 3, "calls": 4}
    results = {"runs": [run | {"not_valid": 0, "cut_off": 1, "right": 2 / 3, "problems": []}]}
    last = tool_calls.markdown(results).splitlines()[-1]
    assert [cell.strip() for cell in last.split("|")[1:-1]] == [
        "demo", "0", "its own", "auto", "3", "4", "0", "1", "66.7%",
    ]  # fmt: skip

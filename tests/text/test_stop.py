"""Stop strings against a naive oracle, over random chunks."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.text.stop import StopAutomaton, StopStrings


def watch(stops: list[str], include: bool = False) -> StopStrings:
    return StopStrings(StopAutomaton(stops), include)


def oracle(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Letter by letter: the first moment at which the text ends with a stop string, the longest of those."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            stop = max(ending, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


few_letters = st.text("ab😀", min_size=1, max_size=5)


@settings(max_examples=500, deadline=None)
@given(
    chunks=st.lists(st.text("ab😀c", max_size=6), max_size=12),
    stops=st.lists(few_letters, min_size=1, max_size=5),
    include=st.booleans(),
)
def test_equals_the_oracle_and_never_shows_part_of_a_stop(chunks: list[str], stops: list[str], include: bool) -> None:
    text, stop = oracle("".join(chunks), stops, include)
    watcher = watch(stops, include)
    shown = ""
    for chunk in chunks:
        shown += watcher.push(chunk)
        assert text.startswith(shown)
    shown += watcher.finish()
    assert (shown, watcher.matched) == (text, stop)
    assert watcher.push("more") == ("" if stop else "more") or not stop


@settings(max_examples=200, deadline=None)
@given(chunks=st.lists(st.text("abc", max_size=6), max_size=12), stops=st.lists(few_letters, min_size=1, max_size=4))
def test_holds_back_no_more_than_it_must(chunks: list[str], stops: list[str]) -> None:
    watcher = watch(stops)
    shown = seen = ""
    for chunk in chunks:
        shown += watcher.push(chunk)
        seen += chunk
        if watcher.matched:
            return
        tails = [seen[-n:] for n in range(1, len(seen) + 1)]
        must_hold = max((len(t) for t in tails if any(s.startswith(t) for s in stops)), default=0)
        assert len(seen) - len(shown) == must_hold


def test_a_stop_string_across_chunks() -> None:
    watcher = watch(["\n\nUser:"])
    assert [watcher.push(c) for c in ["Hi.\n", "\nUs", "e me\n\n", "User", ": no"]] == ["Hi.", "", "\n\nUse me", "", ""]
    assert watcher.matched == "\n\nUser:"
    assert watcher.finish() == ""


def test_the_first_complete_match_wins() -> None:
    watcher = watch(["abcd", "c"])
    assert watcher.push("xabcd") == "xab"
    assert watcher.matched == "c"


def test_an_unfinished_stop_string_is_shown_at_the_end() -> None:
    watcher = watch(["END"])
    assert watcher.push("the EN") == "the "
    assert watcher.finish() == "EN"


def test_long_near_misses_cost_linear_time() -> None:
    class Counted(list[int]):
        reads = 0

        def __getitem__(self, state: Any) -> Any:
            self.reads += 1
            return super().__getitem__(state)

    automaton = StopAutomaton(["a" * 2000 + "b"])
    # Each letter leads one state down, and so at most one of these back up.
    automaton._fail = shorter = Counted(automaton._fail)
    watcher = StopStrings(automaton)
    for letter in "a" * 6000 + "c":
        watcher.push(letter)
    assert 4000 < shorter.reads <= 6001


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopAutomaton([""])


def test_streams_share_an_automaton_and_no_state() -> None:
    automaton = StopAutomaton(["END"])
    one, other = StopStrings(automaton), StopStrings(automaton)
    assert (one.push("a EN"), other.push("b E")) == ("a ", "b ")
    assert (one.push("D"), other.push("D")) == ("", "ED")
    assert (one.matched, other.matched) == ("END", None)

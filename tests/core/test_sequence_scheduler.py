"""What the scheduler does, by example. `World` checks every promise at each call besides what a test looks at."""

import random
from collections.abc import Iterable
from statistics import mean
from typing import Any

import pytest
from support.sequences_world import Setup, World, make_request

from chairlift.core.decision import Decision, Reason
from chairlift.core.finished import Finished, FinishReason
from chairlift.core.sequences import sequence
from chairlift.core.sequences.request import Request
from chairlift.core.sequences.sampling_params import SamplingParams
from chairlift.core.sequences.sequence import block_hash
from chairlift.core.sequences.step import Step, StepResult
from chairlift.core.sequences.strategy import make_strategy

PREFIX = [11, 12, 13, 14, 21, 22, 23, 24]  # two blocks of 4


def world(*requests: Request, **setup: Any) -> World:
    """A checked scheduler with 4 slots, 64 blocks of 4 tokens and 64 tokens a step, unless told otherwise."""
    made = World(Setup(**setup))
    for request in requests:
        assert made.add(request)
    return made


def go(w: World, token: int = 0, errors: dict[str, str] | None = None, seconds: float = 0.0) -> Step | None:
    """Run one step that samples the same token for everyone due; None if nothing can run."""
    step = w.schedule()
    if step is not None:
        w.now += seconds
        w.update({name: [token] for name in step.num_tokens}, errors or {})
    return step


def until(w: World, reason: Reason) -> Step:
    """Run steps up to the first with a decision for this reason."""
    for _ in range(50):
        step = go(w)
        if step is not None and any(decision.reason is reason for decision in step.decisions):
            return step
    raise AssertionError(f"nothing was {reason} in 50 steps")


def why(w: World, name: str) -> Reason:
    decision = w.scheduler.explain(name)
    assert decision is not None
    return decision.reason


# One rule: each step gives tokens until what is computed meets what there is


def test_a_request_from_its_prompt_to_its_end() -> None:
    w = world(make_request("a", 5, max_tokens=3))
    assert [go(w).num_tokens for _ in range(3)] == [{"a": 5}, {"a": 1}, {"a": 1}]
    assert w.answers[-1] == [Finished("a", FinishReason.LENGTH)]
    assert w.scheduler.pool.num_used == 0


def test_a_stop_token_ends_a_request_but_not_before_min_tokens() -> None:
    w = world(make_request("a", 3, stop_ids=frozenset({7}), params=SamplingParams(max_tokens=None, min_tokens=2)))
    go(w, token=7)
    assert w.records
    go(w, token=7)
    assert w.answers[-1] == [Finished("a", FinishReason.STOP, 7)]


def test_a_long_prompt_is_computed_in_chunks_while_others_decode() -> None:
    w = world(make_request("a", 4), make_request("b", 4), max_num_batched_tokens=10)
    go(w)
    w.add(make_request("long", 20))
    assert go(w).num_tokens == {"a": 1, "b": 1, "long": 8}
    assert go(w).num_tokens == {"a": 1, "b": 1, "long": 8}
    assert go(w).num_tokens == {"a": 1, "b": 1, "long": 4}
    assert go(w).num_tokens == {"a": 1, "b": 1, "long": 1}


def test_an_urgent_long_prompt_leaves_one_token_for_each_decode() -> None:
    w = world(make_request("a", 4), make_request("b", 4), max_num_batched_tokens=10)
    go(w)
    w.add(make_request("long", 20, priority=-1))
    assert go(w).num_tokens == {"a": 1, "b": 1, "long": 8}
    assert go(w).num_tokens == {"long": 8, "a": 1, "b": 1}


def test_blocks_come_as_they_are_needed_and_the_runner_hears_of_each() -> None:
    w = world(make_request("a", 7))
    first = go(w)
    assert len(first.started[0].block_table) == 2
    assert go(w).new_blocks == {}
    assert len(go(w).new_blocks["a"]) == 1


# Prefix cache


def test_a_later_request_finds_the_prefix_in_the_cache() -> None:
    w = world(make_request("a", [*PREFIX, 1]))
    go(w)
    w.add(make_request("b", [*PREFIX, 2, 3]))
    step = go(w)
    assert step.num_tokens == {"a": 1, "b": 2}
    assert step.started[0].num_computed_tokens == 8
    assert (w.scheduler.prefixes.hit_tokens, w.scheduler.prefixes.queried_tokens) == (8, 19)


def test_requests_of_one_step_share_what_the_first_of_them_computes() -> None:
    w = world(make_request("a", [*PREFIX, 1]), make_request("b", [*PREFIX, 2]))
    step = go(w)
    assert step.num_tokens == {"a": 9, "b": 1}
    assert step.started[0].block_table[:2] == step.started[1].block_table[:2]


def test_prompts_are_hashed_when_they_are_next_and_samples_of_one_together(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[list[int]] = []

    def note(parent: bytes, token_ids: Iterable[int]) -> bytes:
        hashed.append([*token_ids])
        return block_hash(parent, hashed[-1])

    monkeypatch.setattr(sequence, "block_hash", note)
    fields: list[dict[str, Any]] = [{}, {}, {}, {"cache_salt": "bob"}]
    w = world(*(make_request(f"a-{i}", [*PREFIX, 1], **more) for i, more in enumerate(fields)), num_blocks=200)
    w.add(make_request("waits", 64))
    assert hashed == [], "nobody has looked for any yet"
    step = go(w)
    assert step.num_tokens == {"a-0": 9, "a-1": 1, "a-2": 1, "a-3": 9}
    assert hashed == [PREFIX[:4], PREFIX[4:]] * 2, "once for each salt"


def test_a_prompt_that_is_cached_whole_still_computes_a_token() -> None:
    w = world(make_request("a", PREFIX))
    go(w)
    w.add(make_request("b", PREFIX))
    step = go(w)
    assert step.started[0].num_computed_tokens == 4
    assert step.num_tokens["b"] == 4


def test_generated_text_is_cached_too_so_a_next_turn_is_cheap() -> None:
    w = world(make_request("a", PREFIX[:6], max_tokens=6))
    while w.records:
        go(w, token=5)
    w.add(make_request("b", [*PREFIX[:6], 5, 5, 5, 5, 5, 5, 9]))
    # The last token that was generated never went through the model, so 11 of 12 are cached: two blocks.
    assert go(w).started[0].num_computed_tokens == 8


@pytest.mark.parametrize(
    "fields",
    [
        {"cache_salt": "other tenant"},
        {"use_prefix_cache": False},
        {"params": SamplingParams(max_tokens=None, prompt_logprobs=0)},
    ],
)
def test_who_shares_nothing(fields: dict[str, Any]) -> None:
    w = world(make_request("a", [*PREFIX, 1]))
    go(w)
    w.add(make_request("b", [*PREFIX, 1], **fields))
    assert go(w).started[0].num_computed_tokens == 0


def test_what_a_failed_request_should_have_written_is_not_found() -> None:
    w = world(make_request("a", [*PREFIX, 1]))
    go(w, errors={"a": "not a number"})
    assert w.answers[-1] == [Finished("a", FinishReason.ERROR, "not a number")]
    w.add(make_request("b", [*PREFIX, 1]))
    assert go(w).started[0].num_computed_tokens == 0


def test_who_shares_with_a_request_that_fails_in_the_same_step_starts_anew() -> None:
    w = world(make_request("a", [*PREFIX, 1]), make_request("b", [*PREFIX, 2]), make_request("c", 5))
    first = go(w, errors={"a": "not a number"})
    assert first.num_tokens == {"a": 9, "b": 1, "c": 5}
    again = go(w)
    assert again.released == ["a", "b"]
    assert again.num_tokens == {"c": 1, "b": 9}
    assert again.started[0].token_ids == [*PREFIX, 2]


def test_a_request_aborted_while_its_step_fails_leaves_nothing_to_find() -> None:
    w = world(make_request("a", [*PREFIX, 1]), make_request("b", 5))
    w.schedule()
    w.update({}, {"a": "the step failed", "b": "the step failed"}, aborts=["a"])
    w.add(make_request("c", [*PREFIX, 1]))
    assert go(w).started[0].num_computed_tokens == 0


def test_what_was_built_on_a_failed_block_is_not_found_either() -> None:
    w = world(make_request("a", [*PREFIX, 1]), make_request("b", [*PREFIX, 1, 2, 3, 4, 5]))
    assert go(w, errors={"a": "not a number"}).num_tokens == {"a": 9, "b": 5}
    assert go(w).num_tokens == {"b": 13}
    w.add(make_request("c", [*PREFIX, 1, 2, 3, 4, 6]))
    # Whether the third block is found or not, `World` knows what lies in it.
    assert go(w).started[0].num_computed_tokens in (8, 12)


def test_who_built_on_a_failed_block_and_was_aborted_leaves_nothing_to_find() -> None:
    w = world(make_request("a", [*PREFIX, 1]), make_request("b", [*PREFIX, 1, 2, 3, 4, 5]))
    w.schedule()
    w.update({"b": [0]}, {"a": "not a number"}, aborts=["b"])
    for name in ("c", "d"):
        w.add(make_request(name, [*PREFIX, 1, 2, 3, 4, 5]))
        go(w)
    assert w.scheduler.prefixes.hit_tokens > 0


def test_what_was_computed_well_before_a_failure_stays_in_the_cache() -> None:
    w = world(make_request("a", [*PREFIX, 1]))
    go(w)
    go(w, errors={"a": "not a number"})
    w.add(make_request("b", [*PREFIX, 1]))
    assert go(w).started[0].num_computed_tokens == 8


# Preemption


def test_the_least_urgent_is_preempted_and_resumes_where_it_was() -> None:
    w = world(make_request("a", 4, 12), make_request("b", 4, 12), num_blocks=4)
    step = until(w, Reason.PREEMPTED)
    assert step.num_tokens == {"a": 1}
    assert step.released == ["b"]
    assert why(w, "b") is Reason.BLOCKS
    made = w.records["b"].tokens[4:]
    assert made
    step = until(w, Reason.RESUMED)
    assert step.started[0].token_ids[4:] == made
    # Its own first blocks may have survived in the cache; the rest is computed anew.
    assert step.num_tokens["b"] == 4 + len(made) - step.started[0].num_computed_tokens


def test_a_preemption_names_the_head_of_the_queue_as_the_one_that_waits() -> None:
    w = world(make_request("a", 4, 12), make_request("b", 4, 12, priority=5), num_blocks=4)
    go(w)
    w.add(make_request("urgent", 8, priority=1))
    step = until(w, Reason.PREEMPTED)
    assert step.decisions[-1].request_id == "urgent"
    assert step.decisions[-1].count == 2


# Reason a request waits


def test_waiting_for_a_slot() -> None:
    w = world(*(make_request(name, 3) for name in "abc"), slots=2)
    go(w)
    assert w.scheduler.explain("c") == Decision(Reason.SLOTS, "c", "every slot was given in this step", 1)
    go(w)
    assert w.scheduler.explain("c") == Decision(Reason.SLOTS, "c", "all 2 slots are taken", 1)


def test_waiting_for_tokens() -> None:
    w = world(make_request("a", 10), make_request("b", 3), max_num_batched_tokens=8)
    go(w)
    assert w.scheduler.explain("b") == Decision(Reason.TOKENS, "b", "the step's 8 tokens are given out", 1)


def test_waiting_for_blocks_speaks_for_all_who_wait() -> None:
    w = world(make_request("a", 8), make_request("b", 8), make_request("c", 2), num_blocks=4)
    go(w)
    decision = w.scheduler.explain("b")
    assert decision == Decision(Reason.BLOCKS, "b", "needs 2 blocks; of 2 free, 1 are kept for those running", 2)
    # Strictly in order: c would fit, but b came first.
    assert w.scheduler.explain("c") == Decision(Reason.BLOCKS, "c", f"waits behind b: {decision.detail}")


def test_waiting_for_the_window() -> None:
    w = world(make_request("a", 3), strategy="dynamic", max_wait=2.0)
    assert go(w) is None
    assert w.scheduler.explain("a") == Decision(Reason.WINDOW, "a", "1 of 4 requests have come in a window of 2 s", 1)
    assert w.scheduler.ask_again == 2.0


def test_waiting_for_the_batch() -> None:
    w = world(make_request("a", 3), strategy="static")
    go(w)
    assert w.scheduler.explain("a") == Decision(Reason.BATCH, "a", "1 of 4 requests have come", 1)
    assert w.scheduler.ask_again is None


def test_explain_one_who_runs_one_who_just_came_and_a_stranger() -> None:
    w = world(make_request("a", 3))
    assert why(w, "a") is Reason.TOKENS
    w.now = 1.5
    go(w)
    assert w.scheduler.explain("a") == Decision(Reason.ADMITTED, "a", "runs since 1.500 s")
    assert w.scheduler.explain("nobody") is None


def test_explain_never_names_someone_who_left() -> None:
    w = world(*(make_request(name, 3) for name in "abc"), slots=1)
    go(w)
    w.abort("b")
    assert "b" not in w.scheduler.explain("c").detail.split()


def test_an_admission_says_what_it_gave() -> None:
    w = world(make_request("a", [*PREFIX, 1]), make_request("b", [*PREFIX, 2]))
    details = [d.detail for d in go(w).decisions]
    assert details == ["9 of 9 tokens, 0 found in the prefix cache", "1 of 9 tokens, 8 found in the prefix cache"]


# Strategies


def test_none_runs_one_at_a_time() -> None:
    w = world(make_request("a", 3, 2), make_request("b", 3, 1), strategy="none")
    assert [go(w).num_tokens for _ in range(3)] == [{"a": 3}, {"a": 1}, {"b": 3}]
    assert go(w) is None


def test_continuous_admits_whenever_a_slot_is_free() -> None:
    w = world(make_request("a", 3, 1), make_request("b", 3, 3), make_request("c", 3, 1), slots=2)
    assert [go(w).num_tokens for _ in range(3)] == [{"a": 3, "b": 3}, {"b": 1, "c": 3}, {"b": 1}]


def test_static_leaves_full_or_when_the_queue_closes() -> None:
    w = world(*(make_request(name, 3, 1) for name in "abc"), strategy="static", slots=2)
    assert go(w).num_tokens == {"a": 3, "b": 3}
    assert go(w) is None
    w.close()
    assert go(w).num_tokens == {"c": 3}


def test_a_closed_batch_runs_to_its_end_even_with_empty_slots() -> None:
    w = world(make_request("a", 3, 1), make_request("b", 3, 3), strategy="static", slots=2)
    go(w)
    w.add(make_request("c", 3, 1))
    w.add(make_request("d", 3, 1))
    assert [go(w).num_tokens for _ in range(3)] == [{"b": 1}, {"b": 1}, {"c": 3, "d": 3}]


def test_a_closed_batch_that_lacks_tokens_or_blocks_starts_its_own_members_first() -> None:
    w = world(*(make_request(name, 6, 2) for name in "abc"), strategy="static", slots=3, max_num_batched_tokens=8)
    w.add(make_request("urgent", 3, priority=-1))
    # Bound by urgency when the batch is empty: the newcomer is in it, c is not.
    assert go(w).num_tokens == {"urgent": 3, "a": 5}
    w.add(make_request("later", 3, priority=-2))
    assert go(w).num_tokens == {"urgent": 1, "a": 1, "b": 6}


def test_dynamic_counts_its_window_from_the_oldest_arrival() -> None:
    w = world(make_request("a", 3, 1, arrival=1.0, priority=5), strategy="dynamic", max_wait=2.0)
    w.now = 1.5
    w.add(make_request("b", 3, 1, arrival=1.5))
    assert go(w) is None
    assert w.scheduler.ask_again == 3.0
    w.now = 3.0
    assert go(w).num_tokens == {"b": 3, "a": 3}


def test_dynamic_leaves_at_once_when_it_is_full() -> None:
    w = world(make_request("a", 3), make_request("b", 3), strategy="dynamic", slots=2, max_wait=60.0)
    assert go(w).num_tokens == {"a": 3, "b": 3}


def test_dynamic_is_late_bound() -> None:
    """A window that passes while a batch runs seals nothing: whoever has come by its end is in the next."""
    w = world(make_request("a", 3, 1), strategy="dynamic", slots=3, max_wait=1.0)
    w.now = 1.0
    w.schedule()
    w.add(make_request("b", 3, 1, arrival=1.1))
    w.now = 9.0
    w.add(make_request("c", 3, 1, arrival=8.9))
    w.add(make_request("d", 3, 1, arrival=9.0, priority=-1))
    w.update({"a": [0]}, {})
    assert go(w).num_tokens == {"d": 3, "b": 3, "c": 3}


def test_a_level_of_priority_is_worth_so_much_waiting() -> None:
    w = world(slots=1, priority_ageing=1.5)
    w.add(make_request("late", 2, 1, arrival=2.0))
    w.add(make_request("early", 2, 1, arrival=1.0))
    w.add(make_request("urgent", 2, 1, arrival=3.0, priority=-1))
    w.add(make_request("twin", 2, 1, arrival=1.0))
    w.add(make_request("dire", 2, 1, arrival=3.0, priority=-2))
    order = [next(iter(go(w).num_tokens)) for _ in range(5)]
    assert order == ["dire", "early", "twin", "urgent", "late"]


def rounds_until_served(background: bool, **setup: Any) -> int:
    """Steps of a second until a large request of low priority starts, while each brings a small urgent one."""
    w = world(slots=1, **setup)
    w.add(make_request("slow", 20, 1, priority=2, background=background))
    for number in range(40):
        w.add(make_request(f"r{number}", 2, 1, arrival=w.now, background=background))
        step = go(w, seconds=1.0)
        assert step is not None
        if "slow" in step.num_tokens:
            return number
    raise AssertionError("it starves")


@pytest.mark.parametrize("background", [False, True])
def test_nobody_starves(background: bool) -> None:
    assert rounds_until_served(background, priority_ageing=4.0) == 8
    assert rounds_until_served(background, priority_ageing=0.0) == 0
    # 21 tokens against 3, at half a second each, besides two levels of priority.
    assert rounds_until_served(background, priority_ageing=4.0, size_ageing=0.5) == 17


def test_the_shortest_is_first_and_what_is_preempted_is_the_longest() -> None:
    w = world(size_ageing=1.0, num_blocks=6, slots=2)
    w.add(make_request("long", 4, 17))
    w.add(make_request("middle", 4, 12))
    w.add(make_request("short", 4, 3))
    assert list(go(w).num_tokens) == ["short", "middle"]
    step = until(w, Reason.PREEMPTED)
    assert step.released[-1] == "long"


# Leaving early, and never getting in


def test_abort_frees_slot_and_blocks_at_once() -> None:
    w = world(make_request("a", 9), make_request("b", 3), slots=1)
    go(w)
    w.abort("a")
    assert w.scheduler.pool.num_used == 0
    step = go(w)
    assert step.released == ["a"]
    assert step.num_tokens == {"b": 3}
    w.abort("a")  # again, and of one who is not here: says False


def test_an_id_may_come_back_while_the_step_of_its_first_life_still_runs() -> None:
    w = world(make_request("a", 3))
    w.schedule()
    w.abort("a")
    w.add(make_request("a", 5))
    assert w.update({"a": [1]}, {}) == []
    step = go(w)
    assert step.released == ["a"]
    assert step.num_tokens == {"a": 5}


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (make_request("a", []), "at least 1 token"),
        (make_request("a", 3, 0), "at least 1 token"),
        (make_request("a", 100, 29), "maximum context length is 128"),
        (make_request("a", 30, 12), "40 tokens"),
    ],
)
def test_what_can_never_be_served_is_refused(request_: Request, says: str) -> None:
    w = World(Setup(num_blocks=10))
    assert not w.add(request_)
    assert says in w.answers[-1]


def test_what_just_fits_is_served_alone() -> None:
    # 41 tokens in 40 slots: the last token is never fed back.
    w = world(make_request("a", 30, 11), num_blocks=10)
    while w.records:
        go(w)
    assert w.answers[-1] == [Finished("a", FinishReason.LENGTH)]


def test_an_id_in_use_is_refused() -> None:
    w = world(make_request("a", 3))
    assert not w.add(make_request("a", 3))
    assert "already in use" in w.answers[-1]


def test_a_runner_that_gives_no_token_where_one_was_due() -> None:
    scheduler = Setup().scheduler()
    scheduler.add(make_request("a", 3))
    [end] = scheduler.update(scheduler.schedule(0.0), StepResult({}), 0.0)
    assert end.reason is FinishReason.ERROR
    assert "no token" in end.detail


def test_tokens_that_follow_from_a_grammar_are_computed_in_one_step() -> None:
    w = world(make_request("a", 3, 20), make_request("b", 3, 20))
    go(w)
    w.schedule()
    assert w.update({"a": [1, 2, 3, 4, 5], "b": [1]}, {}) == []
    assert go(w).num_tokens == {"a": 5, "b": 1}
    assert go(w).num_tokens == {"a": 1, "b": 1}


def test_what_lies_behind_an_end_is_dropped() -> None:
    scheduler = Setup().scheduler()
    scheduler.add(make_request("length", 3, 2))
    scheduler.add(make_request("stop", 3, 9, stop_ids=frozenset({7})))
    result = StepResult({"length": [1, 2, 3, 4], "stop": [5, 7, 5]})
    ends = scheduler.update(scheduler.schedule(0.0), result, 0.0)
    assert ends == [Finished("length", FinishReason.LENGTH), Finished("stop", FinishReason.STOP, 7)]
    assert result.tokens == {"length": [1, 2], "stop": [5, 7]}


def test_a_grammar_may_end_a_sequence_with_a_token_or_without() -> None:
    w = world(make_request("a", 3, 9), make_request("b", 3, 9), make_request("c", 3, 9))
    w.schedule()
    ends = w.update({"a": [1], "c": [1]}, {}, ended={"a", "b"})
    assert ends == [Finished("a", FinishReason.STOP), Finished("b", FinishReason.STOP)]
    assert go(w).num_tokens == {"c": 1}


def test_who_is_late_computes_its_last_token_again() -> None:
    w = world(make_request("a", 6, 9), make_request("b", 3, 9))
    w.schedule()
    w.update({"b": [1]}, {}, late={"a"})
    assert w.schedule().num_tokens == {"a": 1, "b": 1}
    w.update({"a": [1], "b": [1]}, {})
    assert w.scheduler.explain("a").reason is Reason.ADMITTED


def test_who_is_late_again_is_left_out_until_it_is_ready() -> None:
    """It costs the others a row each time that it is not."""
    w = world(make_request("b", 3, 200), make_request("a", 6, 20), max_model_len=256)

    def steps_with_a(count: int, ready: set[str] = frozenset()) -> list[int]:
        found = []
        for number in range(count):
            found += [number] if "a" in w.schedule().num_tokens else []
            w.update({"b": [1]}, {}, late={"a"}, ready=ready if number == count - 1 else set())
        return found

    # Nobody says that it is ready: it is tried again all the same.
    assert steps_with_a(140) == [0, 1, 65, 129]
    assert steps_with_a(10, ready={"a", "somebody else"}) == []
    assert w.schedule().num_tokens == {"a": 1, "b": 1}
    # Once it was in time, all begins anew; and the most urgent is never left out.
    w.update({"a": [1], "b": [1]}, {})
    assert steps_with_a(20) == [0, 1]
    w.abort("b")
    for _ in range(5):
        assert w.schedule().num_tokens == {"a": 1}
        w.update({}, {}, late={"a"})


def test_what_is_asked_for_may_be_at_fault() -> None:
    scheduler = Setup().scheduler()
    scheduler.add(make_request("a", 3))
    result = StepResult({}, errors={"a": "its grammar"}, invalid={"a"})
    assert scheduler.update(scheduler.schedule(0.0), result, 0.0) == [
        Finished("a", FinishReason.INVALID, "its grammar")
    ]


def test_forced_tokens_of_live_requests_leave_the_background_its_turn() -> None:
    w = world(make_request("live", 3, 30), make_request("behind", 3, 30, background=True))
    go(w)
    go(w)
    w.schedule()
    w.update({"live": [1, 2, 3], "behind": [1]}, {})
    assert w.schedule().num_tokens == {"live": 3, "behind": 1}


def test_an_unknown_strategy_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="none, static, dynamic, continuous"):
        make_strategy("gondola", 1, 1.0)


# What it costs


@pytest.mark.parametrize("block_size", [1, 4, 16, 32])
def test_memory_wasted_is_half_a_block_a_sequence(block_size: int) -> None:
    rng = random.Random(block_size)
    w = world(slots=16, block_size=block_size, num_blocks=4096 // block_size, max_model_len=256)
    wasted = []
    for number in range(400):
        if number % 3 == 0:
            w.add(make_request(f"r{number}", rng.randrange(1, 120), rng.randrange(1, 120), arrival=float(number)))
        step = w.schedule()
        for s in w.scheduler.running:
            slots = len(s.block_table) * block_size
            wasted.append(slots - s.num_computed_tokens - step.num_tokens[s.id])
        w.update(w.sample(rng), {})
    assert len(wasted) > 3000
    assert mean(wasted) <= (block_size - 1) / 2 + 0.5


def conversations(rng: random.Random) -> list[list[list[int]]]:
    """Prompts as a tree: two system prompts, users under each, turns under each user; one list for each user."""
    found = []
    for _ in range(2):
        system = [rng.randrange(1000) for _ in range(rng.randrange(20, 40))]
        for _ in range(6):
            text, turns = list(system), []
            for _ in range(4):
                text = text + [rng.randrange(1000) for _ in range(rng.randrange(3, 15))]
                turns.append(text)
            found.append(turns)
    return found


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("together", [1, 6, 48])
def test_prefix_hits_are_all_that_there_could_be(block_size: int, together: int) -> None:
    """Hits equal the longest run of full blocks that anything computed before, or earlier in the same step."""
    rng = random.Random(block_size)
    users = conversations(rng)
    waiting = [prompt for turn in zip(*users, strict=True) for prompt in rng.sample(turn, len(turn))]
    w = world(block_size=block_size, num_blocks=10_000, max_num_batched_tokens=200, slots=together)
    computed: set[tuple[int, ...]] = set()
    hits = 0
    for number, prompt in enumerate(waiting):
        w.add(make_request(f"r{number}", prompt, rng.randrange(1, 9), arrival=float(number)))
        while len(w.records) == together or (w.records and number == len(waiting) - 1):
            step = w.schedule()
            starts = {start.request.id: start for start in step.started}
            for name, count in step.num_tokens.items():
                tokens = w.records[name].tokens
                done = w.runner.computed[name]
                if name in starts:
                    most = (len(tokens) - 1) // block_size
                    known = [n for n in range(1, most + 1) if tuple(tokens[: n * block_size]) in computed]
                    assert done == (max(known) * block_size if known else 0)
                    hits += done
                full = range(block_size, done + count + 1, block_size)
                computed.update(tuple(tokens[:end]) for end in full)
            w.update(w.sample(rng), {})
    assert w.scheduler.prefixes.hit_tokens == hits
    assert hits > sum(map(len, waiting)) * (0.5 if together == 1 else 0.3)

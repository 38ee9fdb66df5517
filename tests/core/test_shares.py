"""Taking turns: time in proportion to the weights, nothing saved up, nobody starved."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chairlift.core.shares import Shares


def run(shares, wants, seconds, turn, now=0.0):
    """Take turns for some seconds; those in `wants` always ask again. Returns the time each had, and the turns."""
    had, order, end = dict.fromkeys(wants, 0.0), [], now + seconds
    for name in wants:
        shares.ask(name, now)
    while now < end:
        name = shares.grant(now)
        order.append(name)
        took = turn(name)
        now += took
        had[name] += took
        shares.release(name, now)
        shares.ask(name, now)
    return had, order


def test_time_follows_the_weights_whatever_a_turn_takes():
    shares = Shares({"llm": 2, "embedder": 1, "function": 1})
    cost = {"llm": 0.03, "embedder": 0.011, "function": 0.001}
    had, _ = run(shares, cost, 100, cost.get)
    assert had["llm"] == pytest.approx(50, abs=0.1)
    assert had["embedder"] == pytest.approx(25, abs=0.1)
    assert had["function"] == pytest.approx(25, abs=0.1)


def test_alone_it_gets_every_turn():
    shares = Shares({"a": 1, "b": 5})
    _, order = run(shares, ["a"], 1, lambda _: 0.1)
    assert set(order) == {"a"}


def test_who_held_the_machine_alone_owes_nothing_for_it():
    shares = Shares({"a": 1, "b": 1})
    shares.ask("a", 0)
    assert shares.grant(0) == "a"
    shares.ask("b", 100)
    shares.release("a", 100.01)
    shares.ask("a", 100.01)
    had, _ = run(shares, ["a", "b"], 10, lambda _: 0.01, now=100.01)
    assert had["a"] == pytest.approx(had["b"], abs=0.03)


def test_a_pause_saves_nothing_up():
    shares = Shares({"a": 1, "b": 1})
    run(shares, ["a"], 50, lambda _: 0.01)
    shares.ask("b", 50)
    had, _ = run(shares, ["a", "b"], 10, lambda _: 0.01, now=50)
    assert had["b"] == pytest.approx(5, abs=0.05)


def test_equal_claims_go_in_the_order_of_asking():
    shares = Shares({"a": 1, "b": 1, "c": 1})
    for name in ("c", "a", "b"):
        shares.ask(name, 0)
    order = []
    for now in range(3):
        order.append(shares.grant(now))
        shares.release(order[-1], now + 1)
    assert order == ["c", "a", "b"]


def test_one_turn_at_a_time():
    shares = Shares({"a": 1, "b": 1})
    shares.ask("a", 0)
    shares.ask("b", 0)
    assert shares.grant(0) == "a"
    assert shares.contended
    assert shares.grant(0) is None
    with pytest.raises(ValueError, match="b does not have the turn"):
        shares.release("b", 1)


def test_only_what_was_used_is_charged():
    shares = Shares({"a": 1, "b": 1})
    had = {"a": 0.0, "b": 0.0}
    now = 0.0
    shares.ask("a", now)
    shares.ask("b", now)
    while now < 100:
        name = shares.grant(now)
        used = 0.01
        now += used + (0.005 if name == "a" else 0)
        had[name] += used
        shares.release(name, now, used)
        shares.ask(name, now)
    assert had["a"] == pytest.approx(had["b"], abs=0.02)


def test_who_leaves_gives_its_turn_back():
    shares = Shares({"a": 1, "b": 1})
    shares.ask("a", 0)
    shares.ask("b", 0)
    shares.grant(0)
    shares.leave("a", 1)
    assert shares.grant(1) == "b"
    with pytest.raises(KeyError):
        shares.ask("a", 1)


@pytest.mark.parametrize("weight", [0, -1, float("inf"), float("nan")])
def test_weights_must_be_positive(weight):
    with pytest.raises(ValueError, match="must be positive"):
        Shares({"a": weight})


@given(
    weights=st.lists(st.floats(0.1, 10), min_size=2, max_size=5),
    longest=st.lists(st.floats(0.001, 1), min_size=5, max_size=5),
    seed=st.integers(0, 2**32),
)
def test_backlogged_models_never_drift_apart(weights, longest, seed):
    """Goyal, Vin and Cheng's bound: any two differ by one turn of each, divided by their weights."""
    rng = random.Random(seed)
    names = [str(index) for index in range(len(weights))]
    shares = Shares(dict(zip(names, weights, strict=True)))
    had, now = dict.fromkeys(names, 0.0), 0.0
    for name in names:
        shares.ask(name, now)
    for _ in range(200):
        name = shares.grant(now)
        took = rng.uniform(0, longest[int(name)])
        now += took
        had[name] += took / weights[int(name)]
        shares.release(name, now)
        shares.ask(name, now)
        for a in range(len(names)):
            for b in range(a):
                bound = longest[a] / weights[a] + longest[b] / weights[b]
                assert abs(had[names[a]] - had[names[b]]) <= bound + 1e-9


@given(seed=st.integers(0, 2**32), steps=st.integers(1, 200))
def test_comings_and_goings_starve_nobody(seed, steps):
    """Whoever asks is served before anybody has had more than its own due and one turn since."""
    rng = random.Random(seed)
    weights = {name: rng.uniform(0.2, 5) for name in "abcd"}
    shares, now, waits = Shares(weights), 0.0, {}
    for _ in range(steps):
        for name in rng.sample("abcd", rng.randint(1, 4)):
            if name not in waits and shares.holder != name:
                shares.ask(name, now)
                waits[name] = dict.fromkeys("abcd", 0.0)
        name = shares.grant(now)
        if name is None:
            continue
        del waits[name]
        took = rng.uniform(0, 1)
        now += took
        shares.release(name, now)
        for passed, since in waits.items():
            since[name] += took
            assert since[name] / weights[name] <= 1 / weights[name] + 1 / weights[passed] + 1e-9


def test_background_work_gets_a_turn_only_while_nobody_wants_one_for_live_work():
    shares = Shares({"job": 100, "live": 1, "other job": 1})
    shares.ask("job", 0, background=True)
    shares.ask("live", 0)
    shares.ask("other job", 0, background=True)
    for now in range(5):
        assert shares.contended_by_live
        assert shares.grant(now) == "live"
        assert not shares.contended_by_live
        shares.release("live", now + 1)
        shares.ask("live", now + 1)
    shares.leave("live", 9)
    assert {shares.grant(9), shares.release(shares.holder, 10), shares.grant(10)} == {None, "job", "other job"}


def test_who_asked_for_background_work_may_ask_again_for_live_work():
    shares = Shares({"a": 1, "b": 1})
    shares.ask("a", 0)
    assert shares.grant(0) == "a"
    shares.ask("b", 0, background=True)
    shares.ask("b", 1)
    shares.ask("b", 1, background=True)
    shares.release("a", 1)
    shares.ask("a", 1, background=True)
    assert shares.grant(1) == "b"

"""Who is let in under load, by example: two slots, a tenth of a second a step, and a target of a second."""

import random
from typing import Any

import pytest
from support.sequences_world import make_request

from chairlift.core.cost import Coefficients
from chairlift.core.finished import Shed, ShedReason
from chairlift.core.queue import QueueOrder
from chairlift.core.sequences.forecast import Expected, Forecast, StepLimits
from chairlift.core.sequences.overload import ForeseenMoment, LoadShedder, RatioQuantile
from chairlift.core.sequences.ratio_band import RatioBand
from chairlift.core.sequences.sampling_params import SamplingParams

STEP = Coefficients(0.1, 0.0, 0.0, 0.0)
LIMITS = StepLimits(slots=2, tokens=100, num_blocks=1000, block_size=16)


class Front:
    """A shedder and the calls that a front would make; requests of exactly so many tokens, one of prompt each."""

    def __init__(self, target: float | None = 1.0, cost: Coefficients | None = STEP, **order: Any) -> None:
        self.shedder = LoadShedder(target, QueueOrder(**order))
        self.shedder.limits = LIMITS
        self.shedder.cost = cost
        self.now = 0.0
        self.steps = 0
        self._count = 0

    def come(self, *lengths: int, timeout: float | None = None, **fields: Any) -> list[str]:
        requests = []
        for length in lengths:
            self._count += 1
            fields = {"arrival": self.now} | fields
            requests.append(make_request(f"r{self._count}", [7], length, **fields))
        self.shedder.arrive(requests, self.now, None, None if timeout is None else self.now + timeout)
        return [request.id for request in requests]

    def start(self, *names: str) -> None:
        for name in names:
            self.shedder.started(name, self.steps, 0, self.now)

    def run(self, *lengths: int) -> list[str]:
        """Some that run, with their first tokens just made; slots are free for them."""
        found = []
        for length in lengths:
            found += self.come(length)
            self.start(found[-1])
        return found

    def step(self, waiting: int | None = None, steps: int = 1) -> dict[str, Shed]:
        self.steps += steps
        self.now += 0.1 * steps
        waiting = self.shedder.num_waiting if waiting is None else waiting
        return dict(self.shedder.stepped(self.steps, waiting, STEP, self.now))


def refused(front: Front, *lengths: int, **fields: Any) -> Shed:
    before = front.shedder.num_waiting
    with pytest.raises(Shed) as caught:
        front.come(*lengths, **fields)
    assert front.shedder.num_waiting == before
    return caught.value


def test_whoever_would_be_late_is_refused_and_told_when_to_come_back() -> None:
    front = Front()
    front.run(9, 31)
    front.come(40)  # gets the slot of the first, 8 steps from now, so its first token is there after 0.9 s
    shed = refused(front, 5)  # would have to wait for the second
    assert shed.reason is ShedReason.TTFT
    assert "target_ttft_ms" in str(shed)
    assert shed.retry_after == pytest.approx(1.05 * 3.1 - 1.0)
    assert front.shedder.num_shed == {ShedReason.TTFT: 1}
    front.step(waiting=0, steps=22)
    front.come(5)
    assert refused(front, 5).retry_after < 1


def test_nobody_is_refused_who_finds_a_slot_and_nobody_waiting() -> None:
    front = Front()
    front.shedder.promised.value = front.shedder.likely.value = 8.0
    front.run(1000)
    front.come(1000, timeout=1e-3)
    assert front.shedder.num_waiting == 1
    refused(front, 1)


def test_likely_is_enough_while_hardly_anyone_is_refused_and_a_promise_is_asked_for_while_many_are() -> None:
    front = Front()
    front.shedder.likely.value, front.shedder.promised.value = 1.0, 2.0
    short, _ = front.run(8, 1000)
    (only,) = front.come(5)  # in 0.8 s
    for _ in range(30):
        refused(front, 5)  # behind that one, in 1.3 s
    front.shedder.ended(only)
    front.step(waiting=0)
    assert refused(front, 5).retry_after > 0.4, "twice 0.7 s is too late"
    front.shedder.ended(short)
    for _ in range(100):
        (there,) = front.run(8)
        front.shedder.ended(there)
    front.run(8)
    assert front.come(5)


def test_nobody_is_refused_on_a_guess() -> None:
    for front in (Front(cost=None), Front()):
        if front.shedder.cost is not None:
            front.shedder.limits = None
        for _ in range(50):
            front.come(1000, timeout=1.0)


def test_without_a_target_only_deadlines_count() -> None:
    front = Front(target=None)
    front.run(50, 50)
    for _ in range(10):
        front.come(50)
    assert front.shedder.expected_wait(front.now) > 20
    front.come(10, timeout=31.0)
    shed = refused(front, 200, timeout=31.0)
    assert shed.reason is ShedReason.DEADLINE
    assert 0 < shed.retry_after < 31
    front.come(200)


def test_of_several_the_first_counts_for_the_target_and_the_last_for_the_deadline() -> None:
    front = Front()
    front.run(4, 200)
    front.come(50, 50, 50)
    front = Front(target=None)
    front.run(4, 200)
    assert refused(front, 50, 50, 50, timeout=8.0).reason is ShedReason.DEADLINE
    assert front.shedder.num_shed[ShedReason.DEADLINE] == 3
    front.come(50, timeout=8.0)


def test_the_urgent_go_ahead_and_are_judged_so() -> None:
    front = Front()
    front.run(5, 50)
    front.come(60)
    refused(front, 1)
    (urgent,) = front.come(4, priority=-1)
    # Now the other waits for one more, which makes it a little late, but is no reason to give up. For two it is.
    assert front.step() == {}
    (hurried,) = front.come(4, priority=-2)
    lost = front.step()
    assert list(lost) == ["r3"]
    assert urgent != hurried


@pytest.mark.parametrize("target", [None, 1e6])
def test_a_long_queue_is_not_looked_through_for_each_that_comes(
    target: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    front = Front(target=target)
    admitted = [0]
    admit = Forecast.admit

    def counted(self: Forecast, *lengths: int) -> Expected:
        admitted[0] += 1
        return admit(self, *lengths)

    monkeypatch.setattr(Forecast, "admit", counted)
    front.run(50, 50)
    for _ in range(1000):
        front.come(5)
        front.now += 0.001
    admitted[0] = 0
    for number in range(100):
        # It came before others whose prompts were shorter to read.
        front.come(5, timeout=1e6, arrival=front.now - 0.01 * (number % 50) - 1e-4)
        front.shedder.check(0, front.now)
        front.now += 0.001
        front.shedder.stepped(front.steps, 1000, STEP, front.now)
    assert admitted[0] < 100 * 200
    assert front.shedder.num_waiting == 1100


def test_whoever_comes_into_the_middle_is_judged_by_those_before_and_judges_those_behind() -> None:
    front = Front(target=1e6)
    front.run(50, 50)
    for _ in range(100):
        front.come(10)
        front.now += 1e-5
    (early,) = front.come(10, arrival=front.now - 50.5e-5)
    (last,) = front.come(10)
    waits = [front.shedder.expected_of(f"r{number}") for number in range(3, 103)]
    # Two slots, ten steps each: who comes is there with the next pair, and all behind it wait for one more.
    assert front.shedder.expected_of(early) == pytest.approx(waits[50], abs=0.11)
    assert front.shedder.expected_of(last) == pytest.approx(waits[99] + 1.0, abs=0.11)


def test_the_shortest_go_ahead_where_that_is_the_order() -> None:
    front = Front(name="shortest", size_ageing=0.1)
    front.run(5, 50)
    front.come(60)
    front.come(2)
    refused(front, 80)


def test_before_the_prompt_is_read() -> None:
    front = Front()
    front.shedder.check(0, front.now)
    front.run(5, 50)
    front.shedder.check(0, front.now)
    front.come(60)
    with pytest.raises(Shed):
        front.shedder.check(0, front.now)
    assert front.shedder.num_shed == {ShedReason.TTFT: 1}
    front.shedder.check(-5, front.now)
    idle = Front(target=None)
    idle.run(5, 50)
    idle.come(60)
    idle.shedder.check(0, idle.now)


def test_who_waits_in_vain_is_told_before_it_has_waited_long() -> None:
    front = Front()
    first, _ = front.run(5, 50)
    waiting = front.come(30)
    assert front.step(steps=4) == {}
    # The slot that comes free is somebody else's after all.
    front.shedder.ended(first)
    front.come(100, priority=-100)
    front.start("r4")
    lost = front.step(waiting=1)
    assert list(lost) == waiting
    assert lost[waiting[0]].reason is ShedReason.TTFT
    front.shedder.ended(waiting[0])
    assert front.shedder.num_waiting == 0


def test_a_prompt_that_is_being_computed_keeps_its_slot_however_long_that_takes() -> None:
    front = Front()
    front.run(5)
    (reading,) = front.come(9)
    front.shedder.moved([reading], [])
    assert front.step(waiting=0, steps=30) == {}
    assert front.step(waiting=1) == {}
    front.shedder.moved([], [reading])
    assert list(front.step()) == [reading], "it gave its slot up"


def test_who_has_begun_is_told_and_not_guessed_by_who_is_first() -> None:
    """Whose grammar is yet to be prepared is passed by, and waits; the other has a slot."""
    front = Front()
    front.run(50)
    unprepared, reading = front.come(9), front.come(9)
    front.shedder.moved(["a background request", *reading], [])
    assert list(front.step(waiting=1, steps=30)) == unprepared


def test_who_cannot_make_the_deadline_any_more_is_given_up() -> None:
    front = Front(target=None)
    first, _ = front.run(11, 50)
    (name,) = front.come(3, timeout=2.0)
    front.shedder.ended(first)
    front.come(100, priority=-100)
    front.start("r4")
    lost = front.step()
    assert lost[name].reason is ShedReason.DEADLINE


def test_when_the_worker_is_lost_so_are_all_who_were_there() -> None:
    front = Front()
    front.run(50, 50)
    front.steps = 0
    front.shedder.lost()
    assert front.shedder.num_waiting == 0
    assert front.shedder.expected_wait(front.now) == 0
    front.run(11, 11)
    front.step(steps=9)
    assert front.shedder.expected_wait(front.now) == pytest.approx(0.2, abs=0.01)


def test_what_ends_by_itself_is_learned_and_what_fails_is_not() -> None:
    front = Front()
    lengths = front.shedder.lengths
    for end in (None, 60, 0):
        name = front.come(60, params=SamplingParams(max_tokens=None), stop_ids=frozenset({1}))[0]
        front.start(name)
        front.step(steps=9)
        front.shedder.ended(name, end)
    front.shedder.ended("unknown")
    front.run(2, 2)
    front.come(2)
    assert lengths.all.num_observed == 2
    assert len(lengths) == 1


def test_experience_corrects_what_is_promised() -> None:
    front = Front(target=10.0)
    names = front.run(31, 31)
    for _ in range(120):
        (name,) = front.come(31)
        expected = front.shedder.expected_of(name)
        assert expected is not None
        # Everything takes twice as long.
        front.now += 2 * expected
        front.shedder.ended(names.pop(0), 31)
        front.start(name)
        names.append(name)
        front.step(waiting=0)
    assert 1.8 < front.shedder.likely.value < 2.2
    assert 1.8 < front.shedder.promised.value < 2.2


def test_a_quantile_is_followed_up_and_down_within_bounds() -> None:
    quantile = RatioQuantile(0.5)
    for _ in range(200):
        quantile.observe(3.0)
    assert quantile.value == pytest.approx(3.0, rel=0.05)
    for _ in range(200):
        quantile.observe(0.5)
    assert quantile.value == pytest.approx(0.5, rel=0.05)
    for _ in range(1000):
        quantile.observe(1e9)
    assert quantile.value == 8.0


def test_looking_at_prompts_of_many_steps_takes_a_tenth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    front = Front(target=None)
    taken = [0.0]
    admit = Forecast.admit

    def counted(self: Forecast, *lengths: int) -> Expected:
        before = self.passes
        expected = admit(self, *lengths)
        # So many seconds are taken for granted.
        taken[0] += 3e-5 + 5e-6 * (self.passes - before)
        return expected

    monkeypatch.setattr(Forecast, "admit", counted)
    requests = [make_request(f"long-{number}", 900, 3) for number in range(200)]
    front.shedder.arrive(requests, front.now)
    front.come(5, timeout=1e6)
    for _ in range(1000):
        front.now += 0.001
        front.shedder.stepped(front.steps, 200, STEP, front.now)
    assert 0.05 < taken[0] < 0.12


# What a person is told


def test_who_waits_is_told_when_and_who_runs_when_it_ends() -> None:
    front = Front(target=None)
    first, second = front.run(9, 31)
    third, fourth = front.come(40, 5)
    told = front.shedder.foresee([first, second, third, fourth, "unknown"], front.now)
    assert told.keys() == {first, second, third, fourth}
    assert told[first].start is told[first].first is None
    # Of 9 tokens one is there, of 31 too, and each step has one of each.
    assert told[first].end == ForeseenMoment(pytest.approx(0.8))
    assert told[second].end == ForeseenMoment(pytest.approx(3.0))
    assert told[third].start == ForeseenMoment(pytest.approx(0.8))
    assert told[third].first == ForeseenMoment(pytest.approx(0.9))
    assert told[third].end == ForeseenMoment(pytest.approx(0.9 + 3.9))
    assert told[fourth].first == ForeseenMoment(pytest.approx(3.1))


@pytest.mark.parametrize(("order", "fields"), [("arrival", {"priority": -100}), ("shortest", {})])
def test_a_slot_in_which_a_prompt_is_computed_is_nobodys_whoever_goes_first(order: str, fields: dict[str, Any]) -> None:
    front = Front(target=None, name=order)
    front.run(31)
    (reading,) = front.come(9)
    front.shedder.moved([reading], [])
    (first,) = front.come(5, **fields)
    told = front.shedder.foresee([first, reading], front.now)
    # Its last token of 9 is in the 9th step: only then there is a slot.
    assert told[reading].first == ForeseenMoment(pytest.approx(0.1))
    assert told[first].start == ForeseenMoment(pytest.approx(0.9))
    assert told[first].first == ForeseenMoment(pytest.approx(1.0))


def test_nothing_is_told_before_it_is_known() -> None:
    front = Front(target=None, cost=None)
    (name,) = front.come(5)
    assert front.shedder.foresee([name], front.now) == {}
    front = Front(target=None)
    front.run(50, 50)
    (name,) = front.come(60, stop_ids=frozenset({1}))
    assert front.shedder.foresee([name], front.now)[name].end is None, "it may end whenever the model likes"


def test_lengths_give_the_end_of_a_running_request_a_band() -> None:
    front = Front(target=None)
    for made in range(4, 44):
        (name,) = front.come(60, stop_ids=frozenset({1}))
        front.start(name)
        front.steps += made - 1
        front.step(waiting=0, steps=0)
        front.shedder.ended(name)
    (name,) = front.come(60, stop_ids=frozenset({1}))
    front.start(name)
    end = front.shedder.foresee([name], front.now)[name].end
    assert None not in end
    assert front.now < end.early < end.expected < end.late < front.now + 6.0


@pytest.mark.parametrize("count", [20, 30, 60, 256, 2000])
def test_a_band_leaves_out_what_it_says_and_follows_changes(count: int) -> None:
    rng = random.Random(count)
    inside = []
    for _ in range(400 if count < 100 else 40):
        band = RatioBand(0.05)
        for _ in range(count):
            band.observe(rng.random(), rng.lognormvariate(0, 0.5))
        early, late = band.ends(rng.random())
        inside += [early <= rng.lognormvariate(0, 0.5) <= late for _ in range(100)]
    assert 0.88 < sum(inside) / len(inside) < 0.92
    for _ in range(256):
        band.observe(rng.random(), 3.0)
    assert band.ends(0.5) == (3.0, 3.0)


def test_the_band_of_a_wait_is_that_of_waits_as_long() -> None:
    rng = random.Random(0)
    band = RatioBand(0.05)
    for number in range(400):
        expected = 10.0 if number % 2 else 0.1
        band.observe(expected + rng.random() / 100, rng.uniform(0.9, 1.1) if number % 2 else rng.uniform(0.3, 3.0))
    for expected in (10.0, 50.0):
        early, late = band.ends(expected)
        assert 0.9 <= early < late <= 1.1
    early, late = band.ends(0.0)
    assert early < 0.6
    assert late > 2.5


def test_a_band_follows_what_came_of_what_was_told() -> None:
    front = Front(target=None)
    names = front.run(31, 31)
    for number in range(60):
        (name,) = front.come(31)
        told = front.shedder.foresee([name], front.now)[name].first
        assert told is not None
        assert (told.early is None) is (number < 20), "it takes some to know"
        # Half of them come on time, the others after twice as long.
        wait = front.shedder.foresee([name], front.now)[name].first
        assert wait == told
        front.now += (told.expected - front.now) * (1 + number % 2)
        front.shedder.ended(names.pop(0), 31)
        front.start(name)
        names.append(name)
        front.step(waiting=0)
    (name,) = front.come(31)
    told = front.shedder.foresee([name], front.now)[name].first
    assert None not in told
    assert told.early <= told.expected <= told.late
    assert 1.4 < (told.late - front.now) / (told.early - front.now) < 3.0


def test_what_was_found_for_one_is_told_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    front = Front(target=None)
    (running, *_) = front.run(50, 50)
    names = front.come(*[5] * 200)
    admitted = [0]
    admit = Forecast.admit

    def counted(self: Forecast, *lengths: int) -> Expected:
        admitted[0] += 1
        return admit(self, *lengths)

    monkeypatch.setattr(Forecast, "admit", counted)
    told = front.shedder.foresee([running, names[2]], front.now)
    assert admitted[0] == 3, "nobody behind it is looked at"
    for _ in range(100):
        front.now += 0.0001
        again = front.shedder.foresee([running, *names], front.now)
        assert again[names[2]].first == ForeseenMoment(pytest.approx(5.5))
        assert again[running].end == ForeseenMoment(pytest.approx(front.now + 4.9))
    assert admitted[0] == 128
    # Later all is as it turned out.
    front.step(steps=50)
    front.shedder.ended(running)
    assert front.shedder.foresee([names[2]], front.now)[names[2]].start != told[names[2]].start
    assert admitted[0] == 131
    front.shedder.lost()
    assert front.shedder.foresee(names, front.now) == {}


def test_a_preempted_request_makes_no_tokens_and_is_foreseen_as_one_that_waits() -> None:
    front = Front(target=None)
    (name, _) = front.run(512, 600)
    front.step(waiting=0, steps=9)
    # It has 10 tokens, and none from the next step.
    front.shedder.moved([], [name])
    front.step(waiting=1, steps=490)
    (behind,) = front.come(5)
    told = front.shedder.foresee([name, behind], front.now)
    # The other slot is its own in the next step, which computes all it had and gives one token more.
    assert told[name].start == ForeseenMoment(pytest.approx(front.now))
    assert told[name].first is None
    assert told[name].end == ForeseenMoment(pytest.approx(front.now + 50.2))
    assert told[behind].start == ForeseenMoment(pytest.approx(front.now + 10.0)), "the other has 100 tokens to come"
    front.shedder.moved([name], [])
    front.step(waiting=1)
    assert front.shedder.foresee([name], front.now)[name].end == ForeseenMoment(pytest.approx(front.now + 50.1))
    front.shedder.moved([], [name])
    front.step(waiting=1, steps=30)
    front.shedder.moved([name], [])
    front.step(waiting=1, steps=2)
    assert front.shedder.foresee([name], front.now)[name].end == ForeseenMoment(pytest.approx(front.now + 49.9))


def test_a_preempted_request_is_not_given_up_and_those_behind_wait_for_it() -> None:
    front = Front(target=2.0)
    (name, _) = front.run(31, 61)
    front.shedder.moved([], [name])
    assert front.step(waiting=1, steps=25) == {}
    # It is the first to have the free slot, for 30 tokens, and the other has more to come.
    assert refused(front, 5).retry_after == pytest.approx(1.05 * 3.1 - 2.0)


def test_only_the_first_in_the_queue_are_foreseen() -> None:
    front = Front(target=None)
    front.run(50, 50)
    names = front.come(*[5] * 200)
    told = front.shedder.foresee(names, front.now)
    assert 100 <= len(told) < 200
    assert list(told) == names[: len(told)]

"""What a client may spend, on a clock of the test's own."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chairlift.core.quota import Allowance, Exceeded, Quota, TokenBucket


def test_a_bucket_is_full_at_first_and_refills_evenly() -> None:
    bucket = TokenBucket(60, 100.0)
    assert bucket.wait(60, 100.0) == 0
    bucket.take(60, 100.0)
    assert bucket.wait(1, 100.0) == pytest.approx(1.0)
    assert bucket.wait(30, 110.0) == pytest.approx(20.0)
    assert bucket.wait(30, 130.0) == 0
    # Never more than a minute's worth.
    assert bucket.wait(60, 10_000.0) == 0
    bucket.take(60, 10_000.0)
    assert bucket.wait(1, 10_000.0) > 0


def test_a_clock_that_stands_still_or_goes_back_refills_nothing() -> None:
    bucket = TokenBucket(60, 100.0)
    bucket.take(60, 100.0)
    assert bucket.wait(1, 90.0) == pytest.approx(1.0)
    assert bucket.wait(1, 100.0) == pytest.approx(1.0)


def test_a_request_for_more_than_a_minutes_worth_waits_for_a_full_bucket_and_overdraws_it() -> None:
    quota = Quota(Allowance(tokens_per_minute=100), 0.0)
    quota.spend(50, 0.0)
    assert quota.check_tokens(500, 0.0) == Exceeded("tokens_per_minute", 100, pytest.approx(30.0))
    assert quota.check_tokens(500, 30.0) is None
    quota.spend(500, 30.0)
    # 400 below nothing: the next one waits until they are paid for.
    assert quota.begin(30.0) == Exceeded("tokens_per_minute", 100, pytest.approx(401 * 0.6))
    assert quota.begin(30.0 + 401 * 0.6) is None


def test_requests_at_once_are_counted_until_they_end() -> None:
    quota = Quota(Allowance(requests_at_once=2), 0.0)
    assert quota.begin(0.0) is None
    assert quota.begin(0.0) is None
    refused = quota.begin(0.0)
    assert refused is not None
    assert (refused.limit, refused.allowed) == ("requests_at_once", 2)
    assert refused.retry_after > 0
    quota.end()
    assert quota.begin(0.0) is None


def test_one_request_may_count_for_several_at_once() -> None:
    quota = Quota(Allowance(requests_at_once=3), 0.0)
    assert quota.begin(0.0) is None
    assert quota.check_at_once(2) is None
    assert quota.check_at_once(3) == Exceeded("requests_at_once", 3, pytest.approx(1.0))
    quota.add()
    quota.add()
    assert quota.begin(0.0) is not None
    quota.end()
    assert quota.begin(0.0) is None
    assert Quota(Allowance(), 0.0).check_at_once(10**9) is None


def test_what_is_refused_counts_for_nothing() -> None:
    quota = Quota(Allowance(requests_per_minute=2, requests_at_once=1), 0.0)
    assert quota.begin(0.0) is None
    for _ in range(10):
        refused = quota.begin(0.0)
        assert refused is not None
        assert refused.limit == "requests_at_once"
    quota.end()
    assert quota.begin(0.0) is None
    quota.end()
    refused = quota.begin(0.0)
    assert refused is not None
    assert refused.limit == "requests_per_minute"


def test_no_limits() -> None:
    quota = Quota(Allowance(), 0.0)
    for _ in range(1000):
        assert quota.begin(0.0) is None
        quota.spend(10**9, 0.0)
    assert quota.at_once == 1000


def test_other_limits_keep_what_was_spent() -> None:
    quota = Quota(Allowance(tokens_per_minute=100), 0.0)
    quota.spend(90, 0.0)
    quota.change(Allowance(tokens_per_minute=200), 0.0)
    assert quota.check_tokens(110, 0.0) is None
    assert quota.check_tokens(111, 0.0) is not None
    quota.change(Allowance(tokens_per_minute=60), 0.0)
    assert quota.check_tokens(1, 0.0) == Exceeded("tokens_per_minute", 60, pytest.approx(31.0))
    quota.change(Allowance(requests_per_minute=1), 0.0)
    assert quota.begin(0.0) is None
    refused = quota.begin(0.0)
    assert refused is not None
    assert refused.limit == "requests_per_minute"


@settings(max_examples=200, deadline=None)
@given(
    per_minute=st.integers(1, 1000),
    calls=st.lists(st.tuples(st.floats(0, 90), st.integers(1, 400)), max_size=60),
)
def test_no_span_of_time_has_more_than_its_share(per_minute: int, calls: list[tuple[float, int]]) -> None:
    """What is admitted in any span is at most a full bucket, what the span refills, and the one that overdrew."""
    bucket, now = TokenBucket(per_minute, 0.0), 0.0
    spent: list[tuple[float, int]] = []
    for pause, amount in calls:
        now += pause
        wait = bucket.wait(amount, now)
        if wait:
            # Whoever waits as long as it is told need not be told again.
            now += wait
        assert bucket.wait(amount, now) == 0
        bucket.take(amount, now)
        spent.append((now, amount))
    for first in range(len(spent)):
        total = 0
        for at, amount in spent[first:]:
            allowed = per_minute + (at - spent[first][0]) * per_minute / 60
            assert total + min(amount, per_minute) <= allowed + 1e-3
            total += amount

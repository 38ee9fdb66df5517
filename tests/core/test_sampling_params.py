"""Sampling parameters that no model can take are refused by name, before anybody computes with them."""

from typing import Any

import pytest

from chairlift.core.sequences.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"min_tokens": 2**31, "max_tokens": None}, "min_tokens must be at most 2147483647, got 2147483648"),
        ({"min_tokens": 2**63, "max_tokens": None}, "min_tokens must be at most 2147483647"),
        ({"max_tokens": 2**31}, "max_tokens must be at most 2147483647, got 2147483648"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"seed": 2**64}, "seed must be between"),
        ({"seed": 2**64 - 1, "n": 2}, f"seed must be at most {2**64 - 2} with n=2"),
        ({"seed": 2**64 - 2, "n": 4}, f"seed must be at most {2**64 - 4} with n=4"),
        ({"top_p": 0.0}, "top_p must be above 0"),
    ],
    ids=str,
)
def test_what_is_out_of_range_is_named(fields: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=f"^{problem}"):
        SamplingParams(**fields)


def test_the_ends_of_the_ranges_are_taken() -> None:
    most = 2**31 - 1
    params = SamplingParams(min_tokens=most, max_tokens=most, seed=2**64 - 2, n=2)
    assert (params.min_tokens, params.max_tokens) == (most, most)
    assert SamplingParams(seed=-(2**63), n=128).seed == -(2**63)

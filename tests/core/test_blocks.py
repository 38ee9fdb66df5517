import random
from collections import Counter

import pytest

from chairlift.core.sequences.blocks import BlockPool
from chairlift.core.sequences.sequence import block_hash, root_hash

A, B, C = (block_hash(root_hash(""), [token]) for token in (1, 2, 3))


def test_take_and_release() -> None:
    pool = BlockPool(2)
    first, second = pool.take(), pool.take()
    assert (pool.num_used, pool.num_free) == (2, 0)
    with pytest.raises(IndexError, match="no free block"):
        pool.take()
    pool.release([first, second])
    assert (pool.num_used, pool.num_free) == (0, 2)


def test_a_pool_needs_a_block() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(0)


def test_a_shared_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = BlockPool(1)
    block = pool.take()
    pool.share(block)
    pool.release([block])
    assert pool.num_free == 0
    pool.release([block])
    assert pool.num_free == 1


def test_releasing_more_often_than_held_is_an_error() -> None:
    pool = BlockPool(1)
    block = pool.take()
    pool.release([block])
    with pytest.raises(ValueError, match="released more often"):
        pool.release([block])
    pool.check()


def test_content_outlives_its_holder_until_the_block_is_taken_anew() -> None:
    pool = BlockPool(1)
    block = pool.take()
    assert pool.publish(block, A)
    pool.release([block])
    assert pool.match([A]) == [block]
    pool.share(block)
    pool.release([block])
    assert pool.take() == block
    assert pool.match([A]) == []


def test_the_first_to_publish_a_content_is_the_one_found() -> None:
    pool = BlockPool(2)
    first, second = pool.take(), pool.take()
    assert pool.publish(first, A)
    assert not pool.publish(second, A)
    assert pool.publish(first, A)
    assert pool.match([A]) == [first]
    pool.release([second])
    assert pool.match([A]) == [first]


def test_match_stops_at_the_first_gap() -> None:
    pool = BlockPool(3)
    blocks = [pool.take() for _ in range(3)]
    for block, content in zip(blocks, (A, B, C), strict=True):
        pool.publish(block, content)
    pool.forget(blocks[1])
    assert pool.match([A, B, C]) == [blocks[0]]
    assert pool.match([B]) == []


def test_reuse_takes_empty_blocks_first_then_the_least_recently_used_tails_before_heads() -> None:
    pool = BlockPool(5)
    old = [pool.take(), pool.take()]
    new = [pool.take(), pool.take()]
    empty = [pool.take()]
    for number, block in enumerate(old + new):
        pool.publish(block, block_hash(A, [number]))
    pool.release(old)
    pool.release(new)
    pool.release(empty)
    assert [pool.take() for _ in range(5)] == [empty[0], old[1], old[0], new[1], new[0]]


def test_hashes_stand_for_the_whole_prefix_and_the_salt() -> None:
    seen = Counter(
        block_hash(block_hash(root_hash(salt), first), second)
        for salt in ("", "a", "b")
        for first in ([1, 2], [1, 3], [2, 1])
        for second in ([1, 2], [12, 0], [-1, 2**40])
    )
    assert set(seen.values()) == {1}
    assert len(seen) == 27


def test_check_finds_contradictions() -> None:
    pool = BlockPool(2)
    pool.check()
    block = pool.take()
    pool.ref_count[block] = 0
    with pytest.raises(AssertionError, match="both free and held, or neither"):
        pool.check()
    pool.ref_count[block] = 1
    pool.publish(block, A)
    pool._hash_of[block] = None
    with pytest.raises(AssertionError, match="disagree"):
        pool.check()


def test_random_use_against_a_plain_model() -> None:
    rng = random.Random(3)
    pool = BlockPool(8)
    held: list[list[int]] = []
    content: dict[int, bytes] = {}
    for _ in range(5000):
        choice = rng.random()
        if choice < 0.4 and pool.num_free:
            block = pool.take()
            content.pop(block, None)
            held.append([block])
        elif choice < 0.6 and held:
            block, wanted = rng.choice(held)[0], bytes([rng.randrange(6)])
            if block not in content:
                assert pool.publish(block, wanted) == (wanted not in content.values())
                if wanted not in content.values():
                    content[block] = wanted
        elif choice < 0.75 and content:
            block, wanted = rng.choice(list(content.items()))
            assert pool.match([wanted]) == [block]
            pool.share(block)
            held.append([block])
        elif held:
            pool.release(held.pop(rng.randrange(len(held))))
        pool.check()
        counts = Counter(block for blocks in held for block in blocks)
        assert {b: n for b, n in enumerate(pool.ref_count) if n} == counts
        for wanted in {bytes([n]) for n in range(6)} - set(content.values()):
            assert pool.match([wanted]) == []

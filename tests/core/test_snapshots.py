"""Where states are kept, and who finds them: a few cases by hand. Random histories are in test_sequences_machine.py."""

import pytest
from support.sequences_world import Setup, World, make_request

from chairlift.core.sequences.sequence import Sequence
from chairlift.core.sequences.snapshots import SnapshotPool

SIZE = 4


def sequence_of(length: int, salt: str = "") -> Sequence:
    sequence = Sequence(make_request("s", list(range(length)), cache_salt=salt), (0.0, 0))
    sequence.hash_blocks(length // SIZE, SIZE)
    return sequence


def world(**settings: object) -> World:
    return World(Setup(block_size=SIZE, num_blocks=200, snapshots=20)._replace(**settings))


def answer(world: World, name: str, prompt: list[int], max_tokens: int = 1) -> tuple[list[int], int]:
    """Answer a request with tokens 7; return where its states were saved, and how much of it was found."""
    world.add(make_request(name, prompt, max_tokens))
    saved: list[int] = []
    found = 0
    while name in world.records:
        step = world.schedule()
        assert step is not None
        saved += [position for position, _ in step.saves.get(name, ())]
        found += sum(start.num_computed_tokens for start in step.started)
        world.update({name: [7]}, {})
    return saved, found


def test_a_state_is_kept_before_a_prompts_last_token_and_at_the_answers_end() -> None:
    there = world()
    prompt = list(range(100, 123))
    assert answer(there, "first", prompt, 3) == ([22], 0)
    assert answer(there, "again", prompt, 3) == ([], 22)
    # Of the answer the last token was never computed.
    assert answer(there, "next turn", [*prompt, 7, 7, 7, 50, 51]) == ([27], 25)


def test_where_prefixes_part_a_state_is_kept_for_the_third() -> None:
    there = world()
    system = list(range(200, 218))
    for first, found, saved in ((10, 0, [20]), (20, 0, [16, 20]), (30, 16, [20])):
        assert answer(there, f"from {first}", [*system, first, 1, 2]) == (saved, found)


def test_without_room_nothing_is_kept_and_all_is_computed() -> None:
    there = world(snapshots=0)
    for name in ("first", "again"):
        assert answer(there, name, list(range(30))) == ([], 0)


def test_what_is_shorter_than_a_block_is_not_kept() -> None:
    assert answer(world(), "short", [1, 2, 3]) == ([], 0)


@pytest.mark.parametrize(
    ("slots", "num_blocks", "snapshots", "other"),
    [(2, 20, 1, 3), (2, 20, 2, 9), (3, 15, 1, 3), (3, 16, 2, 9)],
    ids=["its slot, one snapshot", "its slot, two", "its blocks, one snapshot", "its blocks, two"],
)
def test_who_gives_way_leaves_the_newcomer_what_it_found(
    slots: int, num_blocks: int, snapshots: int, other: int
) -> None:
    """What is kept of the other must not take the place of the state that the newcomer begins with."""
    there = world(slots=slots, num_blocks=num_blocks, snapshots=snapshots)
    prompt = list(range(100, 141))
    there.add(make_request("first", prompt, 12))
    steps = 0
    while there.scheduler.num_background_running == 0 or steps < 4:
        there.schedule()
        there.update({"first": [7], "other": [8]}, {})
        steps += 1
        if steps == 1:
            there.add(make_request("other", other, 30, background=True))
    there.add(make_request("second", [*prompt, 1, 2, 3], 4))
    step = there.schedule()
    assert step is not None
    assert [(start.request.id, start.num_computed_tokens) for start in step.started] == [("second", 40)]
    assert "other" in step.released


def test_the_longest_text_that_is_known_is_found_and_only_its_own() -> None:
    pool, sequence = SnapshotPool(4, SIZE), sequence_of(20)
    for count in (6, 11, 12):
        assert pool.save(pool.place(sequence, count)) is not None
    assert pool.find(sequence, 5) is None, "found before it is there"
    pool.end_step(failed=False)
    assert [pool.find(sequence, blocks) for blocks in (0, 1, 2, 3)] == [None, (6, 0), (11, 1), (12, 2)]
    assert pool.find(sequence_of(12), 3) == (11, 1), "one token is left to compute"
    assert pool.find(sequence_of(20, "another tenant"), 5) is None
    pool.check()


def test_who_was_used_least_recently_gives_way_but_nobody_of_this_step() -> None:
    pool, sequence = SnapshotPool(2, SIZE), sequence_of(20)
    first, second = (pool.save(pool.place(sequence, count)) for count in (5, 6))
    assert pool.save(pool.place(sequence, 7)) is None
    pool.end_step(failed=False)
    assert first is not None
    pool.use(first)
    pool.end_step(failed=False)
    assert pool.save(pool.place(sequence, 7)) == second
    assert pool.save(pool.place(sequence, 5)) is None, "it is kept already"
    pool.end_step(failed=False)
    assert pool.find(sequence, 1) == (7, second)
    assert pool.find(sequence_of(7), 1) == (5, first), "what was behind 6 tokens gave way"


def test_nothing_that_a_failed_step_touched_is_found() -> None:
    """Whether it got as far as to copy anything nobody knows."""
    pool, sequence = SnapshotPool(3, SIZE), sequence_of(20)
    pool.save(pool.place(sequence, 5))
    pool.end_step(failed=False)
    kept = pool.keep(pool.place(sequence, 9))
    pool.save(pool.place(sequence, 13))
    assert pool.find(sequence, 2) == (9, kept), "it is copied before anybody starts"
    pool.end_step(failed=True)
    assert pool.find(sequence, 5) == (5, 0), "nothing behind it is left"
    pool.check()

"""What recurrent layers remember of a sequence, kept where prefixes end and part, and found again by its tokens.

A layer with a state instead of keys and values can't begin in the middle of what was computed: it needs the state that
it had there. So copies of states are kept for some places of a text, which need not be ends of blocks. Where they are
worth most, at prompts' ends and where prefixes part, is by Marconi (MLSys 2025).
"""

from collections import OrderedDict
from typing import NamedTuple

from chairlift.core.sequences.sequence import BlockHash, Sequence, root_hash


class TextPlace(NamedTuple):
    """A place in a text, by all tokens before it: the hash of the full blocks, and the tokens behind them."""

    blocks: BlockHash
    tail: tuple[int, ...]


class SnapshotPool:
    """`num_slots` snapshots, found by their place; who was used least recently gives way.

    What was saved to or is read in a step keeps its slot until the step has ended.
    """

    def __init__(self, num_slots: int, block_size: int) -> None:
        self._block_size = block_size
        self._slot_of: dict[BlockHash, dict[tuple[int, ...], int]] = {}
        # Slots by when they were used last, and the place that each can be found by, once what it has is there.
        self._place_of: OrderedDict[int, TextPlace | None] = OrderedDict.fromkeys(range(num_slots))
        self._saving: dict[TextPlace, int] = {}
        self._busy: set[int] = set()

    def find(self, sequence: Sequence, num_blocks: int) -> tuple[int, int] | None:
        """The last place at most so many full blocks of a sequence, and what is behind them, where its state is kept.

        Returns the number of tokens before it, and the slot. One token at least is left to compute.
        """
        size, known = self._block_size, sequence.token_ids
        for count in range(num_blocks, -1, -1):
            parent = sequence.hashes[count - 1] if count else root_hash(sequence.request.cache_salt)
            tails = self._slot_of.get(parent, {})
            start = count * size
            # By length, as there may be any number of tails.
            for end in range(min(start + size, len(known)) - 1, start - 1, -1) if tails else ():
                slot = tails.get(tuple(known[start:end]))
                if slot is not None:
                    return end, slot
        return None

    def use(self, slot: int) -> None:
        """Note that a sequence begins, or is about to begin, with what lies there."""
        self._busy.add(slot)
        self._place_of.move_to_end(slot)

    def place(self, sequence: Sequence, num_tokens: int) -> TextPlace:
        """The place behind so many of a sequence's tokens."""
        count, size = num_tokens // self._block_size, self._block_size
        sequence.hash_blocks(count, size)
        parent = sequence.hashes[count - 1] if count else root_hash(sequence.request.cache_salt)
        return TextPlace(parent, tuple(sequence.token_ids[count * size : num_tokens]))

    def save(self, place: TextPlace) -> int | None:
        """Take a slot for a state that this step's pass comes by; None if it is kept already, or none is free."""
        slot = self._take(place)
        if slot is not None:
            self._saving[place] = slot
        return slot

    def keep(self, place: TextPlace) -> int | None:
        """Take a slot for a state that is there, and copied before anything of the coming step; else as `save`."""
        slot = self._take(place)
        if slot is not None:
            self._enter(place, slot)
        return slot

    def _take(self, place: TextPlace) -> int | None:
        known = self._slot_of.get(place.blocks, {}).get(place.tail)
        if known is not None:
            self._place_of.move_to_end(known)
        if known is not None or place in self._saving:
            return None
        slot = next((slot for slot in self._place_of if slot not in self._busy), None)
        if slot is not None:
            self._forget(slot)
            self.use(slot)
        return slot

    def _enter(self, place: TextPlace, slot: int) -> None:
        self._place_of[slot] = place
        self._slot_of.setdefault(place.blocks, {})[place.tail] = slot

    def _forget(self, slot: int) -> None:
        place = self._place_of[slot]
        if place is None:
            return
        self._place_of[slot] = None
        self._place_of.move_to_end(slot, last=False)
        tails = self._slot_of[place.blocks]
        del tails[place.tail]
        if not tails:
            del self._slot_of[place.blocks]

    def end_step(self, failed: bool) -> None:
        """From here on what the step saved is found; nothing that it touched, if any of it failed."""
        if failed:
            for slot in self._busy:
                self._forget(slot)
        else:
            for place, slot in self._saving.items():
                self._enter(place, slot)
        self._saving.clear()
        self._busy.clear()

    def check(self) -> None:
        """Raise AssertionError if the pool contradicts itself; for tests."""
        found = {slot: TextPlace(key, tail) for key, tails in self._slot_of.items() for tail, slot in tails.items()}
        held = {slot: place for slot, place in self._place_of.items() if place is not None}
        if found != held or not all(self._slot_of.values()):
            raise AssertionError("the places of snapshots and their index disagree")
        if not {*self._saving.values()} <= self._busy:
            raise AssertionError("a snapshot that is being saved could be taken")

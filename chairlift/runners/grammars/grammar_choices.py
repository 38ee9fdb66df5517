"""What the rows of one step may choose, by the grammars that some of them follow."""

from collections.abc import Iterable, Sequence

from chairlift.ops.base import Allowed
from chairlift.runners.grammars.grammar import Follower


class GrammarChoices:
    """R rows of a step, of which those at `tried` choose by trial, and others from what is known to be allowed."""

    def __init__(self, followers: Sequence[Follower | None]) -> None:
        """`followers` [R] are the rows' own, None for one that follows no grammar."""
        self._followers = followers
        self.tried = [index for index, each in enumerate(followers) if each is not None and each.is_tried]
        # Those who are to say it again: no token that was tried may be next, and what may be is not known yet.
        self.refused: list[int] = []

    def allowed(self) -> Allowed:
        """What rows may choose, of which those that are tried may choose anything; no follower is to advance then."""
        return [None if each is None or each.is_tried else each.bits for each in self._followers]

    def known(self, indices: Iterable[int]) -> Allowed:
        """What the rows at `indices` may choose, of which that is known though they are tried."""
        return [each.bits for index in indices if (each := self._followers[index]) is not None]

    def takes(self, index: int, token: int) -> bool:
        """Whether a tried row's first candidate may be next; as mostly it may, the others need not be looked at."""
        follower = self._followers[index]
        assert follower is not None
        return follower.accept(token)

    def pick(self, index: int, candidates: Iterable[int]) -> int | None:
        """Return the first of a tried row's other candidates that may be next; None if none of them may.

        If it is not known what may be, the row is `refused` then, or if others would have to wait for that.
        """
        follower = self._followers[index]
        assert follower is not None
        if not follower.can_be_tried:
            self.refused.append(index)
            return None
        for token in candidates:
            if follower.accept(token):
                return token
            if follower.error is not None:
                break
        if follower.is_open:
            follower.refuse()
            self.refused.append(index)
        return None

"""How long before a batch ends the next one has to leave, so that its instance does not wait for it."""

# What a call waited for beyond this many seconds is waiting; below, it is what taking a message costs.
_NEGLIGIBLE = 2e-4
# Nothing waited: a little later will do as well. This shrinks what was learned to a third in 100 calls.
_DECAY = 0.01
# A lead is no more than this share of a call: what took longer was a hiccup, and no reason to bind batches so early.
_MOST = 0.5


class Lead:
    """Follows what calls that were sent ahead had their instance wait, and grows by that much; else it slowly shrinks.

    So it becomes what sending takes, how late timers are and how far predictions err, all together, for this instance.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def observe(self, idle: float, seconds: float) -> None:
        """Take in a call that its instance waited `idle` seconds for; the one before was to take `seconds`."""
        late = max(idle - _NEGLIGIBLE, 0.0)
        self.seconds = min(self.seconds * (1 - _DECAY) + late, _MOST * seconds)

"""The steps that a server tells of, gathered while it is measured."""

import msgspec

from chairlift.errors import ConfigError, RequestFailed
from chairlift.plan.machine_profile import StepSample
from chairlift.plan.seen_traffic import SeenSequences, step_samples
from chairlift.planning.running_server import RunningServer
from chairlift.planning.served_traffic import TOO_LITTLE, told_traffic


class ToldSteps:
    """What a language model's server told of its steps each time that it was asked, none of them twice.

    `samples` are in the order in which they were, without the moments.
    """

    def __init__(self, server: RunningServer, name: str) -> None:
        self._server, self._name = server, name
        self.samples: list[StepSample] = []
        self._until = 0.0

    def forget(self) -> None:
        """Forget the steps so far. Raises as `ask`."""
        self.ask()
        self.samples.clear()

    def ask(self) -> SeenSequences:
        """Ask for what it had lately. Raises ConfigError if that is too little, and RequestFailed."""
        try:
            seen = told_traffic(self._server, self._name)
        except RequestFailed as error:
            if TOO_LITTLE not in str(error):
                raise
            problem = "the server answered too few requests for its times to be known: give it more time"
            raise ConfigError(problem) from None
        if not isinstance(seen, SeenSequences):
            raise ConfigError(f"the server tells of {self._name} as of a model without steps")
        samples = step_samples(seen.steps, seen.requests, seen.profile.block_size)
        for step, sample in zip(seen.steps, samples, strict=True):
            if step.ended > self._until:
                self.samples.append(msgspec.structs.replace(sample, began=None))
        if seen.steps:
            self._until = max(self._until, seen.steps[-1].ended)
        return seen

"""A server in virtual time: what its models, its machine and its settings would make of a trace.

The schedulers, the admission and the shares of the machine are the server's own; only the seconds are drawn, from what
was recorded. So a simulation says what this very code would decide, some hundred times faster than it would happen.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

from chairlift.errors import ConfigError
from chairlift.plan.agenda import Agenda
from chairlift.plan.items import ItemModel, VirtualItems
from chairlift.plan.machine_profile import FrontCost
from chairlift.plan.sequences import SequenceModel, VirtualSequences
from chairlift.plan.simulated_run import SimulatedRequest, SimulatedRun
from chairlift.plan.trace import TraceRequest
from chairlift.plan.virtual_machine import VirtualMachine

VirtualModel = VirtualSequences | VirtualItems


def simulate(
    models: Sequence[SequenceModel | ItemModel],
    trace: Iterable[TraceRequest],
    *,
    front: FrontCost | None = None,
    replicas: int = 1,
    seed: int = 0,
    over: Callable[[SimulatedRun, float], bool] | None = None,
) -> SimulatedRun:
    """Let the models meet a trace, to the last request, or until `over`, which now and then sees the run and the time.

    Several models share each machine, turn by turn. Each of the `replicas` is such a machine with its own front; a
    request goes to the one that has the fewest of its model. The same arguments give the same outcome.
    Raises ConfigError for a request to a model that is not there, or out of order.
    """
    if replicas < 1 or not models:
        raise ConfigError(f"a simulation needs a model and a replica, got {len(models)} and {replicas}")
    if len({model.name for model in models}) < len(models):
        raise ConfigError("two of the models have the same name")
    return _Simulation(models, front or FrontCost(), replicas, seed).run(iter(trace), over)


class _Simulation:
    """All replicas of all models, and the requests as they come."""

    def __init__(self, models: Sequence[SequenceModel | ItemModel], front: FrontCost, replicas: int, seed: int) -> None:
        self._agenda = Agenda()
        self._requests: list[SimulatedRequest] = []
        self._machines = [VirtualMachine(self._agenda, front) for _ in range(replicas)]
        self._replicas: dict[str, list[VirtualModel]] = {}
        for model in models:
            self._replicas[model.name] = [
                _virtual(model, machine, f"{seed}/{model.name}/{number}", len(models) > 1)
                for number, machine in enumerate(self._machines)
            ]
        self._only = models[0].name if len(models) == 1 else None

    def run(
        self, trace: Iterator[TraceRequest], over: Callable[[SimulatedRun, float], bool] | None = None
    ) -> SimulatedRun:
        """Serve all requests."""
        steps = {
            (name, number): replica.steps
            for name, replicas in self._replicas.items()
            for number, replica in enumerate(replicas)
        }
        outcome = SimulatedRun(self._requests, steps)
        self._expect(trace, 0.0)
        if not self._agenda.run(None if over is None else lambda: over(outcome, self._agenda.now)):
            self._check_ended()
        outcome.front_seconds = sum(machine.front.busy for machine in self._machines)
        return outcome

    def _expect(self, trace: Iterator[TraceRequest], last: float) -> None:
        """Have the next request arrive at its moment."""
        request = next(trace, None)
        if request is None:
            return
        if request.arrival < last:
            raise ConfigError(f"request {len(self._requests)} of the trace comes before the one in front of it")
        self._agenda.at(request.arrival, lambda: self._arrive(request, trace))

    def _arrive(self, request: TraceRequest, trace: Iterator[TraceRequest]) -> None:
        name = request.model if self._only is None else self._only
        replicas = self._replicas.get(name)
        if replicas is None:
            raise ConfigError(f"the trace asks for model {name!r}, which is not among {', '.join(self._replicas)}")
        number = len(self._requests)
        # Of equals each in turn, lest the first has them all.
        order = [(number + place) % len(replicas) for place in range(len(replicas))]
        chosen = min(order, key=lambda place: replicas[place].num_unfinished)
        life = SimulatedRequest(request, name, chosen)
        self._requests.append(life)
        replicas[chosen].arrive(life, number)
        self._expect(trace, request.arrival)

    def _check_ended(self) -> None:
        """Raise RuntimeError if somebody waits for ever: a static batch that never fills is let go first."""
        for replicas in self._replicas.values():
            for replica in replicas:
                replica.close()
        self._agenda.run()
        left = sum(replica.num_unfinished for replicas in self._replicas.values() for replica in replicas)
        if left:
            raise RuntimeError(f"{left} simulated requests never end")


def _virtual(
    model: SequenceModel | ItemModel, machine: VirtualMachine, seed: str, shares_machine: bool
) -> VirtualModel:
    if isinstance(model, SequenceModel):
        return VirtualSequences(model, machine, seed, shares_machine)
    return VirtualItems(model, machine, seed, shares_machine)

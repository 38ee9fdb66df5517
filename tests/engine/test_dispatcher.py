"""The dispatcher: answers reach who asked, everything ends, and nothing runs when nothing happens."""

import asyncio
import gc
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest

from chairlift.core.decision import Reason
from chairlift.core.finished import ShedReason
from chairlift.core.items.item import Failure
from chairlift.core.items.limits import BatchLimits
from chairlift.engine.items.call import CallFailed, CallResult, Unwanted
from chairlift.engine.items.dispatcher import Answer, Dispatcher
from chairlift.engine.machine import Machine, MachineTurns
from chairlift.errors import DeadlineExceeded, InvalidRequest, QueueFull, RequestFailed, Unavailable


class Gate:
    """An executor whose calls end when the test says so, each by `compute`."""

    def __init__(self, compute: Callable[[Sequence[Any]], list[Any]] = list, *, is_open: bool = True) -> None:
        self.compute = compute
        self.calls: list[list[Any]] = []
        self.is_open = asyncio.Event()
        if is_open:
            self.is_open.set()

    async def run(self, payloads: Sequence[Any], on_parts: Any = None) -> CallResult:
        self.calls.append(list(payloads))
        if on_parts is not None:
            on_parts({place: f"part of {payload}" for place, payload in enumerate(payloads)})
        await self.is_open.wait()
        return CallResult(self.compute(payloads), 0.001)


def run(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run it with asyncio's checks on, and no task of the dispatcher's left behind."""

    async def checked() -> None:
        complaints: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: complaints.append(context))
        await asyncio.wait_for(main(), 20)
        await asyncio.sleep(0)
        gc.collect()
        assert complaints == []
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(checked())


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def fails_with(bad: Any, failure: Failure) -> Callable[[Sequence[Any]], list[Any]]:
    def compute(payloads: Sequence[Any]) -> list[Any]:
        if bad in payloads:
            raise CallFailed(failure, f"{bad} it was")
        return list(payloads)

    return compute


def test_what_is_submitted_in_one_turn_shares_a_batch() -> None:
    async def main() -> None:
        executor = Gate(lambda payloads: [payload * 2 for payload in payloads])
        dispatcher = Dispatcher(BatchLimits(), [executor])
        answers = await asyncio.gather(*(dispatcher.submit(number) for number in range(5)))
        assert [answer.value for answer in answers] == [0, 2, 4, 6, 8]
        assert executor.calls == [[0, 1, 2, 3, 4]]
        assert {answer.batch_size for answer in answers} == {5}
        assert all(answer.run_s == 0.001 and answer.queue_s >= 0 for answer in answers)
        assert dispatcher.num_unfinished == 0

    run(main)


def test_who_comes_while_all_are_busy_is_next_and_two_executors_share_the_work() -> None:
    async def main() -> None:
        executors = [Gate(is_open=False), Gate(is_open=False)]
        dispatcher = Dispatcher(BatchLimits(max_batch_size=2), executors)
        futures = [dispatcher.submit(name) for name in "abcde"]
        await turns()
        assert executors[0].calls + executors[1].calls == [["a", "b"], ["c", "d"]]
        futures.append(dispatcher.submit("f"))
        assert dispatcher.explain(futures[-1]).reason is Reason.SLOTS
        executors[1].is_open.set()
        await turns()
        assert executors[1].calls == [["c", "d"], ["e", "f"]]
        executors[0].is_open.set()
        assert [answer.value for answer in await asyncio.gather(*futures)] == list("abcdef")
        assert dispatcher.explain(futures[-1]) is None

    run(main)


class Streams:
    """An executor whose parts the test hands over."""

    async def run(self, payloads: Sequence[Any], on_parts: Any = None) -> CallResult:
        self.on_parts = on_parts
        return await asyncio.get_running_loop().create_future()


class Queue:
    """An executor that takes a second batch while it is at one; the test ends them, in their order."""

    queues = True

    def __init__(self) -> None:
        self.calls: list[tuple[list[Any], asyncio.Future[CallResult]]] = []

    async def run(self, payloads: Sequence[Any], on_parts: Any = None) -> CallResult:
        ends: asyncio.Future[CallResult] = asyncio.get_running_loop().create_future()
        self.calls.append((list(payloads), ends))
        return await ends

    async def taken(self, number: int) -> list[Any]:
        while len(self.calls) < number:
            await asyncio.sleep(0.001)
        return self.calls[-1][0]

    def end(self, number: int) -> None:
        payloads, ends = self.calls[number]
        ends.set_result(CallResult(payloads, 0.001, idle=0.0))


def test_the_next_batch_is_sent_ahead_and_no_third() -> None:
    async def main() -> None:
        executor = Queue()
        dispatcher = Dispatcher(BatchLimits(max_batch_size=2), [executor])
        futures = [dispatcher.submit("first")]
        assert await executor.taken(1) == ["first"]
        executor.end(0)  # from now on a call is known to take a millisecond
        futures += [dispatcher.submit(name) for name in "abcdef"]
        assert await executor.taken(2) == ["a", "b"]
        assert await executor.taken(3) == ["c", "d"]
        for _ in range(20):
            await asyncio.sleep(0.001)
        assert len(executor.calls) == 3
        executor.end(1)
        assert await executor.taken(4) == ["e", "f"]
        executor.end(2)
        executor.end(3)
        assert [answer.value for answer in await asyncio.gather(*futures)] == ["first", *"abcdef"]

    run(main)


def test_what_was_sent_ahead_to_a_process_that_dies_goes_again_whole() -> None:
    async def main() -> None:
        executor = Queue()
        dispatcher = Dispatcher(BatchLimits(max_batch_size=2), [executor])
        first = dispatcher.submit("first")
        await executor.taken(1)
        executor.end(0)
        futures = [first, *(dispatcher.submit(name) for name in "abcd")]
        await executor.taken(3)
        executor.calls[1][1].set_exception(CallFailed(Failure.DIED, "gone"))
        executor.calls[2][1].set_exception(CallFailed(Failure.UNTRIED, "gone"))
        await turns()
        seen = []
        while not all(future.done() for future in futures):
            seen.append(await executor.taken(len(seen) + 4))
            executor.end(len(seen) + 2)
            await turns()
        assert seen == [["a"], ["b"], ["c", "d"]], "the batch that failed goes again in halves, the other as it was"
        assert [answer.value for answer in await asyncio.gather(*futures)] == ["first", *"abcd"]

    run(main)


def test_deadlines_come_earlier_by_what_delivery_takes() -> None:
    async def main() -> None:
        now = 0.0
        dispatcher = Dispatcher(BatchLimits(default_timeout=1.0), [Gate(is_open=False)], lambda: now)
        answer = Answer(None, 0.0, 0.0, 1, ended=0.0)
        now = 0.1
        for _ in range(1000):
            dispatcher.delivered(answer)
        deadlines = []
        for timeout in (None, 2.0, 0.2):
            dispatcher.submit(None, timeout=timeout)
            waiters = dispatcher.scheduler._waiting.queues[None].waiting
            deadlines.append(waiters[-1].item.deadline)
        assert deadlines == pytest.approx([1.0, 2.0, 0.25], abs=0.02), "but never by more than a quarter"
        await dispatcher.close()

    run(main)


def test_a_window_ends_by_itself() -> None:
    async def main() -> None:
        executor = Gate()
        dispatcher = Dispatcher(BatchLimits(max_wait=0.02), [executor])
        first = dispatcher.submit("a")
        await turns()
        assert executor.calls == []
        second = dispatcher.submit("b")
        assert (await first).queue_s >= 0.02
        assert (await second).batch_size == 2

    run(main)


def test_cancelling_takes_an_item_out_of_the_line() -> None:
    async def main() -> None:
        executor = Gate(is_open=False)
        dispatcher = Dispatcher(BatchLimits(max_batch_size=1), [executor])
        running, waiting, other = (dispatcher.submit(name) for name in "abc")

        async def caller() -> Answer:
            return await waiting

        task = asyncio.create_task(caller())
        await turns()
        task.cancel()
        running.cancel()
        await turns()
        assert task.cancelled()
        assert dispatcher.num_unfinished == 1
        assert dispatcher.scheduler.num_waiting == 1
        executor.is_open.set()
        assert (await other).value == "c"
        assert executor.calls == [["a"], ["c"]]
        assert not other.cancel()

    run(main)


def test_one_poison_item_of_64_gets_the_error_alone() -> None:
    async def main() -> None:
        executor = Gate(fails_with(41, Failure.RAISED))
        dispatcher = Dispatcher(BatchLimits(max_batch_size=64), [executor])
        answers = await asyncio.gather(*(dispatcher.submit(number) for number in range(64)), return_exceptions=True)
        assert isinstance(answers[41], RequestFailed)
        assert str(answers[41]) == "41 it was"
        assert [answer.value for answer in answers if isinstance(answer, Answer)] == [n for n in range(64) if n != 41]
        assert len(executor.calls) <= 13

    run(main)


def test_out_of_memory_is_nobodys_error() -> None:
    def compute(payloads: Sequence[Any]) -> list[Any]:
        if len(payloads) > 16:
            raise CallFailed(Failure.OUT_OF_MEMORY, "too much")
        return list(payloads)

    async def main() -> None:
        executor = Gate(compute)
        dispatcher = Dispatcher(BatchLimits(max_batch_size=32), [executor])
        await asyncio.gather(*(dispatcher.submit(number) for number in range(96)))
        assert [len(call) for call in executor.calls] == [32, 16, 16, 16, 16, 16, 16]

    run(main)


def test_a_process_that_dies_20_times_costs_nobody_the_answer() -> None:
    async def main() -> None:
        deaths = iter(range(20))

        def compute(payloads: Sequence[Any]) -> list[Any]:
            if len(payloads) > 1 and next(deaths, None) is not None:
                raise CallFailed(Failure.DIED, "killed")
            return list(payloads)

        dispatcher = Dispatcher(BatchLimits(max_batch_size=8), [Gate(compute), Gate(compute)])
        answers = await asyncio.gather(*(dispatcher.submit(number) for number in range(200)))
        assert [answer.value for answer in answers] == list(range(200))

    run(main)


def test_exceptions_among_the_results_and_wrong_numbers_of_them() -> None:
    async def main() -> None:
        error, stop = KeyError("b"), StopIteration()
        executor = Gate(lambda payloads: [{"b": error, "c": stop}.get(payload, payload) for payload in payloads])
        dispatcher = Dispatcher(BatchLimits(), [executor])
        answers = await asyncio.gather(*(dispatcher.submit(name) for name in "abcd"), return_exceptions=True)
        assert answers[1] is error
        assert isinstance(answers[2], RequestFailed)
        assert answers[2].__cause__ is stop
        assert [answers[0].value, answers[3].value] == ["a", "d"]
        executor.compute = lambda payloads: ["one for all"]
        answers = await asyncio.gather(*(dispatcher.submit(name) for name in "abcd"), return_exceptions=True)
        assert {str(each) for each in answers} == {
            "1 results came for a batch of 4: there must be one for each, in order"
        }
        assert len(executor.calls) == 2

    run(main)


def test_an_executor_that_raises_anything_else_is_a_failed_call() -> None:
    async def main() -> None:
        def compute(payloads: Sequence[Any]) -> list[Any]:
            raise ZeroDivisionError("by zero")

        dispatcher = Dispatcher(BatchLimits(), [Gate(compute)])
        with pytest.raises(RequestFailed, match="ZeroDivisionError: by zero"):
            await dispatcher.submit("a")
        dispatcher = Dispatcher(BatchLimits(), [Gate(compute)], raise_originals=True)
        with pytest.raises(ZeroDivisionError):
            await dispatcher.submit("a")

    run(main)


def test_refusals_speak_the_languages_of_their_errors() -> None:
    async def main() -> None:
        executor = Gate(is_open=False)
        dispatcher = Dispatcher(BatchLimits(max_waiting=2, max_batch_size=1, max_batch_tokens=9), [executor])
        dispatcher.submit("a")
        await turns()
        with pytest.raises(InvalidRequest, match="max_batch_tokens"):
            dispatcher.submit("huge", size=10)
        late = dispatcher.submit("b", timeout=0.02)
        dispatcher.submit("c")
        with pytest.raises(QueueFull) as refused:
            dispatcher.submit("d")
        assert refused.value.retry_after > 0
        with pytest.raises(DeadlineExceeded):
            await late
        assert dispatcher.scheduler.num_shed == {ShedReason.QUEUE_FULL: 1, ShedReason.DEADLINE: 1}
        await dispatcher.close()

    run(main)


def test_an_earlier_deadline_moves_the_alarm_forward() -> None:
    async def main() -> None:
        dispatcher = Dispatcher(BatchLimits(max_batch_size=1), [Gate(is_open=False)])
        dispatcher.submit("a")
        dispatcher.submit("b", timeout=60.0)
        await turns()
        with pytest.raises(DeadlineExceeded):
            await dispatcher.submit("c", timeout=0.01)
        await dispatcher.close()

    run(main)


def test_who_would_be_too_late_hears_of_it_before_the_deadline() -> None:
    async def main() -> None:
        now = 100.0
        executor = Gate()
        dispatcher = Dispatcher(BatchLimits(max_batch_size=4), [executor], clock=lambda: now)

        for size in (1, 2, 4):
            futures = [dispatcher.submit(number) for number in range(size)]
            await turns(1)
            now += 0.1
            await asyncio.gather(*futures)
        executor.is_open.clear()
        for instance in dispatcher.scheduler.instances.values():
            for _ in range(20):
                instance.time.observe(0.1, 0.1, 1, 1)
        dispatcher.submit("running")
        await turns()
        hopeless = dispatcher.submit("hopeless", timeout=0.3)
        now += 0.25
        dispatcher.submit("another", timeout=0.31)
        dispatcher._pump()
        with pytest.raises(QueueFull):
            await hopeless
        await dispatcher.close()

    run(main)


def test_parts_of_a_stream_reach_their_caller() -> None:
    async def main() -> None:
        heard: list[str] = []
        dispatcher = Dispatcher(BatchLimits(), [Gate()])
        futures = [dispatcher.submit("a"), dispatcher.submit("b", on_part=heard.append)]
        await asyncio.gather(*futures)
        assert heard == ["part of b"]

    run(main)


def test_parts_of_items_that_have_gone_go_nowhere_and_once_all_have_the_stream_is_told() -> None:
    async def main() -> None:
        executor = Streams()
        dispatcher = Dispatcher(BatchLimits(), [executor])
        heard: list[str] = []
        whole, *streamed = [dispatcher.submit("whole"), *(dispatcher.submit(n, on_part=heard.append) for n in range(2))]
        await turns()
        assert executor.on_parts({0: "a", 1: "b", 2: "c"}) == {0: "a"}
        streamed[0].cancel()
        assert executor.on_parts({1: "d", 2: "e"}) == {}
        assert heard == ["b", "c", "e"]
        whole.cancel()
        assert executor.on_parts({0: "f"}) == {}
        streamed[1].cancel()
        with pytest.raises(Unwanted):
            executor.on_parts({0: "g", 1: "h", 2: "i"})
        assert heard == ["b", "c", "e"]
        await dispatcher.close()

    run(main)


class SentAhead(Streams):
    """The same, which takes a second batch while it is at one."""

    queues = True


@pytest.mark.parametrize("kind", [Streams, SentAhead])
def test_a_stream_leaves_the_machine_to_other_models_from_its_first_part_on(kind: type[Streams]) -> None:
    """It may have no end. Until then the machine is the model's own, as for any call."""

    async def main() -> None:
        machine, executor, gate = Machine(), kind(), Gate()
        streaming = Dispatcher(BatchLimits(), [executor], turns=MachineTurns(machine, "streams", 1.0))
        other = Dispatcher(BatchLimits(), [gate], turns=MachineTurns(machine, "other", 1.0))
        heard: list[str] = []
        stream = streaming.submit("a", on_part=heard.append)
        await turns()
        first, on_parts = other.submit("b"), executor.on_parts
        await turns(20)
        assert gate.calls == []
        on_parts({0: "one"})
        assert (await first).value == "b"
        # Who waits for the same executor does not hold it either.
        behind = streaming.submit("c", on_part=heard.append)
        await turns(20)
        assert (await other.submit("d")).value == "d"
        on_parts({0: "two"})
        assert (await other.submit("e")).value == "e"
        assert heard == ["one", "two"]
        assert [each.done() for each in (stream, behind)] == [False, False]
        for each in (streaming, other):
            await each.close()
        for each in (stream, behind):
            assert isinstance(each.exception(), Unavailable)

    run(main)


def test_drain_finishes_what_is_here_and_close_what_is_not() -> None:
    async def main() -> None:
        executor = Gate(is_open=False)
        dispatcher = Dispatcher(BatchLimits(max_wait=60.0, max_batch_size=2), [executor])
        futures = [dispatcher.submit(name) for name in "abc"]
        draining = asyncio.create_task(dispatcher.drain(10))
        await turns()
        with pytest.raises(Unavailable, match="draining"):
            dispatcher.submit("d")
        executor.is_open.set()
        await draining
        assert [future.result().value for future in futures] == list("abc")
        assert executor.calls == [["a", "b"], ["c"]], "nobody waits for company that can not come"

        stuck = Dispatcher(BatchLimits(max_batch_size=1), [Gate(is_open=False)])
        futures = [stuck.submit("a"), stuck.submit("b", timeout=60.0)]
        await stuck.drain(0.01)
        await stuck.close()
        for future in futures:
            with pytest.raises(Unavailable):
                future.result()
        with pytest.raises(Unavailable):
            stuck.submit("c")

    run(main)


def test_lost_instances_get_no_work() -> None:
    async def main() -> None:
        executors = [Gate(), Gate()]
        dispatcher = Dispatcher(BatchLimits(max_batch_size=1), executors)
        dispatcher.instance_lost(0)
        await asyncio.gather(*(dispatcher.submit(name) for name in "ab"))
        assert executors[1].calls == [["a"], ["b"]]
        dispatcher.instance_lost(1)
        waiting = dispatcher.submit("c")
        await turns()
        assert not waiting.done()
        dispatcher.instance_back(0)
        await waiting
        assert executors[0].calls == [["c"]]

    run(main)


@pytest.mark.parametrize("where", ["schedule", "update"])
def test_an_error_of_its_own_is_told_to_all_and_the_next_are_served(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        executor = Gate(is_open=False)
        dispatcher = Dispatcher(BatchLimits(max_batch_size=1), [executor])
        running, waiting = dispatcher.submit("a"), dispatcher.submit("b")
        await turns()

        def broken(*args: Any) -> None:
            raise AssertionError("a mistake")

        monkeypatch.setattr(dispatcher.scheduler, where, broken)
        if where == "update":
            executor.is_open.set()
        else:
            dispatcher._pump()
        for future in (running, waiting):
            with pytest.raises(RequestFailed, match=r"internal error.*a mistake"):
                await future
        after = dispatcher.submit("c")
        await turns()
        assert len(executor.calls) == (2 if where == "update" else 1), "it is not given two calls at once"
        executor.is_open.set()
        assert (await after).value == "c"

    run(main)


def test_a_call_that_somebody_cancels_fails_its_items_and_frees_the_executor() -> None:
    async def main() -> None:
        executor = Gate(is_open=False)
        dispatcher = Dispatcher(BatchLimits(max_batch_size=1), [executor])
        first = dispatcher.submit("a")
        await turns()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            if task.get_name() == "batch":
                task.cancel()
        with pytest.raises(Unavailable):
            await first
        executor.is_open.set()
        assert (await dispatcher.submit("b")).value == "b"

    run(main)


def test_a_call_that_raises_a_cancellation_leaves_nobody_waiting() -> None:
    async def main() -> None:
        def compute(payloads: Sequence[Any]) -> list[Any]:
            if "a" in payloads:
                raise asyncio.CancelledError
            return list(payloads)

        dispatcher = Dispatcher(BatchLimits(max_batch_size=1), [Gate(compute)])
        first, second = dispatcher.submit("a"), dispatcher.submit("b")
        with pytest.raises(Unavailable, match="cancelled"):
            await first
        assert (await asyncio.wait_for(second, 5)).value == "b"

    run(main)


def test_batches_are_reported() -> None:
    async def main() -> None:
        seen = []
        dispatcher = Dispatcher(
            BatchLimits(), [Gate()], on_batch=lambda batch, outcome: seen.append((len(batch.items), outcome.seconds))
        )
        await asyncio.gather(dispatcher.submit("a"), dispatcher.submit("b"))
        assert seen == [(2, 0.001)]

    run(main)


def test_nothing_is_scheduled_when_nothing_happens() -> None:
    async def main() -> None:
        dispatcher = Dispatcher(BatchLimits(), [Gate()])
        await dispatcher.submit("a")
        await turns()
        asked = []
        original = dispatcher.scheduler.schedule
        dispatcher.scheduler.schedule = lambda now: asked.append(now) or original(now)  # type: ignore[method-assign]
        await asyncio.sleep(0.05)
        assert asked == []

    run(main)

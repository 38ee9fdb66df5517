"""`@chairlift.batched`, as its users meet it."""

import asyncio
import concurrent.futures
import copy
import gc
import inspect
import os
import pickle
import pydoc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import chairlift
from chairlift.errors import DeadlineExceeded, RequestFailed
from chairlift.library import batching


@chairlift.batched()
def double(items: list[int]) -> list[int]:
    """Twice each."""
    return [item * 2 for item in items]


def at_once(function: Callable[[Any], Any], items: list[Any]) -> list[Any]:
    """Call from as many threads; exceptions are results."""

    def call(item: Any) -> Any:
        try:
            return function(item)
        except Exception as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(len(items)) as threads:
        return list(threads.map(call, items))


def test_a_function_is_called_with_one_item() -> None:
    assert double(4) == 8
    assert double.__name__ == "double"
    assert double.__doc__ == "Twice each."


def test_a_bare_decorator_has_the_defaults() -> None:
    @chairlift.batched
    def triple(items: list[int]) -> list[int]:
        return [item * 3 for item in items]

    @chairlift.batched
    async def atriple(items: list[int]) -> list[int]:
        return [item * 3 for item in items]

    async def body() -> int:
        return await atriple(5)

    assert (triple(4), asyncio.run(body())) == (12, 15)


def test_callers_in_many_threads_share_batches() -> None:
    sizes, gate = [], threading.Event()

    @chairlift.batched(max_batch_size=16)
    def echo(items: list[int]) -> list[int]:
        sizes.append(len(items))
        gate.wait(10)
        return items

    futures = [echo.submit(number) for number in range(33)]
    gate.set()
    assert [future.result(10) for future in futures] == list(range(33))
    assert max(sizes) == 16
    assert at_once(echo, list(range(20))) == list(range(20))


def test_event_loops_await_a_sync_function() -> None:
    async def main() -> list[int]:
        return await asyncio.gather(*(double.acall(number) for number in range(40)))

    expected = [number * 2 for number in range(40)]
    assert asyncio.run(main()) == expected
    assert at_once(lambda _: asyncio.run(main()), [0, 1]) == [expected, expected]


def test_a_coroutine_function_is_awaited_on_its_callers_loop() -> None:
    sizes, loops = [], set()

    @chairlift.batched(max_batch_size=8)
    async def triple(items: list[int]) -> list[int]:
        sizes.append(len(items))
        loops.add(asyncio.get_running_loop())
        await asyncio.sleep(0)
        return [item * 3 for item in items]

    async def main() -> list[int]:
        return await asyncio.gather(*(triple(number) for number in range(24)))

    assert at_once(lambda _: asyncio.run(main()), [0, 1]) == [[number * 3 for number in range(24)]] * 2
    assert sizes == [8] * 6
    assert len(loops) == 2


def test_loops_of_two_threads_may_be_the_first_at_the_same_time() -> None:
    @chairlift.batched
    async def echo(items: list[int]) -> list[int]:
        return items

    called, done = threading.Event(), threading.Event()
    kept: list[bool] = []

    async def call_elsewhere() -> None:
        assert await echo(2) == 2
        called.set()
        await asyncio.to_thread(done.wait, 10)
        kept.append(asyncio.get_running_loop() in echo._dispatchers)

    class ClosedLoop:
        """A loop that was there before. While one thread looks whether it is closed, another comes with its own."""

        other: threading.Thread | None = None

        def is_closed(self) -> bool:
            if self.other is None:
                self.other = threading.Thread(target=lambda: asyncio.run(call_elsewhere()))
                self.other.start()
                called.wait(0.1)
            return True

    closed = ClosedLoop()
    echo._dispatchers[closed] = None

    async def call_here() -> int:
        return await echo(1)

    assert asyncio.run(call_here()) == 1
    called.wait(10)
    done.set()
    assert closed.other is not None
    closed.other.join(10)
    assert kept == [True]
    assert closed not in echo._dispatchers


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_of_64_only_the_culprit_gets_its_own_exception(kind: str) -> None:
    calls: list[int] = []
    raised: list[Exception] = []

    def compute(items: list[int]) -> list[int]:
        calls.append(len(items))
        if 13 in items:
            raised.append(ValueError("13 it was"))
            raise raised[-1]
        return items

    if kind == "sync":
        sync = chairlift.batched(max_batch_size=64)(compute)
        call: Callable[[int], Any] = sync.acall
    else:

        async def slow(items: list[int]) -> list[int]:
            return compute(items)

        call = chairlift.batched(max_batch_size=64)(slow)

    async def main() -> list[Any]:
        return await asyncio.gather(*(call(number) for number in range(64)), return_exceptions=True)

    answers = asyncio.run(main())
    assert answers[13] is raised[-1]
    assert [answer for answer in answers if isinstance(answer, int)] == [n for n in range(64) if n != 13]
    if kind == "async":  # else the first may have left before the rest had come
        assert len(calls) <= 13


def test_without_bisect_each_item_runs_once() -> None:
    calls = []

    @chairlift.batched(bisect=False)
    def write(items: list[int]) -> list[int]:
        calls.append(items)
        raise OSError("disk full")

    answers = at_once(write, [1, 2, 3])
    assert {type(answer) for answer in answers} == {OSError}
    assert sorted(item for call in calls for item in call) == [1, 2, 3]


def test_an_exception_among_the_results_is_one_callers_alone() -> None:
    @chairlift.batched()
    def check(items: list[int]) -> list[int | KeyError]:
        return [KeyError(item) if item == 2 else item for item in items]

    answers = at_once(check, [1, 2, 3])
    assert answers[0::2] == [1, 3]
    assert isinstance(answers[1], KeyError)


@pytest.mark.parametrize(
    ("results", "says"),
    [([1, 2, 3], "3 results came for a batch of 1"), (None, "NoneType"), ({"a": 1}, "dict"), ("a", "str")],
)
def test_wrong_results_are_a_clear_error(results: Any, says: str) -> None:
    with pytest.raises(RequestFailed, match=says):
        chairlift.batched()(lambda items: results)(1)


def test_out_of_memory_is_nobodys_error() -> None:
    sizes = []

    @chairlift.batched(max_batch_size=32)
    async def greedy(items: list[int]) -> list[int]:
        sizes.append(len(items))
        if len(items) > 16:
            raise MemoryError
        return items

    async def main() -> list[int]:
        return await asyncio.gather(*(greedy(number) for number in range(64)))

    assert asyncio.run(main()) == list(range(64))
    assert sizes == [32, 16, 16, 16, 16]


def test_arrays_are_stacked_and_results_taken_apart() -> None:
    seen = []

    @chairlift.batched(stack=True)
    async def scale(batch: np.ndarray) -> np.ndarray:
        seen.append(batch.shape)
        return batch * 2

    async def main() -> list[Any]:
        inputs = [np.full(2, 1.0), np.full(3, 2.0), np.full(2, 3.0)]
        return await asyncio.gather(*(scale(each) for each in inputs))

    answers = asyncio.run(main())
    assert [answer.tolist() for answer in answers] == [[2, 2], [4, 4, 4], [6, 6]]
    assert sorted(seen) == [(1, 3), (2, 2)]


def test_tensors_are_stacked_as_tensors() -> None:
    torch = pytest.importorskip("torch")

    @chairlift.batched(stack=True)
    def scale(batch: Any) -> Any:
        assert isinstance(batch, torch.Tensor)
        return batch * 2

    assert scale(torch.ones(2)).tolist() == [2, 2]


def test_cancelling_takes_an_item_out_of_the_line() -> None:
    seen, gate, begun = [], threading.Event(), threading.Event()

    @chairlift.batched(max_batch_size=1)
    def slow(items: list[str]) -> list[str]:
        seen.extend(items)
        begun.set()
        gate.wait(10)
        return items

    async def main() -> None:
        first = slow.submit("a")
        assert begun.wait(10)
        task = asyncio.create_task(slow.acall("b"))
        last = slow.submit("c")
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        gate.set()
        assert await asyncio.wrap_future(last) == "c"
        assert await asyncio.wrap_future(first) == "a"
        assert task.cancelled()

    asyncio.run(main())
    assert seen == ["a", "c"]


@pytest.mark.parametrize(
    "settings", [{"call_timeout_ms": 0}, {"call_timeout_ms": float("nan")}, {"workers": 1.5}, {"workers": 0}]
)
def test_absurd_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        chairlift.batched(**settings)(lambda items: items)


def test_deadlines_and_calls_that_hang() -> None:
    gate = threading.Event()

    @chairlift.batched(max_batch_size=1, call_timeout_ms=50, retries=1)
    def hang(items: list[str]) -> list[str]:
        if items == ["hang"]:
            gate.wait(10)
        return items

    with pytest.raises(RequestFailed, match="took more than"):
        hang("hang")
    assert hang("fine") == "fine"
    gate.set()
    gate.clear()

    @chairlift.batched(max_batch_size=1)
    def slow(items: list[str]) -> list[str]:
        gate.wait(10)
        return items

    first = slow.submit("a")
    with pytest.raises(DeadlineExceeded):
        slow("b", timeout_ms=20)
    gate.set()
    assert first.result(10) == "a"


class Model:
    def __init__(self, factor: int) -> None:
        self.factor = factor

    @chairlift.batched(max_batch_size=4)
    def scale(self, items: list[int]) -> list[int]:
        return [item * self.factor for item in items]

    @chairlift.batched()
    async def add(self, items: list[int]) -> list[int]:
        return [item + self.factor for item in items]


def test_each_object_has_its_own_batcher() -> None:
    two, three = Model(2), Model(3)
    assert (two.scale(5), three.scale(5)) == (10, 15)
    assert two.scale is two.scale
    assert two.scale is not three.scale

    async def main() -> tuple[int, int]:
        return await two.add(5), await three.add(5)

    assert asyncio.run(main()) == (7, 8)
    for twin in (copy.deepcopy(two), pickle.loads(pickle.dumps(two))):
        twin.factor = 7
        assert twin.scale(1) == 7
    assert two.scale(1) == 2
    assert pickle.loads(pickle.dumps(double)) is double


def test_an_object_and_its_thread_go_when_nobody_needs_them() -> None:
    model = Model(2)
    model.scale(1)
    thread = model.scale._home[2][0].thread
    gone = weakref.ref(model)
    del model
    for _ in range(100):
        gc.collect()
        if gone() is None:
            break
        double(1)  # the background may still be putting the last call away
    assert gone() is None
    thread.join(5)
    assert not thread.is_alive()


def test_calling_it_from_inside_itself_does_not_hang() -> None:
    @chairlift.batched()
    def recursive(items: list[int]) -> list[int]:
        return [recursive(item) for item in items]

    with pytest.raises(RuntimeError, match="from inside itself"):
        recursive(1)


def test_what_can_not_be_batched_is_refused() -> None:
    def generate(items: list[int]) -> Any:
        yield from items

    with pytest.raises(TypeError, match="generator"):
        chairlift.batched()(generate)
    with pytest.raises(ValueError, match="max_batch_size"):
        chairlift.batched(max_batch_size=0)
    with pytest.raises(ValueError, match="workers"):
        chairlift.batched(workers=0)


def run_python(code: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert run.stderr == ""
    return run.stdout.strip()


PROGRAM = """
import os, sys, threading, time
import chairlift
@chairlift.batched()
def double(items):
    return [item * 2 for item in items]
assert threading.active_count() == 1, "no thread before the first call"
assert double(2) == 4
"""


@pytest.mark.processes
def test_a_program_with_batchers_ends_and_never_loads_torch() -> None:
    assert run_python(PROGRAM + "assert 'torch' not in sys.modules; print('done')") == "done"


@pytest.mark.processes
def test_a_program_ends_though_a_call_still_runs() -> None:
    hanging = (
        "\nhang = chairlift.batched()(lambda items: time.sleep(1000)); hang.submit(1); time.sleep(0.1); print('done')"
    )
    assert run_python(PROGRAM + hanging) == "done"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.processes
def test_it_works_in_a_process_that_was_forked() -> None:
    # Python warns of any fork beside threads from 3.12 on.
    forking = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)
child = os.fork()
if child == 0:
    assert double(3) == 6
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert double(4) == 8
print("done")
"""
    assert run_python(PROGRAM + forking) == "done"


SNIPPET = """
import numpy as np
import chairlift

@chairlift.batched(max_batch_size=8)
def lengths(texts: list[str]) -> list[int]:
    return [len(text) for text in texts]

@chairlift.batched()
async def alengths(texts: list[str]) -> list[int]:
    return [len(text) for text in texts]

class Model:
    @chairlift.batched()
    def score(self, texts: list[str]) -> list[float]:
        return [0.0 for _ in texts]

@chairlift.batched()
def vectors(texts: list[str]) -> np.ndarray:
    return np.zeros((len(texts), 2))

async def main() -> None:
    reveal_type(lengths("a"))
    reveal_type(await lengths.acall("a"))
    reveal_type(lengths.submit("a").result())
    reveal_type(await alengths("a"))
    reveal_type(Model().score("a"))
    reveal_type(vectors("a"))
    lengths(1)
    chairlift.batched(max_batch=8)
    chairlift.batched(max_wait_ms="long")

@chairlift.batched(stack=True, retries=0)
def stacked(images: np.ndarray) -> np.ndarray:
    return images

reveal_type(stacked(np.zeros(3)))

@chairlift.batched
def bare(texts: list[str]) -> list[int]:
    return [len(text) for text in texts]

reveal_type(bare("a"))
"""


@pytest.mark.processes
def test_checkers_know_the_types(tmp_path: Path) -> None:
    snippet = tmp_path / "snippet.py"
    snippet.write_text(SNIPPET)
    # As strict as the project's own run, whose cache it then shares: without, it takes a minute and a half.
    run = subprocess.run(
        [sys.executable, "-m", "mypy", str(snippet)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    revealed = [line.split("Revealed type is ")[1] for line in run.stdout.splitlines() if "Revealed" in line]
    names = [each.strip('"').removeprefix("builtins.") for each in revealed]
    assert names == ["int", "int", "int", "int", "float", "Any", "Any", "int"], run.stdout
    errors = [line for line in run.stdout.splitlines() if "error:" in line]
    assert len(errors) == 3, run.stdout
    assert 'incompatible type "int"; expected "str"' in errors[0]
    assert 'did you mean "max_batch_size"?' in errors[1]
    assert "No overload variant" in errors[2]


def test_help_shows_every_setting_with_its_default() -> None:
    shown = inspect.signature(chairlift.batched).parameters
    assert shown.keys() == {"function", "stack", *batching.BatchedSettings.__annotations__}
    assert str(shown["max_batch_size"]) == "max_batch_size: int = 32"
    assert str(shown["timeout_ms"]) == "timeout_ms: float | None = None"
    assert "priority_ageing_ms: float = 1000.0" in pydoc.render_doc(chairlift.batched, renderer=pydoc.plaintext)


def test_settings_that_there_are_not_are_refused_by_name() -> None:
    given: Any = {"max_batch": 8}
    with pytest.raises(TypeError, match=r"no setting max_batch; it takes stack, max_batch_size, "):
        chairlift.batched(**given)
    with pytest.raises(TypeError, match="takes a function, and settings by keyword, not 8"):
        chairlift.batched(8)  # type: ignore[call-overload]

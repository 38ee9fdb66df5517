"""The library in event loops, on the demo model."""

import asyncio
import dataclasses
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from support.encoder_factory import encoder_folder
from support.model_factory import edited_folder
from support.text_tokenizers import build

import chairlift
from chairlift.core.sequences.sampling_params import SamplingParams, StructuredOutputsParams
from chairlift.core.sequences.step import Step, StepResult
from chairlift.demo import demo_path
from chairlift.engine.sequences.messages import SequenceUpdate
from chairlift.errors import ConfigError, InvalidRequest, Unavailable
from chairlift.library.outputs import RequestOutput

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
ENDLESS = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)


@pytest.fixture(scope="module")
def llm() -> Iterator[chairlift.AsyncLLM]:
    model = chairlift.AsyncLLM(demo_path(), max_num_seqs=8, kv_cache_gb=0.1)
    yield model
    model.shutdown()


async def read(llm: chairlift.AsyncLLM, prompt: Any, params: SamplingParams, name: str) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, params, name)]


async def until_idle(llm: chairlift.AsyncLLM) -> None:
    """Wait until the engine has nobody left."""
    engine = llm._llm.engine
    while engine.num_unfinished or engine.num_unprepared or llm._thread._routes:
        await asyncio.sleep(0.001)
    assert llm._thread.readers == {}


def test_outputs_grow_to_what_the_library_gives(llm: chairlift.AsyncLLM) -> None:
    outputs = asyncio.run(read(llm, "The chairlift", GREEDY, "mine"))
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    assert lengths == sorted(set(lengths))
    assert lengths[-1] == 12
    assert all(
        output.outputs[0].text == outputs[-1].outputs[0].text[: len(output.outputs[0].text)] for output in outputs
    )
    assert outputs[0].prompt == "The chairlift"
    assert {output.request_id for output in outputs} == {"mine"}
    other = chairlift.LLM(demo_path(), kv_cache_gb=0.1)
    expected = other.generate("The chairlift", GREEDY, use_tqdm=False)[0]
    other.close()
    assert (outputs[-1].outputs, outputs[-1].prompt_token_ids) == (expected.outputs, expected.prompt_token_ids)


def test_all_at_once_share_steps(llm: chairlift.AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several at once go in steps together, computed in one thread that is not the loop's."""
    execute = llm._llm.engine.runner.execute
    sizes, threads = [], set()
    begun = threading.Event()

    def watched(step: Step) -> StepResult:
        begun.wait(30)
        sizes.append(len(step.num_tokens))
        threads.add(threading.get_ident())
        return execute(step)

    async def all_of_them() -> list[list[RequestOutput]]:
        tasks = [asyncio.create_task(read(llm, f"Number {i}", GREEDY, f"{i}")) for i in range(6)]
        # The first step waits until all have been asked for, and the loop goes on meanwhile.
        while len(llm._thread._routes) + llm._thread._inbox.qsize() < 6:
            await asyncio.sleep(0.001)
        begun.set()
        return await asyncio.gather(*tasks)

    with monkeypatch.context() as patch:
        patch.setattr(llm._llm.engine.runner, "execute", watched)
        found = asyncio.run(all_of_them())
    assert max(sizes) == 6
    assert len(threads) == 1
    assert threading.get_ident() not in threads
    alone = [asyncio.run(read(llm, f"Number {i}", GREEDY, "x"))[-1].outputs[0].token_ids for i in range(6)]
    assert [outputs[-1].outputs[0].token_ids for outputs in found] == alone


def test_samples_logprobs_and_stop_strings(llm: chairlift.AsyncLLM) -> None:
    plain = asyncio.run(read(llm, "Once", GREEDY, "a"))[-1].outputs[0]
    stop = plain.text[4:7]
    params = SamplingParams(temperature=0, max_tokens=12, n=2, stop=stop, logprobs=2, ignore_eos=True)
    last = asyncio.run(read(llm, "Once", params, "a"))[-1]
    assert [sample.text for sample in last.outputs] == [plain.text[: plain.text.index(stop)]] * 2
    assert [(sample.finish_reason, sample.stop_reason) for sample in last.outputs] == [("stop", stop)] * 2
    assert all(sample.logprobs and len(sample.logprobs) == len(sample.token_ids) for sample in last.outputs)
    asyncio.run(until_idle(llm))


def test_a_sample_that_ended_early_takes_nothing_more(llm: chairlift.AsyncLLM) -> None:
    """The engine hears of a stop string a step late, and the other samples are not done by that."""
    opened = llm._llm.sequences.open_output("Once", SamplingParams(n=2, stop="a", ignore_eos=True))
    [token] = llm.tokenizer.encode("a")
    assert opened.take(0, SequenceUpdate(opened.requests[0].id, [token]))
    assert not opened.take(0, SequenceUpdate(opened.requests[0].id, [token]))
    assert not opened.output.finished
    assert opened.take(1, SequenceUpdate(opened.requests[1].id, [token]))
    assert opened.output.finished


def test_structured_outputs_are_honoured_and_refused(llm: chairlift.AsyncLLM) -> None:
    async def choose() -> list[str]:
        wanted = [StructuredOutputsParams(choice=[f"yes {i}", f"no {i}"]) for i in range(3)]
        params = [SamplingParams(max_tokens=20, structured_outputs=each) for each in wanted]
        found = await asyncio.gather(*(read(llm, "Is it?", each, f"{i}") for i, each in enumerate(params)))
        return [outputs[-1].outputs[0].text for outputs in found]

    assert all(text in (f"yes {i}", f"no {i}") for i, text in enumerate(asyncio.run(choose())))
    for wrong in ({"grammar": "start: nothing"}, {"regex": "("}, {"json": {"type": "strnig"}}):
        params = SamplingParams(structured_outputs=StructuredOutputsParams(**wrong))  # type: ignore[arg-type]
        with pytest.raises(InvalidRequest):
            asyncio.run(read(llm, "Is it?", params, "wrong"))
    asyncio.run(until_idle(llm))


def test_a_cancelled_task_and_a_loop_that_is_left_abort(llm: chairlift.AsyncLLM) -> None:
    async def cancelled() -> None:
        begun = asyncio.Event()

        async def endless() -> None:
            async for _ in llm.generate("Once", ENDLESS, "a"):
                begun.set()

        task = asyncio.create_task(endless())
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await until_idle(llm)

    async def left() -> None:
        async for output in llm.generate("Once", ENDLESS, "a"):
            assert not output.finished
            break
        await until_idle(llm)

    asyncio.run(cancelled())
    asyncio.run(left())
    assert llm._llm.engine.scheduler.pool.num_used == 0


def test_abort_ends_what_is_read(llm: chairlift.AsyncLLM) -> None:
    async def aborted(names: str | list[str]) -> RequestOutput:
        last = None
        async for output in llm.generate("Once", ENDLESS, "mine"):
            last = output
            await llm.abort(names)
        assert last is not None
        await until_idle(llm)
        return last

    for names in ("mine", ["nobody", "mine"]):
        last = asyncio.run(aborted(names))
        assert last.finished
        assert last.outputs[0].finish_reason == "abort"
        assert 0 < len(last.outputs[0].token_ids) < 400
    asyncio.run(llm.abort("mine"))


def test_abort_does_not_wait_for_who_reads(llm: chairlift.AsyncLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = llm._llm.engine
    abort, forgotten = engine.abort, []

    def noted(request_ids: Iterable[str]) -> None:
        forgotten.append(list(request_ids))
        abort(request_ids)

    async def go() -> list[RequestOutput]:
        outputs = []
        async for output in llm.generate("Once", ENDLESS, "mine"):
            outputs.append(output)
            if not output.finished:
                await llm.abort("mine")
                while engine.num_unfinished:
                    await asyncio.sleep(0.001)
                assert forgotten, "it went on until it ended by itself"
        await until_idle(llm)
        return outputs

    with monkeypatch.context() as patch:
        patch.setattr(engine, "abort", noted)
        last = asyncio.run(go())[-1]
    assert (last.finished, last.outputs[0].finish_reason) == (True, "abort")


def test_what_is_wrong_is_refused_by_name(llm: chairlift.AsyncLLM) -> None:
    async def twice() -> None:
        async for _ in llm.generate("Once", ENDLESS, "a"):
            with pytest.raises(InvalidRequest, match="'a' is running already"):
                await read(llm, "Once", GREEDY, "a")
            break

    asyncio.run(twice())
    for prompt, message in (
        ([5, 10**6], "outside the vocabulary"),
        ([], "at least 1 token"),
        ({"text": "x"}, "prompt"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            asyncio.run(read(llm, prompt, GREEDY, "a"))

    async def with_more(**more: Any) -> int:
        return len([output async for output in llm.generate("Once", GREEDY, "a", **more)])

    assert asyncio.run(with_more(lora_request=None, trace_headers=None, priority=1))
    for more in ({"lora_request": "x"}, {"anything": None}):
        with pytest.raises(TypeError, match=f"generate takes no {next(iter(more))}"):
            asyncio.run(with_more(**more))
    for method in ("embed", "classify"):
        with pytest.raises(InvalidRequest, match="writes texts"):
            asyncio.run(getattr(llm, method)("x"))
    with pytest.raises(ConfigError, match="no folder"):
        chairlift.AsyncLLM("no/such")
    asyncio.run(until_idle(llm))


@dataclasses.dataclass
class EngineArgs:
    """As vLLM's are."""

    model: str = "some/model"
    tensor_parallel_size: int = 1
    max_num_seqs: int | None = None
    enforce_eager: bool = False
    hf_overrides: dict[str, Any] = dataclasses.field(default_factory=dict)
    kv_cache_gb: float | None = None


def test_engine_args_are_taken_or_refused_by_name() -> None:
    for given in (EngineArgs(demo_path(), max_num_seqs=3, kv_cache_gb=0.05), {"model": demo_path(), "max_num_seqs": 3}):
        made = chairlift.AsyncLLM.from_engine_args(given)
        assert made._llm.config.max_num_seqs == 3
        made.shutdown()
    with pytest.raises(
        TypeError, match="unknown setting tensor_parallel_size; leave it out: a model runs on one device"
    ):
        chairlift.AsyncLLM.from_engine_args(EngineArgs(demo_path(), tensor_parallel_size=2))


def test_after_the_end_there_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reads when the engine is shut down, or fails for good, is told so; so is who comes later."""

    async def watch(llm: chairlift.AsyncLLM, end: Any) -> None:
        async def read_on() -> None:
            async for _ in llm.generate("Once", ENDLESS, "a"):
                end()

        await llm.check_health()
        for wanted in (read_on(), llm.check_health(), read(llm, "Once", GREEDY, "b"), llm.embed("x")):
            with pytest.raises(Unavailable, match="the engine"):
                await wanted
        assert not llm.is_running

    def broken() -> None:
        raise SystemError("no more")

    llm = chairlift.AsyncLLM(demo_path(), kv_cache_gb=0.05)
    asyncio.run(watch(llm, llm.shutdown))
    assert not llm.errored
    assert not llm._thread.is_alive()
    llm = chairlift.AsyncLLM(demo_path(), kv_cache_gb=0.05)
    asyncio.run(watch(llm, lambda: monkeypatch.setattr(llm._llm.engine, "step", broken)))
    assert llm.errored
    llm.shutdown()


def test_one_that_nobody_holds_is_shut_down() -> None:
    llm = chairlift.AsyncLLM(demo_path(), kv_cache_gb=0.05)
    thread = llm._thread
    del llm
    thread.join(30)
    assert not thread.is_alive()


def test_texts_are_embedded_in_the_thread(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = edited_folder(tmp_path_factory.mktemp("model") / "m", encoder_folder("bert", 0))
    build("wordpiece").save(str(folder / "tokenizer.json"))
    llm, plain = chairlift.AsyncLLM(folder), chairlift.LLM(folder)

    async def several() -> list[Any]:
        return await asyncio.gather(
            llm.embed(["hello world", "hello"]), llm.embed("the fox"), llm.score("hello", ["hello", "the fox"])
        )

    two, one, scores = asyncio.run(several())
    expected = plain.embed(["hello world", "hello", "the fox"], use_tqdm=False)
    assert [each.outputs.embedding for each in (*two, *one)] == [
        pytest.approx(each.outputs.embedding, abs=1e-5) for each in expected
    ]
    assert scores[0].outputs.score == pytest.approx(1, abs=1e-5)
    with pytest.raises(InvalidRequest, match="generates nothing"):
        asyncio.run(read(llm, "x", GREEDY, "a"))
    with pytest.raises(InvalidRequest, match="its task is embed"):
        asyncio.run(llm.classify("x"))
    llm.shutdown()
    plain.close()

"""The library, on the demo model."""

from collections.abc import Iterator

import pytest

import chairlift
from chairlift.core.sequences.request import Request
from chairlift.core.sequences.sampling_params import SamplingParams
from chairlift.core.sequences.step import Step, StepResult
from chairlift.demo import demo_path
from chairlift.errors import ConfigError, InvalidRequest
from chairlift.library.llm import LLM

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    model = LLM(demo_path(), max_num_seqs=8, kv_cache_gb=0.1)
    yield model
    model.close()


def test_all_forms_of_prompt_give_the_same(llm: LLM) -> None:
    ids = llm.tokenizer.encode("The chairlift")
    forms = ["The chairlift", ids, tuple(ids), {"prompt_token_ids": ids}, {"prompt": "The chairlift"}]
    outputs = llm.generate(forms, GREEDY, use_tqdm=False)
    assert len({output.outputs[0].text for output in outputs}) == 1
    assert all(output.prompt_token_ids == ids for output in outputs)
    assert [output.prompt for output in outputs] == ["The chairlift", None, None, None, "The chairlift"]
    assert llm.generate(ids, GREEDY, use_tqdm=False)[0].outputs == outputs[0].outputs
    assert llm.generate("The chairlift", GREEDY, use_tqdm=False)[0].outputs == outputs[0].outputs
    assert llm.generate([], GREEDY, use_tqdm=False) == []


def test_beam_search_finds_the_likeliest_wholes(llm: LLM) -> None:
    ids = llm.tokenizer.encode("The chairlift")
    params = chairlift.BeamSearchParams(beam_width=4, max_tokens=5, ignore_eos=True)
    ((first, second), again) = (llm.beam_search(prompts, params) for prompts in (["The chairlift", "A"], ids))
    assert [beam.tokens for beam in again[0].sequences] == [beam.tokens for beam in first.sequences]
    assert second != first
    scores = [beam.cum_logprob for beam in first.sequences]
    assert scores == sorted(scores, reverse=True)
    assert len({tuple(beam.tokens) for beam in first.sequences}) == 4
    greedy = llm.generate(ids, SamplingParams(temperature=0, max_tokens=5, logprobs=0, ignore_eos=True), use_tqdm=False)
    assert scores[0] >= (greedy[0].outputs[0].cumulative_logprob or 0) - 1e-4
    # What each token adds is what it has as part of the prompt.
    for beam in first.sequences:
        asked = SamplingParams(max_tokens=1, prompt_logprobs=0)
        (output,) = llm.generate([[*ids, *beam.tokens]], asked, use_tqdm=False)
        entries = (output.prompt_logprobs or [])[len(ids) :]
        total = sum(entry[token].logprob for entry, token in zip(entries, beam.tokens, strict=True) if entry)
        assert beam.cum_logprob == pytest.approx(total, abs=1e-3)
        assert beam.text == llm.tokenizer.decode(beam.tokens)


def test_beams_end(llm: LLM) -> None:
    chat = llm.tokenizer.render_chat([{"role": "user", "content": "What is the capital of France?"}])
    prompt = {"prompt_token_ids": llm.tokenizer.encode_chat(chat)}
    best = llm.beam_search(prompt, chairlift.BeamSearchParams(beam_width=2, max_tokens=20))[0].sequences[0]
    assert (best.text, best.finish_reason) == ("The capital of France is Paris.", "stop")
    assert best.tokens[-1] in llm.tokenizer.eos_ids
    for wrong in ({"beam_width": 0}, {"beam_width": 11}, {"max_tokens": 0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            chairlift.BeamSearchParams(**({"beam_width": 2, "max_tokens": 2} | wrong))
    with pytest.raises(InvalidRequest, match="maximum context length"):
        llm.beam_search("x", chairlift.BeamSearchParams(beam_width=2, max_tokens=10**6))


def test_a_grammar_bias_words_and_tokens_go_together(llm: LLM) -> None:
    def answer(**more: object) -> str:
        wanted = chairlift.StructuredOutputsParams(choice=["yes", "no", "perhaps"])
        params = SamplingParams(temperature=0, max_tokens=8, structured_outputs=wanted, **more)  # type: ignore[arg-type]
        return llm.generate("Is it? ", params, use_tqdm=False)[0].outputs[0].text

    first = {word: llm.tokenizer.encode(word, add_special_tokens=False)[0] for word in ("yes", "no", "perhaps")}
    plain = answer()
    other, third = (word for word in first if word != plain)
    begins = {
        token
        for word in (plain, third)
        for token in range(llm.engine.info.vocab_size)
        if word.startswith(llm.tokenizer.token_text(token) or "?")
    }
    assert answer(logit_bias=dict.fromkeys(begins, -100.0)) == other
    assert answer(bad_words=[llm.tokenizer.token_text(token) for token in begins]) == other
    allowed = [token for token in range(llm.engine.info.vocab_size) if token not in begins]
    assert answer(allowed_token_ids=allowed) == other


def test_words_and_tokens_can_be_excluded(llm: LLM) -> None:
    question = [{"role": "user", "content": "What is continuous batching?"}]
    plain, without = (
        llm.chat(question, SamplingParams(temperature=0, max_tokens=60, bad_words=words), use_tqdm=False)[0].outputs[0]
        for words in (None, ["chairlift", "batching", "batch"])
    )
    assert "chairlift" in plain.text
    assert "chairlift" not in without.text
    assert "batching" not in without.text
    few = llm.tokenizer.encode(" a the of", add_special_tokens=False)
    params = SamplingParams(max_tokens=20, allowed_token_ids=few, n=3, ignore_eos=True)
    for output in llm.chat(question, params, use_tqdm=False)[0].outputs:
        assert set(output.token_ids) <= set(few)
    params = SamplingParams(max_tokens=5, min_tokens=3, allowed_token_ids=list(llm.tokenizer.eos_ids))
    nothing = llm.chat(question, params, use_tqdm=False)[0].outputs[0]
    assert (nothing.finish_reason, "no token is left" in str(nothing.stop_reason)) == ("invalid", True)


def test_a_bad_word_for_which_the_model_has_no_token_is_no_harm(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    beyond = llm.engine.info.vocab_size
    monkeypatch.setattr(llm.tokenizer, "word_ids", lambda words: [[beyond], [1, beyond]])
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True, bad_words=["x"])
    assert len(llm.generate("a", params, use_tqdm=False)[0].outputs[0].token_ids) == 2


def test_results_come_in_order_with_their_own_parameters(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (9, 1, 30, 4, 17) * 4]
    outputs = llm.generate([f"Number {i}" for i in range(20)], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [9, 1, 30, 4, 17] * 4
    assert [output.prompt for output in outputs] == [f"Number {i}" for i in range(20)]
    assert all(output.outputs[0].finish_reason == "length" and output.finished for output in outputs)
    assert llm.engine.scheduler.pool.num_used == 0


def test_whoever_interrupts_it_while_requests_are_added_can_go_on(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    add, added = llm.engine.add, []

    def interrupted(request: Request) -> None:
        add(request)
        added.append(request.id)
        if len(added) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine, "add", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["one", "two", "three", "four"], GREEDY, use_tqdm=False)
    assert llm.engine.num_unfinished == 0
    assert len(llm.generate("five", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 12


def test_chat_answers_readably_and_stops(llm: LLM) -> None:
    question = [{"role": "user", "content": "What is continuous batching?"}]
    answer = llm.chat(question, SamplingParams(temperature=0, max_tokens=200), use_tqdm=False)[0].outputs[0]
    assert answer.text.startswith("Continuous batching works like a chairlift that never stops.")
    assert answer.finish_reason == "stop"
    two = llm.chat([question, question], GREEDY, use_tqdm=False)
    assert len(two) == 2
    assert two[0].outputs == two[1].outputs


def test_stop_string_is_cut_and_named(llm: LLM) -> None:
    question = [{"role": "user", "content": "What is continuous batching?"}]
    params = SamplingParams(temperature=0, max_tokens=200, stop=["never stops", "nowhere"])
    answer = llm.chat(question, params, use_tqdm=False)[0].outputs[0]
    assert answer.text == "Continuous batching works like a chairlift that "
    assert (answer.finish_reason, answer.stop_reason) == ("stop", "never stops")
    assert llm.engine.num_unfinished == 0


def test_samples_of_a_seed_are_those_of_consecutive_seeds(llm: LLM) -> None:
    # Hot enough for a model that knows its stories by heart.
    hot = {"temperature": 5.0, "max_tokens": 16, "ignore_eos": True}
    three = llm.generate("Once", SamplingParams(n=3, seed=5, **hot), use_tqdm=False)[0]
    alone = [llm.generate("Once", SamplingParams(seed=5 + i, **hot), use_tqdm=False)[0].outputs[0] for i in range(3)]
    assert [sample.token_ids for sample in three.outputs] == [sample.token_ids for sample in alone]
    assert [sample.index for sample in three.outputs] == [0, 1, 2]
    assert len({sample.text for sample in three.outputs}) == 3


def test_logprobs_are_of_the_tokens_chosen(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=5, logprobs=3, prompt_logprobs=2)
    output = llm.generate("The chairlift is", params, use_tqdm=False)[0]
    sample = output.outputs[0]
    assert sample.logprobs is not None
    for token, entry in zip(sample.token_ids, sample.logprobs, strict=True):
        assert entry[token].rank == 1
        assert len(entry) == 3
        assert max(entry.values(), key=lambda e: e.logprob) is entry[token]
    assert sample.cumulative_logprob == pytest.approx(
        sum(entry[token].logprob for token, entry in zip(sample.token_ids, sample.logprobs, strict=True))
    )
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    for token, entry in zip(output.prompt_token_ids[1:], output.prompt_logprobs[1:], strict=True):
        assert entry is not None
        assert token in entry


def test_prompt_logprobs_of_one_token_are_a_lone_none(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=0)
    one, plain = llm.generate([[5], [5]], [params, GREEDY], use_tqdm=False)
    assert one.prompt_logprobs == [None]
    assert plain.prompt_logprobs is None


def test_the_package_lists_what_it_has() -> None:
    assert dir(chairlift) == sorted(chairlift.__all__)


def test_an_ignored_eos_is_not_sampled_before_min_tokens(llm: LLM) -> None:
    eos_ids = llm.tokenizer.eos_ids
    wanted = dict.fromkeys(eos_ids, 100.0)
    params = SamplingParams(temperature=0, max_tokens=6, min_tokens=4, ignore_eos=True, logit_bias=wanted)
    made = llm.generate("Once", params, use_tqdm=False)[0].outputs[0].token_ids
    assert [token in eos_ids for token in made] == [False] * 4 + [True] * 2


def test_metrics_are_in_the_order_of_a_life(llm: LLM) -> None:
    for output in llm.generate(["one", "two", "three"] * 6, GREEDY, use_tqdm=False):
        life = output.metrics
        assert life.first_scheduled is not None
        assert life.first_token is not None
        assert life.finished is not None
        assert life.arrival <= life.first_scheduled < life.first_token <= life.finished


def test_priority_goes_first(llm: LLM) -> None:
    outputs = llm.generate(["word"] * 17, GREEDY, priority=[1] * 16 + [0], use_tqdm=False)
    starts = [output.metrics.first_scheduled or 0.0 for output in outputs]
    assert starts[-1] == min(starts)


def test_repeated_prompt_hits_the_prefix_cache(llm: LLM) -> None:
    prompt = list(range(100, 180))
    assert llm.generate(prompt, GREEDY, use_tqdm=False)[0].num_cached_tokens == 0
    again = llm.generate(prompt, GREEDY, use_tqdm=False)[0]
    assert again.num_cached_tokens == 64


def test_bad_requests_are_refused_before_anything_runs(llm: LLM) -> None:
    for prompt, message in (
        ([5, 10**6], "outside the vocabulary"),
        (list(range(100)) * 30, "maximum context length"),
        ([], "at least 1 token"),
        ({"text": "hello"}, "prompt_token_ids"),
    ):
        with pytest.raises(InvalidRequest, match=message):
            llm.generate(["fine", prompt], GREEDY, use_tqdm=False)  # type: ignore[list-item]
    with pytest.raises(ValueError, match="1 entries for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY], use_tqdm=False)
    assert llm.engine.num_unfinished == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1), ("top_p", 0), ("temperature", float("nan")), ("n", 0), ("max_tokens", 0), ("logprobs", 99)],
)
def test_parameters_out_of_range_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ValueError, match=field):
        SamplingParams(**{field: value})


def test_settings_are_refused_by_name() -> None:
    with pytest.raises(
        ConfigError, match=r"'no/such' is no folder here, and as a name of the Hub: .* can't be reached"
    ):
        LLM("no/such")
    with pytest.raises(TypeError, match="max_num_sequences"):
        chairlift.LLM(demo_path(), max_num_sequences=3)
    for name in ("served_model_name", "heartbeat_timeout_s", "step_timeout_s"):
        with pytest.raises(TypeError, match=name):
            chairlift.LLM(demo_path(), **{name: 5})
    for name, value in (("batch_size", 4), ("max_wait_ms", 1.0)):
        with pytest.raises(ConfigError, match=f"{name} has no effect under the continuous strategy"):
            chairlift.LLM(demo_path(), **{name: value})
    with pytest.raises(ConfigError, match="max_num_seqs has no effect under the static strategy"):
        chairlift.LLM(demo_path(), strategy="static", max_num_seqs=4)
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        chairlift.LLM(demo_path(), max_num_seqs=64, max_num_batched_tokens=8)


@pytest.mark.parametrize("step", [1, 3])
def test_interrupted_call_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    prompt = list(range(200 + step, 240 + step))
    execute, calls = llm.engine.runner.execute, []

    def interrupted(work: Step) -> StepResult:
        calls.append(work)
        if len(calls) == step:
            raise KeyboardInterrupt
        return execute(work)

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "execute", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate([prompt, "two"], SamplingParams(max_tokens=50, ignore_eos=True), use_tqdm=False)
    assert llm.engine.num_unfinished == 0
    assert llm.engine.scheduler.pool.num_used == 0
    again = llm.generate(prompt, GREEDY, use_tqdm=False)[0]
    assert again.num_cached_tokens == (0 if step == 1 else 32)
    fresh = llm.generate({"prompt_token_ids": prompt}, SamplingParams(temperature=0, max_tokens=12, prompt_logprobs=0))
    assert again.outputs[0].token_ids == fresh[0].outputs[0].token_ids

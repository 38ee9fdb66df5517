"""What a request asks of the runner beside greedy tokens: sampling, log-probabilities, errors of its own."""

import pytest
import torch
from support.decoder_harness import Harness, make_request, make_runner
from support.model_factory import model_folder, reference_model

from chairlift.core.sequences.sampling_params import SamplingParams
from chairlift.runners.decoder.runner import DecoderRunner

PROMPT = [5, 80, 211, 7, 7, 300, 12, 19, 44, 101, 3]


@pytest.fixture(scope="module")
def runner() -> DecoderRunner:
    return make_runner(model_folder("llama"))


def seeded(id: str, **fields: float) -> object:
    return make_request(id, PROMPT, SamplingParams(seed=11, temperature=1.2, max_tokens=None, **fields))


def test_a_seed_gives_the_same_text_in_any_batch_and_across_preemption(runner: DecoderRunner) -> None:
    harness = Harness(runner)
    alone = harness.generate([seeded("alone", top_p=0.95)], 30)["alone"]
    others = [make_request(f"o{n}", PROMPT[: n + 1], SamplingParams(max_tokens=None)) for n in range(9)]
    assert harness.generate([*others, seeded("mixed", top_p=0.95)], 30, chunk=4)["mixed"] == alone
    harness.add(seeded("preempted", top_p=0.95))
    for _ in range(12):
        harness.step()
    harness.preempt("preempted")
    assert harness.finish(["preempted"], 30)["preempted"] == alone
    assert len(set(alone)) > 10


def test_penalties_go_on_across_preemption(runner: DecoderRunner) -> None:
    harness = Harness(runner)
    fields = {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.2}
    whole = harness.generate([seeded("whole", **fields)], 30)["whole"]
    harness.add(seeded("cut", **fields))
    for _ in range(12):
        harness.step()
    harness.preempt("cut")
    assert harness.finish(["cut"], 30)["cut"] == whole


def test_unseeded_requests_differ_but_repeat_with_the_engine_seed() -> None:
    def texts(seed: int) -> dict[str, list[int]]:
        params = SamplingParams(temperature=1.5, max_tokens=None)
        harness = Harness(make_runner(model_folder("llama"), seed=seed))
        return harness.generate([make_request(str(n), PROMPT, params) for n in range(3)], 12)

    first = texts(1)
    assert len({tuple(tokens) for tokens in first.values()}) == 3
    assert texts(1) == first
    assert texts(2) != first


@pytest.mark.parametrize("chunk", [1, 4, 1000])
def test_logprobs_and_prompt_logprobs(runner: DecoderRunner, chunk: int) -> None:
    with torch.no_grad():
        wanted = torch.log_softmax(reference_model("llama")(torch.tensor([PROMPT])).logits[0], -1)
    harness = Harness(runner)
    params = SamplingParams(temperature=0, logprobs=3, prompt_logprobs=2, max_tokens=None)
    harness.add(make_request("asks", PROMPT, params))
    harness.add(make_request("plain", PROMPT[::-1]))
    found = []
    while not harness.outputs["asks"]:
        result = harness.step(chunk=chunk)
        found += result.prompt_logprobs.pop("asks", [])
        assert not result.prompt_logprobs
        assert result.num_rows > 0
    assert [entry.token_id for entry in found] == PROMPT[1:]
    for entry, row in zip(found, wanted, strict=False):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-3)
        assert entry.rank == 1 + int((row > row[entry.token_id]).sum())
        assert [token for token, _ in entry.top] == row.argsort(descending=True)[:2].tolist()
    chosen = result.logprobs["asks"][0]
    assert list(result.logprobs) == ["asks"]
    assert chosen.token_id == harness.outputs["asks"][0] == int(wanted[-1].argmax())
    assert chosen.logprob == pytest.approx(float(wanted[-1].max()), abs=1e-3)
    assert len(chosen.top) == 3
    harness.preempt("asks")
    assert not harness.step().prompt_logprobs


def test_long_prompts_are_described_in_parts(runner: DecoderRunner) -> None:
    prompt = torch.randint(0, 320, (200,), generator=torch.Generator().manual_seed(2)).tolist()
    harness = Harness(runner)
    harness.add(make_request("long", prompt, SamplingParams(temperature=0, prompt_logprobs=0, max_tokens=None)))
    found = harness.step().prompt_logprobs["long"]
    with torch.no_grad():
        wanted = torch.log_softmax(reference_model("llama")(torch.tensor([prompt])).logits[0], -1)
    assert [entry.token_id for entry in found] == prompt[1:]
    expected = wanted[:-1].gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    assert [entry.logprob for entry in found] == pytest.approx(expected.tolist(), abs=1e-3)


def test_one_bad_request_does_not_disturb_the_others(runner: DecoderRunner) -> None:
    harness = Harness(runner)
    alone = harness.generate([make_request("good", PROMPT)], 8)["good"]
    harness.add(make_request("bias", PROMPT, SamplingParams(logit_bias={320: 1.0})))
    harness.add(make_request("token", [1, 320, 2]))
    harness.add(make_request("negative", [-1]))
    harness.add(make_request("huge", [2**70], SamplingParams(logit_bias={2**70: 1.0})))
    none_left = dict.fromkeys(range(320), -100.0)
    stops = make_request("stops", PROMPT, SamplingParams(min_tokens=5, logit_bias=none_left), frozenset(range(320)))
    harness.add(stops)
    harness.add(make_request("good", PROMPT))
    result = harness.step()
    assert sorted(result.errors) == ["bias", "huge", "negative", "stops", "token"]
    assert "logit_bias" in result.errors["bias"]
    assert "vocabulary" in result.errors["token"]
    assert "no token is left" in result.errors["stops"]
    assert "stops" in result.invalid
    assert list(result.tokens) == ["good"]
    for name in result.errors:
        harness.release(name)
    assert harness.finish(["good"], 8)["good"] == alone


def test_release_of_what_never_started_is_ignored(runner: DecoderRunner) -> None:
    harness = Harness(runner)
    harness.released.append("never")
    harness.step({})

"""What a folder says of sampling holds for requests that say nothing."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.server_harness import Front, run

import chairlift
from chairlift.config.sequences import SequenceConfig
from chairlift.config.server import ServerConfig
from chairlift.config.settings import ServedModel
from chairlift.core.sequences.sampling_params import SamplingParams
from chairlift.demo import demo_path
from chairlift.errors import UnsupportedModel
from chairlift.library.llm import LLM
from chairlift.server.models.sequence_host import SequenceHost
from chairlift.text.sampling_defaults import sampling_defaults

TOLD = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.01, "repetition_penalty": 1.05}


def folder_of(folder: Path, told: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(told))
    return folder


def test_what_a_folder_says(tmp_path: Path) -> None:
    assert sampling_defaults(tmp_path) == {}
    more = {"do_sample": True, "eos_token_id": [1, 2], "max_new_tokens": 9, "transformers_version": "5"}
    assert sampling_defaults(folder_of(tmp_path, TOLD | more)) == TOLD
    assert sampling_defaults(folder_of(tmp_path, {"temperature": 1, "top_p": None, "top_k": 50})) == {
        "temperature": 1.0,
        "top_k": 50,
    }


@pytest.mark.parametrize(
    ("told", "problem"),
    [
        ({"temperature": -1}, "temperature must be between 0 and 100, got -1"),
        ({"top_p": 0}, "top_p must be above 0, got 0"),
        ({"top_k": 2**70}, "top_k must be at most 2147483647, got 1180591620717411303424"),
        ({"top_k": "20"}, r"Expected `int`, got `str` - at `\$.top_k`"),
        ({"min_p": True}, r"Expected `float`, got `bool` - at `\$.min_p`"),
        ({"repetition_penalty": float("nan")}, "repetition_penalty must be between 0 and 100, got nan"),
    ],
)
def test_what_no_request_may_say_no_folder_may(tmp_path: Path, told: Any, problem: str) -> None:
    folder = folder_of(tmp_path, told)
    with pytest.raises(UnsupportedModel, match=rf'generation_config.json .*{problem}.*generation_config = "none"'):
        sampling_defaults(folder)


MESSAGES = [{"role": "user", "content": "hi"}]
ASKED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 8},
    "/v1/responses": {"input": "hi"},
}


def sampling_of(params: SamplingParams) -> dict[str, Any]:
    return {name: getattr(params, name) for name in TOLD}


@pytest.mark.parametrize("path", ASKED)
def test_requests_that_say_nothing_are_sampled_so(path: str) -> None:
    async def go() -> None:
        front = Front()
        front.service.sampling_defaults = TOLD
        answer = await front.post(path, ASKED[path])
        assert answer.status == 200
        given = {"temperature": 0.3, "top_p": 0.5} | ({} if path.endswith("responses") else {"top_k": 0})
        answer = await front.post(path, ASKED[path] | given)
        if path == "/v1/responses":
            assert (answer.json()["temperature"], answer.json()["top_p"]) == (0.3, 0.5)
        first, second = front.client.requests
        assert sampling_of(first.params) == TOLD
        assert sampling_of(second.params) == TOLD | given

    run(go)


def test_responses_say_what_they_were_sampled_with() -> None:
    async def go() -> None:
        front = Front()
        front.service.sampling_defaults = TOLD
        answer = (await front.post("/v1/responses", {"input": "hi"})).json()
        assert (answer["temperature"], answer["top_p"]) == (0.6, 0.95)

    run(go)


@pytest.mark.parametrize(("choice", "expected"), [("auto", TOLD), ("none", {})])
def test_a_served_model_has_its_folder_s(tmp_path: Path, choice: Any, expected: Any) -> None:
    folder = folder_of(Path(shutil.copytree(demo_path(), tmp_path / "model")), TOLD)
    config = SequenceConfig(model=str(folder), generation_config=choice)
    host = SequenceHost(ServedModel("demo", config), config, ServerConfig(), None)
    assert host.prepare().sampling_defaults == expected
    assert ("temperature 0.6, top_p 0.95, top_k 20" in host.about) == bool(expected)


def test_a_library_s_model_has_its_folder_s(tmp_path: Path) -> None:
    folder = folder_of(Path(shutil.copytree(demo_path(), tmp_path / "model")), {"temperature": 0})
    llm = LLM(folder, max_num_seqs=2, kv_cache_gb=0.05)
    plain = LLM(folder, max_num_seqs=2, kv_cache_gb=0.05, generation_config="none")
    try:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0)
        assert plain.get_default_sampling_params() == chairlift.SamplingParams()
        told = llm.generate("The chairlift", use_tqdm=False)[0].outputs
        assert told == llm.generate("The chairlift", SamplingParams(temperature=0), use_tqdm=False)[0].outputs
    finally:
        llm.close()
        plain.close()

"""Settings changed while a model runs: what holds from then on, who may do it, and what is refused by name."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.items_harness import embedder
from support.key_files import bearer, write_keys
from support.server_harness import Answer, FakeClient, Front, run

from chairlift.config.sequences import SequenceConfig
from chairlift.plan.tuner import Tuner

HERE = {"host": "127.0.0.1:8000"}
PATH = "/v1/models/tiny/settings"


async def change(front: Front, body: Any, path: str = PATH, client: str = "127.0.0.1", **more: Any) -> Answer:
    return await front.call("POST", path, body, headers=HERE | more, client=client)


def serving(config: SequenceConfig, **settings: Any) -> Front:
    front = Front(FakeClient(manual=True), **settings)
    front.client.config = front.client.configured = config
    return front


def test_what_is_changed_holds_from_then_on_and_is_told() -> None:
    async def go() -> None:
        front = serving(SequenceConfig(model="tiny", max_num_seqs=16, target_itl_ms=50))
        told = (await change(front, {"max_num_seqs": 4, "target_itl_ms": 30})).json()
        assert (told["object"], told["model"]) == ("model.settings", "tiny")
        assert told["before"]["max_num_seqs"] == 16
        assert told["settings"]["max_num_seqs"] == 4
        assert (front.client.config.max_num_seqs, front.client.config.target_itl_ms) == (4, 30)
        shown = (await front.call("GET", "/v1/models/tiny")).json()["settings"]
        assert (shown["max_num_seqs"], shown["target_itl_ms"]) == (4, 30)
        # Up again to what it was loaded with, and not further.
        assert (await change(front, {"max_num_seqs": 16})).status == 200
        refused = await change(front, {"max_num_seqs": 17})
        assert (refused.status, refused.error["param"]) == (400, "max_num_seqs")
        assert "loaded with 16" in refused.error["message"]
        assert front.client.config.max_num_seqs == 16

    run(go)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, None, "names no setting"),
        ({"strategy": "dynamic"}, "strategy", "can't change"),
        ({"target_itl_ms": 20}, "target_itl_ms", "loaded with none"),
        ({"max_num_batched_tokens": 4096}, "max_num_batched_tokens", "loaded with 512"),
        ({"batch_size": 4}, "batch_size", "belongs to static and dynamic"),
        ({"max_batch_size": 4}, "max_batch_size", "answers in tokens"),
        ({"slots": 4}, "slots", "unknown field"),
        ({"max_num_seqs": 0}, "max_num_seqs", ">= 1"),
        ([], None, "the body: expected object"),
    ],
)
def test_what_takes_loading_it_again_is_refused_by_name(body: Any, param: str | None, words: str) -> None:
    async def go() -> None:
        front = serving(SequenceConfig(model="tiny"))
        refused = await change(front, body)
        assert refused.status == 400, refused.body
        assert refused.error["param"] == param
        assert words in refused.error["message"]
        assert front.client.config is front.client.configured

    run(go)


def test_a_target_that_there_is_can_not_be_taken_away() -> None:
    async def go() -> None:
        front = serving(SequenceConfig(model="tiny", target_itl_ms=20))
        refused = await change(front, {"target_itl_ms": None})
        assert (refused.status, refused.error["param"]) == (400, "target_itl_ms")

    run(go)


def test_a_tuner_goes_on_from_what_was_set_by_hand() -> None:
    async def go() -> None:
        config = SequenceConfig(model="tiny", max_num_seqs=16, auto=True)
        front = serving(config)
        tuner = front.service.metrics.tuner = Tuner(config)
        assert (await change(front, {"max_num_seqs": 10})).status == 200
        assert tuner.config is front.client.config
        assert tuner.configured == tuner.config
        assert not tuner.on_trial
        assert max(each.max_num_seqs for each in tuner.alternatives()) == 10
        assert "by hand" in tuner.decisions[-1].reason

    run(go)


def turned(settings: dict[str, Any], **configured: Any) -> tuple[Front, Tuner]:
    """A server whose tuner has turned some settings since they were configured."""
    config = SequenceConfig(model="tiny", auto=True, **configured)
    front = serving(config)
    tuner = front.service.metrics.tuner = Tuner(config)
    front.client.config = tuner.config = msgspec.structs.replace(config, **settings)
    return front, tuner


def test_what_the_tuner_has_turned_was_not_configured_by_setting_something_else() -> None:
    async def go() -> None:
        front, tuner = turned({"max_num_seqs": 16, "step_time_ms": 1200.0}, target_ttft_ms=500.0)
        for most in (256, 128):
            assert (await change(front, {"max_num_batched_tokens": most})).status == 200
            now, configured = front.client.config, tuner.configured
            assert tuner.config is now
            assert (now.max_num_seqs, now.step_time_ms, now.max_num_batched_tokens) == (16, 1200.0, most)
            assert (configured.max_num_seqs, configured.step_time_ms) == (64, 300.0)
            assert configured.max_num_batched_tokens == most
        assert {each.max_num_seqs for each in tuner.alternatives()} == {8, 16, 32}
        assert max(each.step_time_ms for each in tuner.alternatives()) == 1200.0

    run(go)


def test_slots_and_tokens_of_which_one_was_turned_and_one_is_set_go_together() -> None:
    async def go() -> None:
        # Fewer tokens than there were slots configured, which those that are left have room in.
        front, tuner = turned({"max_num_seqs": 16})
        assert (await change(front, {"max_num_batched_tokens": 32})).status == 200
        assert (front.client.config.max_num_seqs, front.client.config.max_num_batched_tokens) == (16, 32)
        assert (tuner.configured.max_num_seqs, tuner.configured.max_num_batched_tokens) == (32, 32)
        assert max(each.max_num_seqs for each in tuner.alternatives()) == 24
        # More slots than the tuner has left tokens for.
        front, tuner = turned({"max_num_seqs": 16, "max_num_batched_tokens": 25}, max_num_batched_tokens=100)
        told = (await change(front, {"max_num_seqs": 64})).json()
        assert (told["settings"]["max_num_seqs"], told["settings"]["max_num_batched_tokens"]) == (64, 64)
        assert (tuner.configured.max_num_seqs, tuner.configured.max_num_batched_tokens) == (64, 100)
        assert tuner.config is front.client.config
        assert {each.max_num_batched_tokens for each in tuner.alternatives()} == {64, 100}
        refused = await change(front, {"max_num_batched_tokens": 32})
        assert (refused.status, refused.error["param"]) == (400, "max_num_batched_tokens")

    run(go)


def test_a_turned_setting_that_is_on_no_rung_any_more_is_turned_on_from_there() -> None:
    async def go() -> None:
        front, tuner = turned({"max_num_batched_tokens": 64}, max_num_batched_tokens=100)
        assert (await change(front, {"max_num_seqs": 10})).status == 200
        assert front.client.config.max_num_batched_tokens == 64
        assert {each.max_num_batched_tokens for each in tuner.alternatives()} == {50, 64, 100}

    run(go)


def test_it_takes_the_right_to_or_this_machine(tmp_path: Path) -> None:
    people: dict[str, dict[str, Any]] = {"alice": {"rights": ["infer"]}, "root": {"rights": ["infer", "admin"]}}
    keys = str(write_keys(tmp_path / "keys.toml", **people))

    async def go() -> None:
        body = {"max_num_seqs": 4}
        front = serving(SequenceConfig(model="tiny"), api_keys=keys)
        assert (await change(front, body)).status == 401
        refused = await change(front, body, **bearer("alice"))
        assert (refused.status, refused.error["code"]) == (403, "missing_right")
        assert front.client.config.max_num_seqs == 64
        assert (await change(front, body, client="10.0.0.7", **bearer("root"))).status == 200
        open_to_all = serving(SequenceConfig(model="tiny"), host="0.0.0.0")
        refused = await change(open_to_all, body, client="10.0.0.7")
        assert (refused.status, refused.error["code"]) == (403, "not_local")
        refused = await change(open_to_all, body, origin="https://elsewhere.example")
        assert refused.status == 403, "a web page elsewhere"
        assert open_to_all.client.config.max_num_seqs == 64
        # Pages of all sites may ask the models, but not change them, unless they bring a key.
        shared = serving(SequenceConfig(model="tiny"), allowed_origins=("*",))
        for page in ({"origin": "https://elsewhere.example"}, {"sec-fetch-site": "cross-site"}):
            refused = await change(shared, body, **page)
            assert (refused.status, refused.error["code"]) == (403, "cross_origin")
        assert shared.client.config.max_num_seqs == 64
        assert (await change(shared, body, origin="http://127.0.0.1:8000")).status == 200, "its own page"
        keyed = serving(SequenceConfig(model="tiny"), allowed_origins=("*",), api_keys=keys)
        assert (await change(keyed, body, origin="https://elsewhere.example", **bearer("root"))).status == 200

    run(go)


def test_models_that_answer_in_one_call_change_too() -> None:
    async def go() -> None:
        front = Front()
        service, _ = embedder()
        front.models.add(service)
        path = "/v1/models/embedder/settings"
        most = service.dispatcher.limits.max_batch_size
        body = {"input": ["hello", "world"], "model": "embedder"}
        assert (await front.post("/v1/embeddings", body)).status == 200
        told = (await change(front, {"max_batch_size": 1, "target_latency_ms": 20}, path=path)).json()
        assert told["settings"] == {"max_batch_size": 1, "max_wait_ms": 0.0, "target_latency_ms": 20}
        assert (await front.post("/v1/embeddings", body)).status == 200
        assert [call.items for call in service.metrics.calls][-2:] == [1, 1]
        assert (await change(front, {"max_batch_size": most, "target_latency_ms": None}, path=path)).status == 200
        assert service.dispatcher.scheduler.limits.target_latency is None
        for wrong, param in (
            ({"max_batch_size": most + 1}, "max_batch_size"),
            ({"max_num_seqs": 2}, "max_num_seqs"),
            ({"max_wait_ms": 5, "target_latency_ms": 20}, "max_wait_ms"),
        ):
            refused = await change(front, wrong, path=path)
            assert (refused.status, refused.error["param"]) == (400, param)
        assert (await change(front, {"max_batch_size": 1}, path="/v1/models/nobody/settings")).status == 404

    run(go)

"""One real server with several models: a language model, an encoder, an ONNX file and a Python class."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.serve_process import WORKER_MODELS, Server, language_model

pytestmark = pytest.mark.processes
NAMES = ["chat", "bert", "linear", "doubles", "counts", "slow"]


@pytest.fixture
def server(models_server: Server) -> Server:
    return models_server


def predict(server: Server, instances: list[object]) -> list[object]:
    answer = server.http.post("/v1/models/doubles:predict", json={"instances": instances})
    assert answer.status_code == 200, answer.text
    predictions: list[object] = answer.json()["predictions"]
    return predictions


def test_every_model_answers_by_its_name(server: Server) -> None:
    assert [each.id for each in server.openai.models.list().data] == NAMES
    text = server.openai.completions.create(model="chat", prompt="hello", max_tokens=4)
    assert text.usage is not None
    assert text.usage.completion_tokens == 4
    assert len(server.openai.embeddings.create(model="bert", input=["hello world"]).data) == 1
    assert predict(server, [1, 2]) == [2, 4]
    tensor = {"name": "x", "shape": [1, 4], "datatype": "FP32", "data": [1, 0, 0, 0]}
    inferred = server.http.post("/v2/models/linear/infer", json={"inputs": [tensor]}).json()
    assert inferred["outputs"][0]["name"] == "y"
    # Where only one model does what a route is for, its name may be left out.
    assert server.http.post("/v1/embeddings", json={"input": "hello"}).status_code == 200


def test_a_model_that_does_something_else_is_refused(server: Server) -> None:
    answer = server.http.post("/v1/embeddings", json={"model": "chat", "input": "hello"})
    assert (answer.status_code, "needs an embedding model" in answer.text) == (400, True)
    answer = server.http.post("/v1/completions", json={"model": "nobody", "prompt": "hello"})
    assert (answer.status_code, "`chat`" in answer.text) == (404, True)


def test_settings_of_a_table_are_the_models(server: Server) -> None:
    assert server.http.get("/v2/models/doubles").json()["versions"] == ["3"]
    assert server.http.get("/v2/models/doubles/versions/2").status_code == 404
    answer = server.http.post("/v1/models/doubles:predict", json={"instances": list(range(9))})
    assert answer.headers["x-batch-size"] == "4"


def test_all_at_once(server: Server) -> None:
    failed = []

    def ask(kind: int) -> None:
        try:
            for _ in range(10):
                if kind % 3 == 0:
                    server.openai.completions.create(model="chat", prompt="hello", max_tokens=8)
                elif kind % 3 == 1:
                    server.openai.embeddings.create(model="bert", input=["hello world"] * 3)
                else:
                    predict(server, [kind])
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=ask, args=(kind,)) for kind in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_a_model_is_loaded_anew_without_losing_a_request(server: Server) -> None:
    over, answers = threading.Event(), []

    def keep_asking() -> None:
        while not over.is_set():
            answers.append(predict(server, [len(answers)]) == [2 * len(answers)])

    with ThreadPoolExecutor(1) as pool:
        asking = pool.submit(keep_asking)
        try:
            for _ in range(2):
                reloaded = server.http.post("/v2/repository/models/doubles/load", json={})
                assert reloaded.status_code == 200, reloaded.text
        finally:
            over.set()
        asking.result()
    assert len(answers) > 10
    assert all(answers)


def test_a_model_is_unloaded_and_loaded_again(server: Server) -> None:
    assert server.http.post("/v2/repository/models/linear/unload", json={}).status_code == 200
    try:
        assert server.http.get("/v2/models/linear").status_code == 404
        states = {each["name"]: each["state"] for each in server.http.post("/v2/repository/index", json={}).json()}
        assert states == dict.fromkeys(NAMES, "READY") | {"linear": "UNAVAILABLE"}
        assert server.http.get("/health/ready").status_code == 200
    finally:
        assert server.http.post("/v2/repository/models/linear/load", json={}).status_code == 200
    assert server.http.get("/v2/models/linear/ready").status_code == 200
    assert server.http.post("/v2/repository/models/nobody/load", json={}).status_code == 404


def test_every_model_has_its_metrics(server: Server) -> None:
    assert server.metric("ready", model="chat") == 1
    assert server.metric("ready", model="doubles:3") == 1


def test_models_that_cannot_load_say_why_and_the_others_serve(tmp_path: Path) -> None:
    names = {"good": "Doubles", "absent": "Absent", "dies": "DiesLoading", "raises": "CannotLoad"}
    tables = [f'[models.{name}]\nmodel = "{WORKER_MODELS}:{kind}"\n' for name, kind in names.items()]
    language_model(tmp_path / "llm")
    (tmp_path / "llm" / "tokenizer.json").write_text("{}")
    tables.append('[models.wordless]\nmodel = "llm"\nkv_cache_gb = 0.01\n')
    (tmp_path / "all.toml").write_text("".join(tables))
    reasons = {
        "absent": "has no class Absent",
        "dies": "died (exit status 5) while it loaded",
        "raises": "OSError: no weights here",
        "wordless": "tokenizer.json can't be read",
    }
    with Server(str(tmp_path / "all.toml")) as it:
        it.wait_ready()
        listed = {each["id"]: each for each in it.http.get("/v1/models").json()["data"]}
        health = it.http.get("/health").json()
        assert health["status"] == "ready"
        states = {each["model"]: each for each in health["models"]}
        assert listed["good"]["status"] == states["good"]["status"] == "ready"
        for name, reason in reasons.items():
            assert listed[name]["status"] == states[name]["status"] == "failed"
            assert reason in listed[name]["failure"]
            assert listed[name]["failure"] == states[name]["failure"]
        answer = it.http.post("/v1/models/good:predict", json={"instances": [2]})
        assert answer.json() == {"predictions": [4]}
        for path, body in (
            ("/v1/models/dies:predict", {"instances": [2]}),
            ("/v1/completions", {"model": "wordless", "prompt": "a"}),
        ):
            answer = it.http.post(path, json=body)
            assert (answer.status_code, "failed" in answer.text) == (503, True), answer.text
        assert it.metric("worker_restarts_total", model="dies") == 2
        assert it.metric("ready", model="dies") == 0


def test_a_server_of_which_no_model_can_load_ends(tmp_path: Path) -> None:
    (tmp_path / "all.toml").write_text(
        f'[models.first]\nmodel = "{WORKER_MODELS}:Missing"\n[models.bad]\nmodel = "{WORKER_MODELS}:Absent"\n'
    )
    with Server(str(tmp_path / "all.toml")) as it:
        assert it.wait_ended(40) == 1
        assert any("bad: " in line and "Absent" in line for line in it.lines)

"""A family that no kernel knows, behind a real server: streams, grammars, seeds, and what is refused."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.foreign_factory import foreign_folder
from support.model_factory import edited_folder
from support.serve_process import Server
from support.server_harness import TEMPLATE
from support.text_tokenizers import build

pytestmark = pytest.mark.processes


def phi(folder: Path, **fields: object) -> Path:
    """A Phi 1 with a tokenizer and a chat template."""
    edited_folder(folder, foreign_folder("phi", "phi"), **fields)
    build("bytelevel").save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = phi(tmp_path_factory.mktemp("models") / "phi")
    with Server(str(folder), "--kv-cache-gb", "0.01", "--num-threads", "1") as running:
        running.wait_ready()
        yield running


def test_streams_and_seeds(server: Server) -> None:
    assert any("through transformers" in line for line in server.lines)
    whole = server.complete(max_tokens=12, temperature=0, ignore_eos=True).json()["choices"][0]["text"]
    stream = server.openai.completions.create(
        model="phi", prompt="hello world", max_tokens=12, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    assert "".join(event.choices[0].text for event in stream) == whole
    drawn = [server.complete(max_tokens=12, temperature=1, seed=5).json()["choices"][0]["text"] for _ in range(2)]
    assert drawn[0] == drawn[1]


def test_answers_follow_a_schema(server: Server) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    wanted = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema, "strict": True}}
    for temperature in (0, 1):
        answer = server.openai.chat.completions.create(
            model="phi",
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=60,
            temperature=temperature,
            response_format=wanted,  # type: ignore[arg-type]
        )
        content = answer.choices[0].message.content or ""
        assert answer.choices[0].finish_reason == "stop", content
        assert json.loads(content)["a"] in ("x", "y")


def test_a_folder_that_can_not_be_honoured_ends_the_server(tmp_path: Path) -> None:
    folder = phi(tmp_path / "phi", num_hidden_layers=5)
    with Server(str(folder)) as running:
        assert running.process.wait(60) == 1
        assert any("by config.json it has" in line for line in running.lines)
    shutil.rmtree(folder)

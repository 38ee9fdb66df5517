"""The demo model in the package: small, whole, and right in what it says."""

import json
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from support.replies import read_reply

from chairlift.demo import demo_path
from chairlift.errors import InvalidRequest
from chairlift.text import Tokenizer
from chairlift.text.model_dialect import model_dialect_of

KNOWN = {
    "What is the capital of France?": "The capital of France is Paris.",
    "What is 7 + 5?": "7 + 5 = 12.",
    "What is the opposite of hot?": "The opposite of hot is cold.",
    "What colour is the sky?": "The sky is blue on a clear day.",
    "What day comes after Monday?": "Tuesday comes after Monday.",
    "Count to 10.": "1, 2, 3, 4, 5, 6, 7, 8, 9, 10.",
    "Hello!": "Hello! I am the Chairlift demo model. Ask me about batching, mountains, capitals or small sums.",
    "What is continuous batching?": (
        "Continuous batching works like a chairlift that never stops. At every step of the model, finished requests "
        "get off and waiting requests get on. Nobody waits for the slowest answer in the group, so the device stays "
        "busy and the first token comes quickly. It is the best choice for language models, because their answers "
        "have very different lengths."
    ),
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_folder(demo_path())


@pytest.fixture(scope="module")
def model() -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(demo_path(), dtype=torch.float32).eval()


def chat(*turns: str) -> list[dict[str, str]]:
    return [{"role": "assistant" if i % 2 else "user", "content": turn} for i, turn in enumerate(turns)]


def answer(model: Any, tokenizer: Tokenizer, messages: list[dict[str, str]], limit: int = 120) -> str:
    prompt = tokenizer.encode_chat(tokenizer.render_chat(messages))
    with torch.inference_mode():
        output = model.generate(torch.tensor([prompt]), max_new_tokens=limit, do_sample=False)
    return tokenizer.decode(output[0, len(prompt) :].tolist())


def test_the_folder_is_small_and_whole() -> None:
    files = {file.name: file.stat().st_size for file in demo_path().iterdir()}
    assert sum(files.values()) <= 8 * 2**20
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= set(files)
    assert {"tokenizer_config.json", "chat_template.jinja"} <= set(files)


def test_the_files_agree(tokenizer: Tokenizer) -> None:
    config = json.loads((demo_path() / "config.json").read_text())
    assert tokenizer.vocab_size == config["vocab_size"]
    assert tokenizer.eos_ids[0] == config["eos_token_id"] == tokenizer.encode("<|im_end|>")[0]
    assert config["max_position_embeddings"] == 2048
    assert config["dtype"] == "float32"


@pytest.mark.parametrize(
    "text", ["Hello, world!", "żółw 漢字 👩‍👩‍👧‍👦 \x00\x7f", "  two  spaces\n\n\ttab", "3.14159 * 271"]
)
def test_any_text_survives_the_tokenizer(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_every_byte_has_a_token(tokenizer: Tokenizer) -> None:
    single = {tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)}
    assert {bytes([byte]) for byte in range(256)} <= single


def test_the_chat_template(tokenizer: Tokenizer) -> None:
    messages = [{"role": "system", "content": "Be kind."}, *chat("Hi", "Hello!", "Bye")]
    assert tokenizer.render_chat(messages).text == (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"
    )
    with pytest.raises(InvalidRequest, match="robot"):
        tokenizer.render_chat([{"role": "robot", "content": ""}])


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "unit": {"type": "string"}}},
    },
}


def test_the_chat_template_with_tools(tokenizer: Tokenizer) -> None:
    call = {"type": "function", "function": {"name": "get_weather", "arguments": {"city": "Genève"}}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be kind."},
        *chat("Weather?"),
        {"role": "assistant", "content": "Well.", "tool_calls": [call, call]},
        {"role": "tool", "content": "rain"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    tools = [WEATHER, {"type": "function", "function": {"name": "now"}}]
    called = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Genève"}}\n</tool_call>'
    assert tokenizer.render_chat(messages, template_kwargs={"tools": tools}).text == (
        '<|im_start|>system\nBe kind.\n\n<tools>\n{"name": "get_weather", "parameters": ["city", "unit"]}\n'
        '{"name": "now", "parameters": []}\n</tools><|im_end|>\n<|im_start|>user\nWeather?<|im_end|>\n'
        f"<|im_start|>assistant\nWell.\n{called}\n{called}<|im_end|>\n"
        "<|im_start|>tool\n<tool_response>\nrain\n</tool_response><|im_end|>\n"
        f"<|im_start|>assistant\n{called}<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.render_chat(chat("Hi"), template_kwargs={"tools": tools[1:]}).text == (
        '<|im_start|>system\n<tools>\n{"name": "now", "parameters": []}\n</tools><|im_end|>\n'
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("question", KNOWN)
def test_greedy_answers(model: Any, tokenizer: Tokenizer, question: str) -> None:
    assert answer(model, tokenizer, chat(question)) == KNOWN[question]


def test_a_system_prompt_and_earlier_turns_change_no_fact(model: Any, tokenizer: Tokenizer) -> None:
    messages = [
        {"role": "system", "content": "You are a helpful assistant."},
        *chat("What is the capital of Italy?", "The capital of Italy is Rome.", "What is the capital of Japan?"),
    ]
    assert answer(model, tokenizer, messages) == "The capital of Japan is Tokyo."


def test_it_says_so_when_it_does_not_know(model: Any, tokenizer: Tokenizer) -> None:
    assert answer(model, tokenizer, chat("Who invented the telephone?")).startswith("I am a small demo model")


def test_2000_positions_do_not_break_it(model: Any) -> None:
    ids = torch.randint(3, 1536, (1, 2000), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        assert torch.isfinite(model(ids).logits).all()


def test_the_calls_that_it_learned_are_those_that_the_server_reads(tokenizer: Tokenizer) -> None:
    sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
    import demo_tools

    dialect = model_dialect_of(tokenizer).dialect
    assert dialect is not None
    rng = random.Random(3)
    schemas = {each["function"]["name"]: each["function"]["parameters"] for each in demo_tools.TOOLS}
    several = 0
    for turn in (turn for _ in range(200) for turn in demo_tools.turns(rng, demo_tools.TOOLS) if turn.calls):
        text = tokenizer.render_chat([demo_tools.calling(turn.calls)], add_generation_prompt=False).text
        _, _, calls = read_reply(dialect, text.partition("\n")[2].removesuffix("<|im_end|>\n"), tools=schemas)
        assert [(name, json.loads(given)) for name, given in calls] == turn.calls
        several += len(calls) > 1
    assert several > 5


@pytest.fixture
def trainer() -> Any:
    sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
    import train_demo

    return train_demo


def test_a_training_ends_by_steps_or_by_time_with_no_learning_rate_left(trainer: Any) -> None:
    schedule = trainer.Schedule(steps=200, minutes=10, peak=0.5, falling=0.5)
    assert (schedule.progress(50, 60), schedule.progress(50, 450), schedule.progress(200, 0)) == (0.25, 0.75, 1)
    assert schedule.scale(0, 0.0) == 0.5 / 50
    assert (schedule.scale(80, 0.4), schedule.scale(80, 0.75), schedule.scale(80, 1.0)) == (0.5, 0.25, 0)


@pytest.mark.parametrize("shares", ["FROM_NOTHING", "GOING_ON"])
def test_what_a_training_reads_is_what_the_server_shows_the_model(
    trainer: Any, tokenizer: Tokenizer, shares: str
) -> None:
    import demo_corpus

    corpus = demo_corpus.Corpus(5, getattr(demo_corpus, shares))
    chats = [each for each in (corpus.document() for _ in range(200)) if isinstance(each, demo_corpus.Chat)]
    assert any(each.tools for each in chats)
    assert any(not each.tools for each in chats)
    for each in chats:
        encoded, weights = trainer.encode(trainer.Tokenizer.from_file(str(demo_path() / "tokenizer.json")), each)
        shown = tokenizer.render_chat(
            each.messages, add_generation_prompt=False, template_kwargs={"tools": each.tools or None}
        )
        assert encoded == tokenizer.encode_chat(shown)
        assert len(weights) == len(encoded)

"""One real server that has a decoder's folder write, embed, rerank and classify."""

import json
from collections.abc import Iterator

import numpy as np
import openai
import pytest
import torch
from numpy.typing import NDArray
from support.encoder_factory import (
    JUDGE_PREFIX,
    JUDGE_SUFFIX,
    encoder_folder,
    judge_folder,
    reference_encoder,
    sentence_folder,
)
from support.model_factory import model_folder, reference_model
from support.serve_process import Server, language_model
from support.text_tokenizers import build
from tokenizers import Tokenizer, processors

pytestmark = pytest.mark.processes
PROMPT = "hello: "
JUDGE_IDS = (121, 110)
TABLES = """
[models.chat]
model = "llm"
kv_cache_gb = 0.01
num_threads = 1
[models.same]
model = "llm"
kind = "encoder"
dtype = "float32"
num_threads = 1
[models.embed]
model = "embedder"
dtype = "float32"
num_threads = 1
max_model_len = 12
max_batch_tokens = 64
[models.rank]
model = "ranker"
dtype = "float32"
num_threads = 1
[models.judge]
model = "judge"
dtype = "float32"
num_threads = 1
max_model_len = 160
[models.class]
model = "classifier"
dtype = "float32"
num_threads = 1
"""


def closing_tokenizer() -> Tokenizer:
    """As Qwen3's embedders have it: the post-processor puts a last token behind every text."""
    backend = build("bytelevel")
    end = [("<|end|>", backend.token_to_id("<|end|>"))]
    backend.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="$A <|end|>", pair="$A $B:1 <|end|>:1", special_tokens=end),
        ]
    )
    return backend


def ids_of(text: str) -> list[int]:
    ids: list[int] = closing_tokenizer().encode(text).ids
    return ids


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("causal")
    language_model(folder / "llm")
    modules = [("Pooling", {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}), ("Normalize", {})]
    sentence_folder(folder / "embedder", encoder_folder("qwen3"), modules)
    settings = {"prompts": {"query": PROMPT, "document": ""}, "default_prompt_name": None}
    (folder / "embedder" / "config_sentence_transformers.json").write_text(json.dumps(settings))
    for name, labels in (("ranker", 1), ("classifier", 3)):
        sentence_folder(folder / name, encoder_folder("qwen2", labels))
        (folder / name / "modules.json").unlink()
    judge_folder(folder / "judge", model_folder("qwen3"), *JUDGE_IDS, instruction="find foxes")
    for name in ("embedder", "ranker", "classifier", "judge"):
        closing_tokenizer().save(str(folder / name / "tokenizer.json"))
    (folder / "all.toml").write_text(TABLES)
    with Server(str(folder / "all.toml")) as it:
        it.wait_ready(90)
        yield it


@torch.no_grad()
def embedding(ids: list[int]) -> NDArray[np.float32]:
    hidden = reference_encoder(encoder_folder("qwen3"))(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]
    found: NDArray[np.float32] = torch.nn.functional.normalize(hidden, dim=-1).numpy()
    return found


@torch.no_grad()
def logits(labels: int, text: str, other: str = "") -> NDArray[np.float32]:
    ids = [*ids_of(text)[:-1], *ids_of(other)]
    found: NDArray[np.float32] = (
        reference_encoder(encoder_folder("qwen2", labels), True)(input_ids=torch.tensor([ids])).logits[0].numpy()
    )
    return found


def near(one: object, other: object) -> bool:
    return np.allclose(np.asarray(one), np.asarray(other), atol=2e-4)


def test_what_each_is(server: Server) -> None:
    tasks = {each["id"]: each["task"] for each in server.http.get("/v1/models").json()["data"]}
    assert tasks.pop("judge") == "rerank"
    assert tasks == {"chat": "generate", "same": "embed", "embed": "embed", "rank": "rerank", "class": "classify"}
    about = server.http.get("/info", params={"model": "embed"}).json()
    assert about["model_type"] == {"embedding": {"pooling": "lasttoken"}}
    assert (about["max_input_length"], about["max_batch_tokens"]) == (12, 64)
    assert server.http.get("/info", params={"model": "same"}).json()["max_input_length"] == 512


def test_openai_embeddings(server: Server) -> None:
    texts = ["hello world", "the quick brown fox", "a", "hello hello"] * 6
    found = server.openai.embeddings.create(model="embed", input=texts)
    assert found.usage.prompt_tokens == sum(len(ids_of(text)) for text in texts)
    for each, text in zip(found.data, texts, strict=True):
        assert near(each.embedding, embedding(ids_of(text)))
    short = server.openai.embeddings.create(model="embed", input="hello world", dimensions=16).data[0].embedding
    whole = embedding(ids_of("hello world"))[:16]
    assert near(short, whole / np.linalg.norm(whole))


def test_a_text_that_is_cut_keeps_its_last_token(server: Server) -> None:
    text = "the quick brown fox, " * 3 + "hello world"
    whole = ids_of(text)
    assert len(whole) > 12
    for length in (12, 4):
        body = {"truncate_prompt_tokens": length}
        found = server.openai.embeddings.create(model="embed", input=text, extra_body=body)
        assert found.usage.prompt_tokens == length
        assert near(found.data[0].embedding, embedding([*whole[: length - 1], whole[-1]]))
    with pytest.raises(openai.BadRequestError, match="the model takes 12"):
        server.openai.embeddings.create(model="embed", input=text)


def test_prompts_by_name(server: Server) -> None:
    body = {"model": "embed", "inputs": ["hello", "fox"], "prompt_name": "query"}
    found = server.http.post("/embed", json=body).json()
    assert near(found, [embedding(ids_of(PROMPT + text)) for text in ("hello", "fox")])


def test_the_folder_of_the_model_that_chats(server: Server) -> None:
    ids = [5, 6, 7, 300]
    found = server.openai.embeddings.create(model="same", input=ids).data[0].embedding
    with torch.no_grad():
        states = reference_model().model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1].numpy()
    assert near(found, states)
    assert server.openai.completions.create(model="chat", prompt="hello", max_tokens=3).usage is not None
    refused = server.http.post("/v1/embeddings", json={"model": "chat", "input": "hello"})
    message = refused.json()["error"]["message"]
    assert (refused.status_code, 'where it is served with kind = "encoder"' in message) == (400, True)
    refused = server.http.post("/v1/completions", json={"model": "same", "prompt": "hello"})
    assert (refused.status_code, "kind" in refused.text) == (400, False)


def test_rerank(server: Server) -> None:
    documents = ["world", "the fox", "hello world quick"]
    found = server.http.post("/v1/rerank", json={"model": "rank", "query": "hello", "documents": documents}).json()
    scores = {each["index"]: each["relevance_score"] for each in found["results"]}
    wanted = [1 / (1 + np.exp(-logits(1, "hello", document)[0])) for document in documents]
    assert near([scores[index] for index in range(3)], wanted)


@torch.no_grad()
def judged(query: str, document: str, max_length: int, instruction: str = "find foxes") -> float:
    """As the model card of Qwen3-Reranker computes it."""
    backend = build("bytelevel")

    def ids(text: str) -> list[int]:
        found: list[int] = backend.encode(text, add_special_tokens=False).ids
        return found

    prefix, suffix = ids(JUDGE_PREFIX), ids(JUDGE_SUFFIX)
    pair = ids(f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}")
    pair = pair[: max_length - len(prefix) - len(suffix)]
    scores = reference_model("qwen3")(torch.tensor([prefix + pair + suffix])).logits[0, -1]
    true_id, false_id = JUDGE_IDS
    return torch.stack([scores[false_id], scores[true_id]]).log_softmax(0)[1].exp().item()


def test_a_language_model_reranks_by_its_logits(server: Server) -> None:
    documents = ["the fox", "hello world", "quick", "the quick brown fox sees words, " * 20]
    body = {"model": "judge", "query": "quick foxes?", "documents": documents}
    found = server.http.post("/v1/rerank", json=body).json()
    scores = {each["index"]: each["relevance_score"] for each in found["results"]}
    wanted = [judged("quick foxes?", document, 160) for document in documents]
    assert near([scores[index] for index in range(4)], wanted)
    assert len({round(score, 3) for score in wanted}) == 4
    body = {"model": "judge", "query": "quick foxes?", "texts": documents, "truncate": True}
    ranks = server.http.post("/rerank", json=body).json()
    assert near([each["score"] for each in ranks], sorted(wanted, reverse=True))
    body = {"model": "judge", "query": "quick foxes?", "documents": ["the fox"], "instruction": "see words"}
    (result,) = server.http.post("/v1/rerank", json=body).json()["results"]
    assert near(result["relevance_score"], judged("quick foxes?", "the fox", 160, "see words"))
    refused = server.http.post("/v1/rerank", json={"model": "chat", "query": "a", "documents": ["b"]})
    assert (refused.status_code, "has a LogitScore module" in refused.text) == (400, True)


def test_classification(server: Server) -> None:
    body = {"model": "class", "inputs": "hello world", "raw_scores": True}
    found = {each["label"]: each["score"] for each in server.http.post("/predict", json=body).json()}
    wanted = logits(3, "hello world", "")
    assert near([found[f"LABEL_{index}"] for index in range(3)], wanted)


def test_open_inference_protocol(server: Server) -> None:
    tensor = {"name": "text", "shape": [2], "datatype": "BYTES", "data": ["hello", "the fox"]}
    (output,) = server.http.post("/v2/models/embed/infer", json={"inputs": [tensor]}).json()["outputs"]
    assert (output["name"], output["shape"]) == ("embedding", [2, 64])
    assert near(np.reshape(output["data"], (2, 64)), [embedding(ids_of(text)) for text in ("hello", "the fox")])


def test_batches_are_counted(server: Server) -> None:
    server.openai.embeddings.create(model="embed", input=["hello"] * 3)
    assert server.metric("items_answered_total", model="embed") >= 3
    assert server.metric("batch_tokens_count", model="embed") >= 1

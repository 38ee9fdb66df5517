"""The library with models that embed, classify and compare."""

import json
from pathlib import Path

import numpy as np
import pytest
from support.encoder_factory import encoder_folder
from support.text_tokenizers import build
from tokenizers import processors

import chairlift
from chairlift.demo import demo_path
from chairlift.errors import InvalidRequest
from chairlift.runners.encoder.runner import EncoderRunner
from chairlift.runners.items import Encoding
from chairlift.text.encoding import TextEncoder

TEXTS = ["hello world", "the quick brown fox sees words", "hello", "the fox " * 20]


@pytest.fixture(scope="module", params=[0, 1, 3])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder with so many labels, and a tokenizer."""
    from support.model_factory import edited_folder

    return with_tokenizer(edited_folder(tmp_path_factory.mktemp("model") / "m", encoder_folder("bert", request.param)))


def with_tokenizer(made: Path) -> Path:
    tokenizer = build("wordpiece")
    special = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "<|end|>")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A <|end|>", pair="<s> $A <|end|> $B:1 <|end|>:1", special_tokens=special
    )
    tokenizer.save(str(made / "tokenizer.json"))
    return made


def expected(folder: Path, given: list[str] | list[tuple[str, str]]) -> np.ndarray:
    runner, encoder = EncoderRunner(str(folder), dtype="float32", num_threads=1), TextEncoder(folder, 400)
    runner.load()
    pairs = isinstance(given[0], tuple)
    encodings = encoder.encode_pairs(given) if pairs else encoder.encode_texts(given)  # type: ignore[arg-type]
    return np.stack([runner.run([each])[0] for each in encodings])


def test_each_model_does_what_it_is_for(folder: Path) -> None:
    llm = chairlift.LLM(folder, dtype="float32", num_threads=1, max_batch_size=3, max_batch_tokens=50)
    labels = len(llm._text_model.info.labels)
    vectors = expected(folder, TEXTS)
    if labels == 0:
        embedded = llm.embed(TEXTS, use_tqdm=False)
        np.testing.assert_allclose([each.outputs.embedding for each in embedded], vectors, atol=1e-5)
        assert embedded[0].outputs.hidden_size == 64
        unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        scores = llm.score(TEXTS[0], TEXTS, use_tqdm=False)
        np.testing.assert_allclose([each.outputs.score for each in scores], unit @ unit[0], atol=1e-5)
    else:
        found = llm.classify(TEXTS, use_tqdm=False)
        exact = np.exp(vectors.astype(np.float64))
        probs = exact / (exact + 1) if labels == 1 else exact / exact.sum(axis=1, keepdims=True)
        np.testing.assert_allclose([each.outputs.probs for each in found], probs, atol=1e-5)
        assert [each.outputs.label for each in found] == [f"LABEL_{each.argmax()}" for each in probs]
        assert found[0].outputs.num_classes == labels
    if labels == 1:
        pairs = [(TEXTS[0], TEXTS[1]), (TEXTS[1], TEXTS[2])]
        wanted = 1 / (1 + np.exp(-expected(folder, pairs)[:, 0]))
        scores = llm.score(TEXTS[:2], TEXTS[1:3], use_tqdm=False)
        np.testing.assert_allclose([each.outputs.score for each in scores], wanted, atol=1e-5)
    refused = {0: ("classify",), 1: ("embed",), 3: ("embed", "score")}[labels]
    for name in refused:
        with pytest.raises(InvalidRequest, match="its task is"):
            getattr(llm, name)(*["x"] * (2 if name == "score" else 1))
    for generate in (lambda: llm.generate("x"), lambda: llm.chat([{"role": "user", "content": "x"}])):
        with pytest.raises(InvalidRequest, match="generates nothing"):
            generate()
    llm.close()


def test_scores_by_a_rerankers_own_activation(tmp_path: Path) -> None:
    from support.model_factory import edited_folder

    own = {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}
    folder = with_tokenizer(edited_folder(tmp_path / "m", encoder_folder("bert", 1), **own))
    logits = expected(folder, [(TEXTS[0], TEXTS[1])])[0]
    llm = chairlift.LLM(folder, dtype="float32", num_threads=1)
    assert llm.score(TEXTS[0], TEXTS[1], use_tqdm=False)[0].outputs.score == pytest.approx(logits[0], abs=1e-5)
    probs = llm.classify(TEXTS[0], use_tqdm=False)[0].outputs.probs
    assert probs == pytest.approx(expected(folder, TEXTS[:1])[0].tolist(), abs=1e-5)
    llm.close()


def test_texts_that_are_messages(tmp_path: Path) -> None:
    """Tokens are those of transformers' chat template, and vectors those of these tokens."""
    transformers = pytest.importorskip("transformers")
    from support.encoder_factory import expected_states, sentence_folder

    folder = sentence_folder(tmp_path / "m", encoder_folder("qwen3"), [("Pooling", {"pooling_mode": "lasttoken"})])
    build("bytelevel").save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
    (folder / "chat_template.jinja").write_text(template)
    prompts = {"prompts": {"query": "find foxes"}, "default_prompt_name": "query"}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    form = {"method": "forward", "method_output_name": "last_hidden_state"}
    settings = {"modality_config": {"text": form, "message": form | {"format": "flat"}}}
    (folder / "sentence_bert_config.json").write_text(json.dumps(settings))
    reference = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    texts = TEXTS[:2]
    chats = [[{"role": "system", "content": "find foxes"}, {"role": "user", "content": text}] for text in texts]
    ids = [reference.apply_chat_template(chat, chat_template=template, return_dict=False) for chat in chats]
    llm = chairlift.LLM(folder, kind="encoder", dtype="float32", num_threads=1)
    found = llm.embed(texts, use_tqdm=False)
    assert [each.prompt_token_ids for each in found] == ids
    wanted = [states[-1] for states in expected_states(folder, list(map(Encoding, ids)))]
    np.testing.assert_allclose([each.outputs.embedding for each in found], wanted, atol=2e-4)
    assert llm.score(*texts, use_tqdm=False)[0].prompt_token_ids == [*ids[0], *ids[1]]
    llm.close()


def test_what_can_not_be_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="unknown setting max_num_seqs"):
        chairlift.LLM(encoder_folder("bert"), max_num_seqs=3)
    llm = chairlift.LLM(demo_path(), kind="encoder", num_threads=1)
    assert len(llm.embed("What is batching?", use_tqdm=False)[0].prompt_token_ids) > 2
    assert llm.embed([], use_tqdm=False) == []
    with pytest.raises(InvalidRequest, match="tokens, but the model takes"):
        llm.embed("x " * 5000)
    assert len(llm.embed("x " * 5000, truncate_prompt_tokens=7, use_tqdm=False)[0].prompt_token_ids) == 7
    for wrong in (0, -2):
        with pytest.raises(InvalidRequest, match="truncate_prompt_tokens"):
            llm.embed("x", truncate_prompt_tokens=wrong)
    with pytest.raises(InvalidRequest, match="must not be empty"):
        llm.embed(["x", ""])
    with pytest.raises(InvalidRequest, match="got 2 and 1"):
        llm.score(["x", "y"], ["z"])
    llm.close()
    writer = chairlift.LLM(demo_path(), kv_cache_gb=0.01, num_threads=1)
    with pytest.raises(InvalidRequest, match="kind='encoder'"):
        writer.embed("x")
    writer.close()

"""A model in this process that embeds, classifies or compares texts, and writes none."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from chairlift.config.items import DEFAULT_MAX_BATCH_SIZE, ItemConfig
from chairlift.errors import InvalidRequest
from chairlift.folders.sentence_files import SentenceFiles
from chairlift.library.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from chairlift.runners.check_model import check_model
from chairlift.runners.items import Encoding
from chairlift.runners.make_runner import make_runner
from chairlift.runners.scores import pair_scores, probabilities
from chairlift.text.encoding import Cut, TextEncoder

_SETTINGS = ("dtype", "device", "ops", "quantization", "num_threads")
_LIMITS = ("max_model_len", "max_batch_size", "max_batch_tokens")


class TextModel:
    """Texts in; vectors, probabilities or scores out, in batches of texts of like length.

    Takes of the fields of `ItemConfig` dtype, device, ops, quantization, num_threads, max_model_len, max_batch_size and
    max_batch_tokens. Raises UnsupportedModel or ConfigError. Not thread-safe.
    """

    def __init__(self, model: str, **settings: Any) -> None:
        known = (*_SETTINGS, *_LIMITS)
        if unknown := settings.keys() - set(known):
            raise TypeError(f"unknown setting {', '.join(sorted(unknown))}: for {model} LLM takes {', '.join(known)}")
        self.config = ItemConfig(model=model, kind="encoder", **settings)
        check_model(self.config)
        files = SentenceFiles.read(Path(model))
        self._runner = make_runner(self.config)
        self.info = self._runner.load()
        assert self.info.max_tokens is not None, "an encoder takes only so many positions"
        self._encoder = TextEncoder(model, self.info.max_tokens, files)
        self._serial = 0

    def embed(self, texts: Sequence[str], cut: Cut | None, use_tqdm: bool) -> list[EmbeddingRequestOutput]:
        """A vector of each text."""
        self._need("embed")
        encodings = self._encode(texts, cut)
        vectors = self._run(encodings, use_tqdm)
        return [
            EmbeddingRequestOutput(self._id(), EmbeddingOutput(vector.tolist()), encoding.token_ids)
            for encoding, vector in zip(encodings, vectors, strict=True)
        ]

    def classify(self, texts: Sequence[str], cut: Cut | None, use_tqdm: bool) -> list[ClassificationRequestOutput]:
        """The probabilities of each text's labels."""
        self._need("classify", "rerank")
        encodings = self._encode(texts, cut)
        found = []
        for encoding, logits in zip(encodings, self._run(encodings, use_tqdm), strict=True):
            probs = probabilities(logits, self.info.score_activation)
            output = ClassificationOutput(probs.tolist(), self.info.labels[int(probs.argmax())])
            found.append(ClassificationRequestOutput(self._id(), output, encoding.token_ids))
        return found

    def score(self, pairs: Sequence[tuple[str, str]], cut: Cut | None, use_tqdm: bool) -> list[ScoringRequestOutput]:
        """How well each pair goes together: a reranker's score, or the cosine of two embeddings."""
        self._need("rerank", "embed")
        if not pairs:
            return []
        if self.info.task == "rerank":
            encodings = self._encoder.encode_pairs(pairs, truncate=cut or False)
            scores = pair_scores(self._run(encodings, use_tqdm), self.info.score_activation)
            ids = [encoding.token_ids for encoding in encodings]
        else:
            encodings = self._encode([text for pair in pairs for text in pair], cut)
            rows = np.array(self._run(encodings, use_tqdm), dtype=np.float64).reshape(len(pairs), 2, -1)
            norms = np.linalg.norm(rows, axis=2).prod(axis=1)
            scores = np.einsum("ij,ij->i", rows[:, 0], rows[:, 1]) / np.where(norms > 0, norms, 1)
            ids = [one.token_ids + other.token_ids for one, other in zip(encodings[::2], encodings[1::2], strict=True)]
        return [
            ScoringRequestOutput(self._id(), ScoringOutput(float(score)), each)
            for each, score in zip(ids, scores, strict=True)
        ]

    def close(self) -> None:
        """Release the model's memory."""
        self._runner.close()

    def _need(self, *tasks: str) -> None:
        if self.info.task not in tasks:
            raise InvalidRequest(f"{self.config.model} can't do that: its task is {self.info.task}")

    def _encode(self, texts: Sequence[str], cut: Cut | None) -> list[Encoding]:
        if not all(texts):
            raise InvalidRequest("a text must not be empty", "prompts")
        return self._encoder.encode_texts(texts, truncate=cut or False)

    def _run(self, encodings: Sequence[Encoding], use_tqdm: bool) -> list[npt.NDArray[np.float32]]:
        """The results in the order of the texts. Raises the first error."""
        results: list[Any] = [None] * len(encodings)
        with tqdm(total=len(encodings), desc="texts", disable=not use_tqdm, dynamic_ncols=True) as bar:
            for batch in self._batches(encodings):
                made = self._runner.run([encodings[index] for index in batch])
                for index, value in zip(batch, made, strict=True):
                    if isinstance(value, Exception):
                        raise value
                    results[index] = value
                bar.update(len(batch))
        return results

    def _batches(self, encodings: Sequence[Encoding]) -> list[list[int]]:
        """Indices of texts by batch, the longest first."""
        most, tokens = self.config.max_batch_size or DEFAULT_MAX_BATCH_SIZE, self.config.max_batch_tokens
        batches: list[list[int]] = []
        size = 0
        for index in sorted(range(len(encodings)), key=lambda index: -len(encodings[index].token_ids)):
            length = len(encodings[index].token_ids)
            if not batches or len(batches[-1]) == most or (tokens is not None and size + length > tokens):
                batches.append([])
                size = 0
            batches[-1].append(index)
            size += length
        return batches

    def _id(self) -> str:
        self._serial += 1
        return str(self._serial)

"""The lengths that a batch tells the host are those that lie on the device, whoever makes the batch."""

import pytest
import torch
from support.decoder_harness import Harness, make_request, make_runner
from support.device import DEVICE
from support.encoder_factory import encoder_folder, encodings
from support.model_factory import model_folder

from chairlift.ops.base import AttentionBatch, HeadShape, KVCache
from chairlift.ops.reference import ReferenceOps
from chairlift.runners.encoder.runner import EncoderRunner

Lengths = list[tuple[int, int]]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Lengths:
    """What each attention was told, once it is clear that it is true."""
    told: Lengths = []
    usual = ReferenceOps.attention

    def attention(
        self: ReferenceOps,
        q: torch.Tensor,
        cache: KVCache,
        batch: AttentionBatch,
        heads: HeadShape,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        told.append((batch.max_query_len, batch.max_context_len))
        assert told[-1] == (int(batch.query_start.diff().max()), int(batch.context_len.max()))
        return usual(self, q, cache, batch, heads, sinks)

    monkeypatch.setattr(ReferenceOps, "attention", attention)
    return told


@pytest.mark.skipif(DEVICE == "cuda", reason="steps recorded on a GPU are of a context that is rounded up")
def test_a_decoder_knows_the_lengths_of_each_step(seen: Lengths) -> None:
    runner = make_runner(model_folder("llama"), max_num_seqs=3)
    runner.warm_up()
    assert set(seen) == {(400, 400), (1, 1)}
    seen.clear()
    harness = Harness(runner)
    harness.generate([make_request("a", [1] * 50), make_request("b", [2] * 9)], 3, chunk=20)
    assert list(dict.fromkeys(seen)) == [(20, 20), (20, 40), (10, 50), (1, 51), (1, 52)]


def test_a_decoder_that_embeds_knows_the_lengths_of_its_texts(seen: Lengths) -> None:
    runner = EncoderRunner(str(encoder_folder("llama")), dtype="float32", num_threads=1, ops="reference")
    runner.load()
    runner.run(encodings(lengths=(7, 30, 2)))
    assert set(seen) == {(30, 30)}

"""What gives a text's hidden states: an encoder, or a decoder that only reads."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chairlift.errors import UnsupportedModel
from chairlift.folders.kind import check_reads
from chairlift.folders.model_json import read_model_json
from chairlift.folders.multimodal import is_native
from chairlift.folders.quantization_config import QuantizationConfig
from chairlift.folders.sentence_files import LogitScore
from chairlift.ops.contract import Ops
from chairlift.ops.encoder import EncoderForward, Projection
from chairlift.runners.decoder.config import DecoderConfig, parse_config
from chairlift.runners.decoder.decoder_encoder import DecoderEncoder
from chairlift.runners.decoder.model import Decoder
from chairlift.runners.decoder.read_weights import DecoderReader
from chairlift.runners.encoder.config import EncoderConfig, check_logit_score, read_encoder_config
from chairlift.runners.encoder.model import EncoderReader, Projected
from chairlift.runners.weights import Weights

# The forward pass, and the layers that make logits of what is pooled (none of a model that embeds).
LoadedBackbone = tuple[EncoderForward, list[Projected]]


@dataclass(frozen=True, slots=True)
class Backbone:
    """A model before its weights are read: its sizes, how it pools, and how to read it.

    `pooling` is for embeddings where the folder does not say, `head_pooling` what a classification head wants.
    `type_vocab_size` is 0 where there are no type ids, and `max_tokens` follows from the positions. A head does not see
    tokens of id `padding` at a text's end, and projections may be packed by `packing`. `read(weights, ops, max_tokens,
    num_labels)` reads no head where there are no labels, and raises UnsupportedModel naming a missing, unexpected or
    misshapen tensor, as `read_mask_head` does.
    """

    vocab_size: int
    type_vocab_size: int
    hidden_size: int
    head_dim: int
    max_tokens: int
    pooling: str
    head_pooling: str
    padding: int | None
    packing: QuantizationConfig | None
    read: Callable[[Weights, Ops, int, int], LoadedBackbone]
    read_mask_head: Callable[[Weights], list[Projected]] | None


def read_backbone(folder: Path, score: LogitScore | None = None) -> Backbone:
    """Read `folder`/config.json; a `score` of logits takes the place of a classification head.

    Raises ConfigError and UnsupportedModel as `read_config` does.
    """
    raw = read_model_json(folder)
    if is_native(raw):
        check_reads(raw)
        config = parse_config(raw)
        check_logit_score(score, config)
        return _of_decoder(config, raw, score)
    encoder = read_encoder_config(folder)
    check_logit_score(score, encoder)
    return _of_encoder(encoder)


def _of_encoder(config: EncoderConfig) -> Backbone:
    def read(weights: Weights, ops: Ops, max_tokens: int, num_labels: int) -> LoadedBackbone:
        reader = EncoderReader(config, weights)
        stages = reader.read_head(num_labels) if num_labels else []
        return ops.encoder(reader.read(max_tokens)), stages

    return Backbone(
        vocab_size=config.vocab_size,
        type_vocab_size=config.type_vocab_size,
        hidden_size=config.hidden_size,
        head_dim=config.head_dim,
        max_tokens=config.max_tokens,
        pooling="mean",
        head_pooling=config.head_pooling,
        padding=None,
        packing=None,
        read=read,
        read_mask_head=lambda weights: EncoderReader(config, weights).read_mask_head(),
    )


def _of_decoder(config: DecoderConfig, raw: dict[str, Any], score: LogitScore | None) -> Backbone:
    def read(weights: Weights, ops: Ops, max_tokens: int, num_labels: int) -> LoadedBackbone:
        stages = []
        if score is not None:
            rows = DecoderReader(config, ops, weights).head_rows(score.token_ids)
            # The difference of two logits is what the difference of their rows gives.
            head = rows[:1] if score.false_id is None else rows[:1] - rows[1:]
            stages.append(Projected(Projection(head, None), None, None, 0.0))
        elif num_labels:
            head = weights.take(["score.weight"], [(num_labels, config.hidden_size)]).float()
            stages.append(Projected(Projection(head, None), None, None, 0.0))
        return DecoderEncoder(Decoder(config, ops, weights, head=False), max_tokens), stages

    padding = raw.get("pad_token_id")
    if padding is not None and (not isinstance(padding, int) or isinstance(padding, bool)):
        raise UnsupportedModel(f"pad_token_id must be a whole number, got {padding!r}")
    return Backbone(
        vocab_size=config.vocab_size,
        type_vocab_size=0,
        hidden_size=config.hidden_size,
        head_dim=config.head_dim,
        max_tokens=config.max_positions,
        # Of those that see what came before the last alone has seen the whole text.
        pooling="mean" if config.both_ways else "lasttoken",
        head_pooling="lasttoken",
        # What is written next is written after the last token, whichever it is.
        padding=None if score is not None else padding,
        packing=config.packing,
        read=read,
        read_mask_head=None,
    )

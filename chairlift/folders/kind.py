"""What kind of model a folder holds: whether it is an encoder, its task, its labels."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from chairlift.errors import UnsupportedModel
from chairlift.folders.decoder_families import FAMILIES as DECODERS
from chairlift.folders.encoder_families import FAMILIES as ENCODERS
from chairlift.folders.model_json import is_classifier, positive_size, read_model_json, values_checked
from chairlift.folders.multimodal import is_native
from chairlift.folders.sentence_files import SentenceFiles, pools, scores_logits

Task = Literal["embed", "classify", "rerank", "tensors", "python"]
# Names of architectures with a head that end like those without any: GPT2LMHeadModel, Qwen2ForRewardModel.
_WITH_STATES = [name for name, family in DECODERS.items() if family.mixers is not None]
_HEADS = ("Head", "For")


@values_checked()
def is_encoder(folder: Path) -> bool:
    """Whether the folder holds a model that the encoder runner takes unasked. Raises ConfigError if it holds no model.

    That is an encoder, or a decoder whose tokens modules of sentence-transformers pool, or whose logits they make a
    score of, that has no head, or one for classification.
    """
    raw = read_model_json(folder)
    if raw.get("model_type") in ENCODERS:
        return True
    reads = is_classifier(raw) or any(map(_is_headless, raw.get("architectures") or []))
    return is_native(raw) and (reads or pools(folder) or scores_logits(folder))


def _is_headless(architecture: str) -> bool:
    return architecture.endswith("Model") and not any(each in architecture for each in _HEADS)


def check_reads(raw: Mapping[str, Any]) -> None:
    """Raise UnsupportedModel for a decoder that does not embed.

    That is one with states, or one that embeds by code of its own, which may let tokens see what follows.
    """
    if raw.get("model_type") in _WITH_STATES:
        raise UnsupportedModel(f"model_type {raw['model_type']!r} is served to write texts, and not to embed them")
    own = raw.get("auto_map")
    if isinstance(own, dict) and "AutoModel" in own and raw.get("is_causal") is None:
        code = "auto_map names code in the model's folder, which is never run and may let tokens see those that follow"
        raise UnsupportedModel(f'{code}. If it does not, say so in its config.json: "is_causal": true')


def task_of(folder: Path, raw: Mapping[str, Any]) -> Task:
    """Return "embed", or for what classifies or scores "classify", or "rerank" where there is one label, or one score.

    Raises as `SentenceFiles.read` and `labels_of` do.
    """
    files = SentenceFiles.read(folder)
    num_labels = files.num_scores
    if num_labels is None:
        if not is_classifier(raw) or files.poolings:
            return "embed"
        num_labels = len(labels_of(raw))
    return "rerank" if num_labels == 1 else "classify"


def labels_of(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """The labels by index. Raises UnsupportedModel if `id2label` does not number them from 0."""
    named = raw.get("id2label")
    if named is None:
        return tuple(f"LABEL_{index}" for index in range(positive_size({"num_labels": 2, **raw}, "num_labels")))
    try:
        found = {int(index): str(label) for index, label in named.items()}
        return tuple(found[index] for index in range(len(found)))
    except (AttributeError, ValueError, KeyError) as error:
        raise UnsupportedModel(f"id2label must number the labels from 0, got {named!r}") from error

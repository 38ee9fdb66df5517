"""EncoderRunner: texts as token ids in, vectors or logits out."""

from collections.abc import Sequence
from functools import reduce
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from chairlift.errors import ConfigError, InvalidRequest, UnsupportedModel
from chairlift.folders.kind import labels_of, task_of
from chairlift.folders.model_json import read_model_json
from chairlift.folders.sentence_files import SPLADE, SentenceFiles
from chairlift.ops.base import Quantization
from chairlift.ops.encoder import EncoderForward, Output, Texts, text_means, text_sums
from chairlift.ops.select import has_bf16_products, select_ops
from chairlift.runners.device import find_device
from chairlift.runners.encoder.backbone import Backbone, read_backbone
from chairlift.runners.encoder.model import Projected, read_stage
from chairlift.runners.items import Encoding, ItemInfo
from chairlift.runners.threads import set_threads
from chairlift.runners.weights import Weights

Vector = NDArray[np.float32]

# What the forward pass gives by itself.
_DIRECT: dict[str, Output] = {"mean": "mean", "cls": "first", "lasttoken": "last"}
# What makes probabilities of logits, by a config.json's `problem_type`.
_ACTIVATIONS = {"multi_label_classification": "sigmoid", "regression": "none"}
# Tokens whose numbers for all words are there at once: for a long text's they would be gigabytes.
_WORD_ROWS = 256


class EncoderRunner:
    """Runs an encoder on texts packed end to end, with no padding; implements `runners.items.ItemRunner`.

    A decoder's folder will do as well; its tokens see only what comes before them. A text's result does not depend on
    what shares its batch: with the native operations not in a single bit of its hidden states; Dense modules and
    classification heads, in float32, may round otherwise.
    """

    def __init__(
        self,
        model: str,
        *,
        device: str = "auto",
        dtype: str = "auto",
        ops: str = "auto",
        quantization: Quantization = "none",
        max_tokens: int | None = None,
        num_threads: int | None = None,
    ) -> None:
        """Prepare to load the folder `model`.

        `dtype` "auto" is bfloat16 on CUDA and where the processor multiplies it (AVX2 and newer), float32 elsewhere.
        `max_tokens`, special tokens counted, is what the folder says unless given.
        """
        self._model = Path(model)
        self._device, self._dtype, self._ops, self._quantization = device, dtype, ops, quantization
        self._max_tokens = max_tokens
        self._num_threads = num_threads
        self._stages: list[Projected] = []
        self._poolings: tuple[str, ...] = ()

    @torch.inference_mode()
    def load(self) -> ItemInfo:
        """Read the weights. Raises UnsupportedModel or ConfigError."""
        files, raw = SentenceFiles.read(self._model), read_model_json(self._model)
        backbone = read_backbone(self._model, files.logit_score)
        self._task = task_of(self._model, raw)
        named = raw if files.num_scores is None else {"num_labels": files.num_scores}
        labels = () if self._task == "embed" else labels_of(named)
        # What is pooled is for modules alone: the model's own head is of another task.
        own_labels = 0 if files.poolings else len(labels)
        device = find_device(self._device)
        # Already what says which type is the fastest may compute.
        set_threads(self._num_threads)
        dtype = _dtype(self._dtype, device)
        max_tokens = self._longest(backbone, files)
        ops = select_ops(self._ops, device, dtype, backbone.head_dim, self._quantization)
        with Weights(self._model, dtype, device, backbone.packing) as weights:
            self.forward, self._stages = backbone.read(weights, ops, max_tokens, own_labels)
            if files.poolings == (SPLADE,):
                if backbone.read_mask_head is None:
                    raise UnsupportedModel(f"{self._model} is a decoder, and has no head for SPLADE")
                self._stages = backbone.read_mask_head(weights)
        width = files.width(backbone.hidden_size)
        if files.poolings == (SPLADE,):
            self._poolings, width = (SPLADE,), backbone.vocab_size
        elif own_labels:
            self._poolings = (backbone.head_pooling,)
        else:
            self._poolings = files.poolings or (backbone.pooling,)
            self._stages = [read_stage(stage, device) for stage in files.stages]
        self._normalized = not labels and files.normalized
        self._padding = backbone.padding if own_labels else None
        self._limits = backbone.vocab_size, backbone.type_vocab_size, max_tokens
        self.info = ItemInfo(
            task=self._task,
            device=str(device),
            dtype=str(dtype).removeprefix("torch."),
            ops=ops.name,
            weight_bytes=self.forward.nbytes,
            max_tokens=max_tokens,
            dimensions=None if labels else width,
            hidden_size=backbone.hidden_size,
            labels=labels,
            activation=_ACTIVATIONS.get(str(named.get("problem_type"))) if labels else None,
            own_activation=files.activation,
            pooling="+".join(self._poolings),
            normalized=self._normalized,
            vocab_size=backbone.vocab_size,
        )
        return self.info

    def _longest(self, backbone: Backbone, files: SentenceFiles) -> int:
        most = backbone.max_tokens
        if self._max_tokens is None:
            return min(most, files.max_tokens or most)
        if not 1 <= self._max_tokens <= most:
            raise ConfigError(f"max_tokens ({self._max_tokens}) must be from 1 to the model's {most}")
        return self._max_tokens

    def warm_up(self, sizes: Sequence[int]) -> None:
        """Run batches of so many texts, each of at most 64 tokens; only the largest makes room that is kept."""
        tokens = [0] * min(64, self._limits[2])
        for size in sizes:
            self.run([Encoding(tokens)] * size)

    @torch.inference_mode()
    def run(self, payloads: Sequence[Encoding]) -> list[Vector | Exception]:
        """Compute a vector (or logits) for each text, float32; InvalidRequest for one that the model cannot take."""
        results: list[Vector | Exception | None] = [self._fault(payload) for payload in payloads]
        good = [index for index, fault in enumerate(results) if fault is None]
        for compute, members in (
            (self._compute, [index for index in good if not payloads[index].every_token]),
            (self._tokens, [index for index in good if payloads[index].every_token]),
        ):
            if members:
                vectors = compute(texts_of([self._unpadded(payloads[index]) for index in members]))
                for index, vector in zip(members, vectors, strict=True):
                    results[index] = vector
        return [result for result in results if result is not None]

    def _fault(self, payload: Encoding) -> InvalidRequest | None:
        ids, types = payload.token_ids, payload.type_ids
        vocab, kinds, longest = self._limits
        if not 1 <= len(ids) <= longest:
            return InvalidRequest(f"the input has {len(ids)} tokens; the model takes 1 to {longest}", "input")
        if min(ids) < 0 or max(ids) >= vocab:
            return InvalidRequest(f"token ids must be from 0 to {vocab - 1}", "input")
        if types is not None:
            if len(types) != len(ids):
                return InvalidRequest(f"{len(ids)} token ids, but {len(types)} type ids", "input")
            if kinds and (min(types) < 0 or max(types) >= kinds):
                return InvalidRequest(f"type ids must be from 0 to {kinds - 1}", "input")
        return None

    def _unpadded(self, payload: Encoding) -> Encoding:
        """The same without padding at its end, but for one token."""
        if payload.token_ids[-1] != self._padding:
            return payload
        ids = list(payload.token_ids)
        while len(ids) > 1 and ids[-1] == self._padding:
            ids.pop()
        return Encoding(ids)

    def _compute(self, texts: Texts) -> NDArray[np.float32]:
        if self._poolings == (SPLADE,):
            return self._weigh_words(texts)
        late = self._poolings == ("late",)
        vectors = self.forward(texts, "tokens") if late else pool(self.forward, texts, self._poolings)
        for stage in self._stages:
            vectors = stage(vectors)
        if late:
            vectors = text_means(vectors, torch.from_numpy(texts.starts).to(vectors.device).long())
        if self._normalized:
            vectors = torch.nn.functional.normalize(vectors, dim=-1)
        found: NDArray[np.float32] = vectors.cpu().numpy()
        return found

    def _weigh_words(self, texts: Texts) -> NDArray[np.float32]:
        """For each text the weight of every word: the most that a token says for it, none below 0, as a logarithm."""
        hidden, most = self.forward(texts, "tokens"), []
        for text in hidden.tensor_split(torch.from_numpy(texts.starts[1:-1]).long()):
            most.append(reduce(torch.maximum, map(self._most_of, torch.split(text, _WORD_ROWS))))
        found: NDArray[np.float32] = torch.stack(most).relu().log1p().cpu().numpy()
        return found

    def _most_of(self, rows: Tensor) -> Tensor:
        for stage in self._stages:
            rows = stage(rows)
        return rows.amax(0)

    def _tokens(self, texts: Texts) -> list[NDArray[np.float32]]:
        """The vectors of each text's tokens, before whatever is made of all of them."""
        hidden: NDArray[np.float32] = self.forward(texts, "tokens").cpu().numpy()
        return np.split(hidden, texts.starts[1:-1])

    def close(self) -> None:
        """Release the weights."""
        self._stages = []
        if hasattr(self, "forward"):
            del self.forward


def texts_of(payloads: Sequence[Encoding]) -> Texts:
    """Pack valid payloads end to end."""
    starts = np.zeros(len(payloads) + 1, np.int32)
    np.cumsum([len(payload.token_ids) for payload in payloads], out=starts[1:])
    token_ids = np.fromiter((i for payload in payloads for i in payload.token_ids), np.int32, starts[-1])
    type_ids = None
    if any(payload.type_ids is not None for payload in payloads):
        type_ids = np.zeros(starts[-1], np.int32)
        for payload, start in zip(payloads, starts.tolist(), strict=False):
            if payload.type_ids is not None:
                type_ids[start : start + len(payload.type_ids)] = payload.type_ids
    return Texts(token_ids, type_ids, starts)


def _dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "auto":
        fast = device.type == "cuda" or has_bf16_products()
        return torch.bfloat16 if fast else torch.float32
    found = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(name)
    if found is None:
        raise ConfigError(f"dtype {name!r} must be 'auto', 'float32' or 'bfloat16'")
    return found


def pool(forward: EncoderForward, texts: Texts, poolings: Sequence[str]) -> Tensor:
    """Run the forward pass and return [S, H * len(poolings)] float32, the poolings side by side."""
    if len(poolings) == 1 and poolings[0] in _DIRECT:
        return forward(texts, _DIRECT[poolings[0]])
    hidden = forward(texts, "tokens")
    starts = torch.from_numpy(texts.starts).to(hidden.device).long()
    lengths = starts.diff()
    owner = torch.arange(len(lengths), device=hidden.device).repeat_interleave(lengths)
    return torch.cat([_pooled(hidden, starts, lengths, owner, pooling) for pooling in poolings], dim=1)


def _pooled(hidden: Tensor, starts: Tensor, lengths: Tensor, owner: Tensor, pooling: str) -> Tensor:
    if pooling in ("cls", "lasttoken"):
        return hidden[starts[:-1] if pooling == "cls" else starts[1:] - 1]
    if pooling == "max":
        index = owner.unsqueeze(1).expand_as(hidden)
        return hidden.new_zeros(len(lengths), hidden.shape[1]).scatter_reduce_(
            0, index, hidden, "amax", include_self=False
        )
    counts = lengths.unsqueeze(1).float()
    if pooling == "weightedmean":
        # A token's weight is its place, from 1 on.
        places = torch.arange(1, len(hidden) + 1, device=hidden.device) - starts[:-1][owner]
        hidden, counts = hidden * places.unsqueeze(1), counts * (counts + 1) / 2
    sums = text_sums(hidden, lengths)
    return sums / (counts.sqrt() if pooling == "mean_sqrt_len_tokens" else counts)

"""A language model whose layers are transformers' modules, with our products and our attention over the paged cache.

The same interface as `Decoder`: what `forward` gives are logits already, since how a model makes them differs.
"""

import contextlib
import inspect
import logging
from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from chairlift.core.cost import ExpertReads
from chairlift.errors import UnsupportedModel
from chairlift.folders.model_json import positive_size
from chairlift.folders.transformers_config import TransformersConfig
from chairlift.ops.base import Allowed, AttentionBatch, Inputs, KVCache, StateSpans
from chairlift.ops.contract import Ops
from chairlift.ops.drawing import best_allowed
from chairlift.ops.kv_layout import bytes_of_token, has_kernels
from chairlift.runners.decoder.recorded_steps import GraphRecorder, RecordedSteps
from chairlift.runners.decoder.recurrent_states import RecurrentStates
from chairlift.runners.decoder.transformers_attention import PagedAttention, under_way
from chairlift.runners.decoder.transformers_layers import shorten
from chairlift.runners.decoder.transformers_loading import load_model, quiet
from chairlift.runners.decoder.transformers_parts import put_in, set_apart
from chairlift.runners.decoder.transformers_rotation import give_back, take_over
from chairlift.runners.decoder.transformers_states import StatefulLayers, probe
from chairlift.runners.error_text import first_line

log = logging.getLogger(__name__)

# Lengths of the two texts by which a loaded model is checked, and where they are cut: the last part is one token.
_LENGTHS, _CUTS = (12, 9), ((0, 0), (7, 4), (11, 8))
# What forward passes have called the cache: transformers from 5.24 on, before that, and some of Mamba's kin still.
_CACHE_NAMES = "cache", "past_key_values", "cache_params"
# Families whose window transformers puts into masks alone, of which none is made here.
_WINDOW_IN_MASK = {"phimoe"}
# The first version whose modules ask for each state by itself.
_STATES_SINCE = "5.21"
# By how much logits may differ that should be equal, as a share of the largest.
_CLOSE = {torch.float32: 1e-3, torch.bfloat16: 0.2}


class _Span(NamedTuple):
    """Tokens of a text that a pass computes, and the blocks that the text has."""

    first: int
    stop: int
    blocks: list[int]


class TransformersModel:
    """A loaded model and its KV cache. Raises UnsupportedModel for what can't be honoured, at loading."""

    # What a step reads of them is not known: its modules may compute all of them.
    experts: ExpertReads | None = None
    num_candidates = 1

    def __init__(
        self,
        folder: Path,
        config: TransformersConfig,
        ops: Ops,
        dtype: torch.dtype,
        device: torch.device,
        cache_dtype: torch.dtype,
    ) -> None:
        self.config, self.ops, self.dtype, self.device, self.cache_dtype = config, ops, dtype, device, cache_dtype
        self._attention = PagedAttention(ops)
        self._model = load_model(folder, config.packing, dtype, device)
        parameters = inspect.signature(self._model.forward).parameters
        self._takes_rows = "logits_to_keep" in parameters
        self._cache_name = next((each for each in _CACHE_NAMES if each in parameters), _CACHE_NAMES[-1])
        self._stateful: StatefulLayers | None = None
        # On CUDA, where nothing waits for what it computes.
        self.recorded: RecordedSteps | None = None
        before = self._note_layers()
        packed = put_in(self._model, ops)
        self.weight_bytes = packed + sum(each.nbytes for each in self._model.parameters())
        now = self._computed()
        if ops.quantization == "none":
            self._hold_against(before, now)
        self._leave_rotation(now)
        self._shorten(now)

    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V, with their scales if they have any, that one token takes over all layers."""
        scale = torch.float32.itemsize if self.cache_dtype == torch.int8 else 0
        size, pads = self.cache_dtype.itemsize, self.ops.pads_values
        return sum(
            heads.num_kv_heads * bytes_of_token(heads.head_dim, size, scale, pads)
            for layer, heads in self._attention.heads.items()
            if layer not in self._attention.shares
        )

    @property
    def state_bytes(self) -> int:
        """Bytes of what layers remember of a sequence beside keys and values."""
        return 0 if self._stateful is None else RecurrentStates.bytes_of(self._stateful.shapes)

    def make_states(self, rows: int) -> RecurrentStates:
        """Have layers keep their states in so many rows, which a pass says by `Inputs.states`."""
        assert self._stateful is not None
        with _told(), quiet():
            states = self._stateful.allocate(rows, self.device, self.ops)
        if "tokens" in self._stateful.ways.values():
            log.warning("its layers go on with a text token by token: chunks and prefix hits are slow")
        return states

    @property
    def caches(self) -> list[KVCache]:
        """Those of all layers; of those that share one it is there once."""
        return self._attention.caches

    @property
    def _heads(self) -> Sequence[Any]:
        return list(self._attention.heads.values())

    def allocate(self, num_blocks: int, block_size: int, max_model_len: int) -> None:
        """Allocate the KV cache, and check what the model computes over it."""
        self._attention.allocate(num_blocks, block_size, self.cache_dtype, self.device)
        with _told(), quiet():
            self._check(num_blocks, block_size, max_model_len)
        self._attention.rotation.sure = True
        if self.device.type == "cuda" and self._stateful is None:
            recorder = GraphRecorder(is_trusted=False)
            steps = RecordedSteps(self._forward, block_size, max_model_len, recorder)
            self.record(steps, num_blocks, block_size, max_model_len)

    def record(self, steps: RecordedSteps, num_blocks: int, block_size: int, max_model_len: int) -> None:
        """Leave decodes to `steps`, if they give the same: as they are, recorded, and done again for other texts."""
        self.recorded, problem = steps, ""
        try:
            with quiet():
                same = all(self._same_in_parts(num_blocks, block_size, max_model_len, seed) for seed in range(3))
            if not same:
                problem = "a recorded step gives something else"
            elif not steps.has_recordings:
                problem = "the cache is too small to try it"
        except RuntimeError as error:
            problem = first_line(error)
        if problem:
            self.recorded = None
            log.warning("its decodes are not recorded as CUDA graphs, which makes them slow: %s", problem)

    def forward(self, inputs: Inputs) -> Tensor:
        """Write K and V of all tokens and return the logits [R, V] of `inputs.logit_rows`."""
        return self._forward(inputs) if self.recorded is None else self.recorded.forward(inputs)

    def _forward(self, inputs: Inputs) -> Tensor:
        self._attention.begin(inputs.attention)
        if self._stateful is not None:
            assert inputs.states is not None
            with self._stateful.under_way(inputs.states):
                return self._pass(inputs.token_ids, inputs.attention.positions, inputs.logit_rows)
        return self._pass(inputs.token_ids, inputs.attention.positions, inputs.logit_rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """The logits that `forward` gave."""
        return hidden

    def best(self, hidden: Tensor, allowed: Allowed | None = None) -> tuple[Tensor, Tensor]:
        """Return each row's highest logit [R] float32 (NaN if any is), and the first token [R] that has it."""
        logits = hidden.float()
        return self.ops.highest(logits) if allowed is None else best_allowed(logits.clone(), allowed)

    def candidates(self, hidden: Tensor, allowed: Allowed | None = None) -> tuple[Tensor, Tensor]:
        """Return what `best` does, [R, 1] both."""
        values, tokens = self.best(hidden, allowed)
        return values[:, None], tokens[:, None]

    def _pass(self, ids: Tensor, positions: Tensor, rows: Tensor, cache: Any = None) -> Tensor:
        more: dict[str, Any] = {"logits_to_keep": rows} if self._takes_rows else {}
        if cache is not None:
            more[self._cache_name] = cache
        with under_way(self._attention):
            found = self._model(
                input_ids=ids[None],
                position_ids=positions[None],
                use_cache=cache is not None,
                return_dict=True,
                **more,
            )
        logits: Tensor = found.logits[0]
        return logits if self._takes_rows else logits[rows]

    def _short_text(self, cache: Any = None) -> Tensor:
        """The logits [V] float32 of a few tokens, computed without our caches."""
        count = min(8, self.config.max_positions)
        ids = torch.arange(count, device=self.device) * 7 % self.config.vocab_size
        with _told():
            last = ids[-1:] * 0 + count - 1
            return self._pass(ids, torch.arange(count, device=self.device), last, cache)[0].float()

    def _hold_against(self, before: Tensor, now: Tensor) -> None:
        """Raise UnsupportedModel unless logits are what they were before something was put in a module's place."""
        if not (now - before).abs().max() <= _CLOSE[self.dtype] * before.abs().max():
            raise UnsupportedModel("with our products in place of its own it computes something else")

    def _computed(self) -> Tensor:
        """The logits of a few tokens, with parts of projections side by side unless a module can't take them so."""
        try:
            return self._short_text()
        except UnsupportedModel:
            set_apart(self._model)
            return self._short_text()

    def _leave_rotation(self, now: Tensor) -> None:
        """Have queries and keys rotated where they are written, if that gives the same as it gives now."""
        modules = self._attention.modules.values()
        take_over(modules, self._attention.rotation)
        try:
            self._hold_against(now, self._short_text())
        except UnsupportedModel:
            give_back(modules)
            self._attention.rotation.begin()

    def _shorten(self, now: Tensor) -> None:
        """Have layers of the most common shape computed without their modules, if that gives the same as `now`."""
        layers = shorten(self._model, self._attention, self.ops)
        try:
            self._hold_against(now, self._short_text())
        except UnsupportedModel:
            give_back(layers)
        self._attention.rotation.begin()

    def _note_layers(self) -> Tensor:
        """Have a few tokens go through, to see what heads there are; return the logits of the last."""
        text_config = self._model.config.get_text_config(decoder=True)
        if text_config.model_type in _WINDOW_IN_MASK and (window := text_config.sliding_window) is not None:
            self._attention.window = positive_size({"sliding_window": window}, "sliding_window")
        with _told(), quiet():
            found_logits, self._stateful = probe(self._model, text_config, self._short_text)
        # What rows may choose has a bit for each token of the vocabulary, and no more.
        if len(found_logits) > (size := self.config.vocab_size):
            raise UnsupportedModel(f"it has logits for {len(found_logits)} tokens, and by config.json {size}")
        layers = text_config.num_hidden_layers
        stateful = set() if self._stateful is None else {*self._stateful.ways}
        # Between layers with states some families have others that are an MLP alone.
        missing = {*range(layers)} - {*self._attention.heads} - stateful
        if (missing and not stateful) or not {*self._attention.heads} <= {*range(layers)}:
            found = len(self._attention.heads)
            raise _unknown(f"of its {layers} layers {found} have an attention that can be taken over")
        # Operations were chosen by what config.json says; layers may have others.
        sizes = {heads.head_dim for heads in self._heads}
        if has_kernels(self.config.head_dim) and (without := [size for size in sizes if not has_kernels(size)]):
            raise UnsupportedModel(f"its heads have {without[0]} numbers, for which there are no kernels")
        kinds = getattr(text_config, "layer_types", None) or []
        for layer, kind in enumerate(kinds):
            heads = self._attention.heads.get(layer)
            if heads is not None and (kind == "sliding_attention") != (heads.window is not None):
                raise UnsupportedModel(f"layer {layer} is of type {kind!r}, but its attention is not told of a window")
        if not kinds:
            self._refuse_untold(text_config)
        return found_logits

    def _refuse_untold(self, text_config: Any) -> None:
        """Raise UnsupportedModel for a window that config.json has, and that a layer's attention is not told of.

        It may be in a mask, and then those tokens would be seen that it hides.
        """
        window = getattr(text_config, "sliding_window", None)
        if not isinstance(window, int) or getattr(text_config, "use_sliding_window", True) is False:
            return
        if 0 < window < self.config.max_positions and any(heads.window is None for heads in self._heads):
            problem = f"sliding_window={window} is not supported for {text_config.model_type}, whose attention is not"
            raise UnsupportedModel(f"{problem} told of it; with max_position_embeddings={window} it would hide nothing")

    def _check(self, num_blocks: int, block_size: int, max_model_len: int) -> None:
        """Hold texts that are computed in parts, and in company, against the same ones computed alone.

        They differ where a model has more than its attention and its states to remember by, or counts positions itself.
        """
        if not self._same_in_parts(num_blocks, block_size, max_model_len):
            problem = "what it computes in parts, or beside others, is not what it computes at once and alone"
            raise _unknown(f"{problem}: it remembers by more than its attention")

    def _same_in_parts(self, num_blocks: int, block_size: int, max_model_len: int, seed: int = 0) -> bool:
        """Whether two texts are; their lengths change places with every seed."""
        order = -1 if seed % 2 else 1
        lengths, cuts = [min(length, max_model_len) for length in _LENGTHS[::order]], [cut[::order] for cut in _CUTS]
        needed = [-(-length // block_size) for length in lengths]
        if num_blocks < sum(needed) or any(length <= cut for length, cut in zip(lengths, cuts[-1], strict=True)):
            return True
        generator = torch.Generator().manual_seed(seed)
        texts = [torch.randint(self.config.vocab_size, (length,), generator=generator) for length in lengths]
        blocks = [list(range(needed[0])), list(range(needed[0], sum(needed)))]
        alone = [
            self._compute([text], [_Span(0, len(text), mine)], block_size)[0]
            for text, mine in zip(texts, blocks, strict=True)
        ]
        for begins, ends in pairwise([*cuts, lengths]):
            spans = [_Span(*each) for each in zip(begins, ends, blocks, strict=True)]
            parts = self._compute(texts, spans, block_size)
        pairs = zip(alone, parts, strict=True)
        return all((one - other).abs().max() <= _CLOSE[self.dtype] * one.abs().max() for one, other in pairs)

    def _compute(self, texts: Sequence[Tensor], spans: Sequence[_Span], block_size: int) -> Tensor:
        """The logits of the last token of each text's span [S, V] float32."""
        device, counts = self.device, torch.tensor([span.stop - span.first for span in spans])
        positions = torch.cat([torch.arange(span.first, span.stop) for span in spans])
        tables = torch.zeros(len(spans), max(len(span.blocks) for span in spans), dtype=torch.int32)
        slots = []
        for row, span in enumerate(spans):
            tables[row, : len(span.blocks)] = torch.tensor(span.blocks)
            where = torch.arange(span.first, span.stop)
            slots.append(tables[row, where // block_size].long() * block_size + where % block_size)
        ends = counts.cumsum(0)
        batch = AttentionBatch(
            query_start=torch.cat((torch.zeros(1, dtype=torch.int64), ends)).int().to(device),
            context_len=torch.tensor([span.stop for span in spans], dtype=torch.int32, device=device),
            block_tables=tables.to(device),
            slot_mapping=torch.cat(slots).to(device),
            positions=positions.to(device),
            max_query_len=int(counts.max()),
            max_context_len=max(span.stop for span in spans),
        )
        states = None
        if self._stateful is not None:
            rows = list(range(len(spans)))
            for row, span in enumerate(spans):
                if not span.first:
                    self._stateful.states.clear(row)
            states = StateSpans(rows, [span.first for span in spans], [0, *ends.tolist()], {})
        ids = torch.cat([text[span.first : span.stop] for text, span in zip(texts, spans, strict=True)])
        return self.forward(Inputs(ids.to(device), batch, (ends - 1).to(device), states)).float()


def _unknown(problem: str) -> UnsupportedModel:
    """The error of a model that remembers in ways that are not known, which may be for the age of transformers."""
    version: str = import_module("transformers").__version__
    if _major_minor(version) < _major_minor(_STATES_SINCE):
        problem += f"; this is transformers {version}, and layers with states need {_STATES_SINCE} or newer"
    return UnsupportedModel(problem)


def _major_minor(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """Around a pass that may fail for any reason: each is an UnsupportedModel."""
    try:
        yield
    except UnsupportedModel:
        raise
    except Exception as error:
        raise UnsupportedModel(f"transformers fails to compute it: {first_line(error)}") from error

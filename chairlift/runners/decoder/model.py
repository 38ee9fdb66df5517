"""The one parametric decoder: embedding, layers, final norm, head."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from chairlift.core.cost import ExpertReads
from chairlift.ops.base import Allowed, DecoderWeights, Forward, Head, Inputs, KVCache, Mixer
from chairlift.ops.contract import Ops
from chairlift.ops.experts import Experts
from chairlift.ops.mamba_mixer import MambaMixer
from chairlift.ops.rotation import RotaryTable
from chairlift.ops.short_convolution import ShortConvolution
from chairlift.runners.decoder.config import DecoderConfig
from chairlift.runners.decoder.read_weights import DecoderReader
from chairlift.runners.decoder.recorded_steps import RecordedSteps
from chairlift.runners.decoder.recurrent_states import RecurrentStates, StateShape
from chairlift.runners.decoder.rope import RopeConfig
from chairlift.runners.weights import Weights


class Decoder:
    """A loaded model and its KV cache. Hidden size is H, vocabulary V."""

    def __init__(
        self,
        config: DecoderConfig,
        ops: Ops,
        weights: Weights,
        *,
        cache_dtype: torch.dtype | None = None,
        head: bool = True,
    ) -> None:
        """Read and pack the weights; `cache_dtype`, of the KV cache, is theirs unless given.

        Without `head` there are hidden states only, and whatever heads the files hold are left there. Raises
        UnsupportedModel naming a missing, unexpected or misshapen tensor.
        """
        self.config = config
        self.ops = ops
        self.dtype = weights.dtype
        self.cache_dtype = cache_dtype or weights.dtype
        self.device = weights.device
        self.weights = DecoderReader(config, ops, weights).read(head)
        self.weight_bytes = _nbytes(self.weights)
        # Of each layer; empty where there is no attention.
        self.caches: list[KVCache] = []
        self.states: RecurrentStates | None = None
        self._recurrence = ops.recurrence()
        self.rotations: list[RotaryTable] = []
        # Does as `forward`, all in one native call; None where there is no such thing.
        self.fused: Forward | None = None
        # On CUDA, where nothing waits for what it computes.
        self.recorded: RecordedSteps | None = None

    @property
    def experts(self) -> ExpertReads | None:
        """What is read of the experts, if there are any. One that all tokens use is none of them."""
        mixtures = [layer.mlp for layer in self.weights.layers if isinstance(layer.mlp, Experts)]
        if not mixtures or self.config.experts is None:
            return None
        held = sum(expert.nbytes for mixture in mixtures for expert in mixture.experts)
        return ExpertReads(held / self.weight_bytes, self.config.experts.chosen / self.config.experts.count)

    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V, with their scales if they have any, that one token takes over all layers."""
        scale = torch.float32.itemsize if self.cache_dtype == torch.int8 else 0
        return self.config.kv_bytes_per_token(self.cache_dtype.itemsize, scale, self.ops.pads_values)

    @property
    def state_bytes(self) -> int:
        """Bytes of what layers remember of a sequence beside keys and values."""
        return RecurrentStates.bytes_of(self._state_shapes())

    def _state_shapes(self) -> list[StateShape]:
        mixers = [(index, layer.mixer) for index, layer in enumerate(self.weights.layers) if layer.mixer is not None]
        return [StateShape(index, *each) for index, mixer in mixers for each in mixer.states(self.dtype)]

    def make_states(self, rows: int) -> RecurrentStates:
        """Have layers keep their states in so many rows, which a pass says by `Inputs.states`; before `allocate`."""
        self.states = RecurrentStates(self._state_shapes(), rows, self.device)
        return self.states

    def allocate(self, num_blocks: int, block_size: int, max_model_len: int, *, one_layer: bool = False) -> None:
        """Allocate the KV cache and the tables of rotations; layers with the same rotation share one.

        With `one_layer` all layers take turns in the memory of one, which suits passes that hold whole sequences.
        """
        ropes = self.config.ropes
        tables = {rope: self._rotary_table(rope, max_model_len) for rope in set(ropes)}
        self.rotations = [tables[rope] for rope in ropes]
        layers = self.weights.layers
        self.caches = [
            self.ops.allocate_kv_cache(num_blocks, block_size, layer.heads, self.cache_dtype, self.device)
            if layer.mixer is None
            else ()
            for layer in (layers[:1] if one_layer else layers)
        ]
        if one_layer:
            self.caches *= len(layers)
        states = [() if layer.mixer is None else self._states_of(index) for index, layer in enumerate(layers)]
        self.fused = self.ops.fuse(self.weights, self.caches, self.rotations, states)
        # Which rows an expert takes has to be known on the host.
        if self.device.type == "cuda" and self.experts is None and not one_layer:
            self.recorded = RecordedSteps(self._forward, block_size, max_model_len)

    def _rotary_table(self, rope: RopeConfig, length: int) -> RotaryTable:
        factors = rope.query_factors(length)
        table = rope.table(self.config.head_dim, length).to(self.device)
        return RotaryTable(table, None if factors is None else factors.to(self.device))

    def forward(self, inputs: Inputs) -> Tensor:
        """Write K and V of all tokens and return the normalized hidden states [R, H] of `inputs.logit_rows`."""
        if self.states is None:
            return self._pass(inputs)
        assert inputs.states is not None
        with self.states.passing(inputs.states):
            return self._pass(inputs)

    def _pass(self, inputs: Inputs) -> Tensor:
        if self.fused is not None:
            return self._shifted(self.fused(inputs))
        return self._forward(inputs) if self.recorded is None else self.recorded.forward(inputs)

    def _forward(self, inputs: Inputs) -> Tensor:
        """Run one operation after the other."""
        weights, rows = self.weights, inputs.logit_rows
        residual = self._embed(inputs.token_ids, inputs.attention.positions)
        last = len(weights.layers) - 1
        hidden = self._normalized(residual, weights.layers[0].attention_pre_norm)
        following = [layer.attention_pre_norm for layer in weights.layers[1:]] + [weights.norm]
        spans = None if inputs.states is None or self._recurrence is None else self._recurrence.prepare(inputs.states)
        for index, (layer, next_norm) in enumerate(zip(weights.layers, following, strict=True)):
            mixed = self._mix(index, layer.qkv(hidden), inputs, spans)
            if index == last and not len(rows):
                return residual[:0]
            if index == last and len(rows) < len(residual):
                # Behind the last layer's attention tokens no longer meet, so only the wanted rows go on.
                mixed, residual = mixed[rows], residual[rows]
            if layer.parallel:
                added = layer.mlp(self._normalized(residual, layer.mlp_pre_norm))
                self._add(layer.out(mixed), residual, layer.attention_post_norm, None)
            else:
                hidden = self._add(layer.out(mixed), residual, layer.attention_post_norm, layer.mlp_pre_norm)
                added = layer.mlp(hidden)
            hidden = self._add(added, residual, layer.mlp_post_norm, next_norm)
        return self._shifted(hidden)

    def _mix(self, index: int, projected: Tensor, inputs: Inputs, spans: object) -> Tensor:
        """What a layer's tokens [T, ...], as its first product gives them, make of each other: [T, ...]."""
        ops, layer, cache, batch = self.ops, self.weights.layers[index], self.caches[index], inputs.attention
        if layer.mixer is not None:
            return self._run_mixer(layer.mixer, projected, spans, self._states_of(index))
        eps, norms, gates = self.config.rms_norm_eps, (layer.q_norm, layer.k_norm), None
        if layer.gated:
            width = layer.heads.num_heads * layer.heads.head_dim
            gates, projected = projected[:, -width:], projected[:, :-width].contiguous()
        query = ops.rope_and_write(projected, self.rotations[index], batch, cache, layer.heads, *norms, eps)
        if index == len(self.caches) - 1 and not len(inputs.logit_rows):
            return query
        mixed = ops.attention(query, cache, batch, layer.heads, layer.sinks)
        return mixed if gates is None else mixed.mul_(gates.sigmoid())

    def _run_mixer(self, mixer: Mixer, projected: Tensor, spans: object, states: Sequence[Tensor]) -> Tensor:
        kernels, seen = self._recurrence, states[0]
        assert kernels is not None
        if isinstance(mixer, ShortConvolution):
            return mixer.run(
                projected, lambda x: kernels.causal_conv(spans, seen, x, mixer.weight, mixer.bias, silu=False)
            )
        parts = torch.split(projected, mixer.widths, dim=1)
        if isinstance(mixer, MambaMixer):
            return mixer.run(
                parts,
                lambda x: kernels.causal_conv(spans, seen, x, mixer.taps, mixer.bias, silu=True),
                lambda xbc, steps: kernels.mamba2(spans, states[1], xbc, steps, mixer.decay, mixer.skip),
                self.config.rms_norm_eps,
            )
        return mixer.run(
            parts,
            lambda x: kernels.causal_conv(spans, seen, x, mixer.taps, None, silu=True),
            lambda qkv, decay, beta: kernels.gated_delta(spans, states[1], qkv, decay, beta, unit=True),
            lambda x, weight: self.ops.rms_norm(x, weight, self.config.rms_norm_eps),
        )

    def _states_of(self, layer: int) -> Sequence[Tensor]:
        assert self.states is not None, "the states of a layer are made before its cache"
        return list(self.states.of_layer(layer).values())

    def _shifted(self, hidden: Tensor) -> Tensor:
        """What the last norm gives, with what a LayerNorm adds to it."""
        bias = self.weights.norm_bias
        return hidden if bias is None else hidden.add_(bias)

    def _normalized(self, residual: Tensor, norm: Tensor | None) -> Tensor:
        return residual if norm is None else self.ops.rms_norm(residual, norm, self.config.rms_norm_eps)

    def _embed(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        weights = self.weights
        if weights.embedding is not None:
            rows = functional.embedding(token_ids, weights.embedding)
        else:
            rows = self._head.embed(token_ids)
        if weights.embedding_scale != 1:
            rows = rows.mul_(weights.embedding_scale)
        return rows if weights.positions is None else rows.add_(functional.embedding(positions, weights.positions))

    def _add(self, x: Tensor, residual: Tensor, post_norm: Tensor | None, next_norm: Tensor | None) -> Tensor:
        """Add what a part of a layer gives into `residual` in place; return what the next is given, which may be it."""
        ops, eps = self.ops, self.config.rms_norm_eps
        if post_norm is not None:
            x = ops.rms_norm(x, post_norm, eps)
        return residual.add_(x) if next_norm is None else ops.add_rms_norm(x, residual, next_norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [R, V] logits, in float32 or the model's dtype, of hidden states [R, H]."""
        return self._capped(self._head.logits(hidden))

    def best(self, hidden: Tensor, allowed: Allowed | None = None) -> tuple[Tensor, Tensor]:
        """Return each row's highest logit [R] float32 (NaN if any is), and the first token [R] that has it."""
        values, tokens = self._head.best(hidden, allowed)
        return self._capped(values), tokens

    @property
    def num_candidates(self) -> int:
        """How many tokens `candidates` gives for a row."""
        return self._head.num_candidates

    def candidates(self, hidden: Tensor, allowed: Allowed | None = None) -> tuple[Tensor, Tensor]:
        """Return what `best` does for the C likeliest tokens of each row, the likeliest first: [R, C] both."""
        values, tokens = self._head.candidates(hidden, allowed)
        return self._capped(values), tokens

    def _capped(self, logits: Tensor) -> Tensor:
        """Press logits below the cap, if there is one; what stands for no token stays -inf."""
        cap = self.config.logit_cap
        return logits if cap is None else torch.where(logits.isinf(), logits, (logits / cap).tanh() * cap)

    @property
    def _head(self) -> Head:
        head = self.weights.head
        assert head is not None, "this model was read without its head"
        return head


def _nbytes(weights: DecoderWeights) -> int:
    parts = weights.norm, weights.head, weights.embedding, weights.positions
    total = sum(part.nbytes for part in parts if part is not None)
    for layer in weights.layers:
        total += 0 if layer.mixer is None else layer.mixer.nbytes
        total += layer.qkv.nbytes + layer.out.nbytes + layer.mlp.nbytes
        total += sum(norm.nbytes for norm in layer.norms)
    return total

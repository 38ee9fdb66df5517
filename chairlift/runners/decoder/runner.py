"""DecoderRunner: steps in, sampled tokens out."""

import contextlib
import gc
import logging
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from chairlift.config.sequences import SequenceConfig
from chairlift.core.sequences.step import Start, Step, StepResult
from chairlift.errors import UnsupportedModel
from chairlift.folders.tensor_files import GGUF_WEIGHTS, weight_files
from chairlift.folders.transformers_config import TransformersConfig
from chairlift.gguf.gguf_file import parts_of
from chairlift.ops.base import AttentionBatch, Inputs, Ints, StateSpans
from chairlift.ops.select import select_ops
from chairlift.runners.decoder.batch import PersistentBatch, Prepared
from chairlift.runners.decoder.config import DecoderConfig, computed_dtype, max_length, read_any_config
from chairlift.runners.decoder.kv_memory import (
    available_bytes,
    free_beside_states,
    num_kv_blocks,
    num_state_snapshots,
    taking_kv_memory,
)
from chairlift.runners.decoder.kv_pages import KvPages
from chairlift.runners.decoder.logprobs import Logprobs
from chairlift.runners.decoder.model import Decoder
from chairlift.runners.decoder.recurrent_states import Saves, StateKeeper
from chairlift.runners.decoder.sampler import Choice, Sampler
from chairlift.runners.device import find_device
from chairlift.runners.grammars.grammar import GrammarError
from chairlift.runners.grammars.grammar_compiler import GrammarCompiler
from chairlift.runners.grammars.grammar_rows import GrammarRows
from chairlift.runners.low_priority import while_computing
from chairlift.runners.sequences import GrammarDone, SequenceInfo
from chairlift.runners.threads import set_threads
from chairlift.runners.weights import Weights

if TYPE_CHECKING:
    from chairlift.runners.decoder.transformers_model import TransformersModel

log = logging.getLogger(__name__)

# Prompt positions whose log-probabilities are computed at once: bounds the float32 copies of their logits.
_PROMPT_ROWS = 64


# A model this small lies in a core's cache: waking other threads for its products costs more than they save, and far
# more when something else keeps those cores busy.
_ONE_THREAD_BYTES = 32 * 2**20

# Each tensor begins at a multiple of this many bytes, so that any type can be read where it lies.
_ALIGNMENT = 8
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_NUMPY = {torch.float32: np.float32, torch.float64: np.float64, torch.int32: np.int32, torch.int64: np.int64}


class DecoderRunner:
    """Runs a decoder-only language model under continuous batching; implements `runners.sequences.SequenceRunner`.

    The KV cache's size is given in closed form by `kv_memory.num_kv_blocks`. `model` can be driven directly:
    `model.forward(inputs)` gives hidden states and `model.logits(hidden)` their logits.
    """

    model: "Decoder | TransformersModel"

    def __init__(self, config: SequenceConfig) -> None:
        self.config = config
        self._failed: dict[str, str] = {}
        # Where layers have states.
        self._states: StateKeeper | None = None
        # From the first grammar on.
        self._grammar_rows: GrammarRows | None = None
        self._prompts: dict[int, tuple[int, int]] = {}

    @torch.inference_mode()
    def load(self) -> SequenceInfo:
        """Read the weights and allocate the KV cache. Raises UnsupportedModel or ConfigError."""
        config = self.config
        set_threads(config.num_threads)
        folder = Path(config.model)
        model_config = read_any_config(folder, config.implementation)
        max_model_len = max_length(config.max_model_len, model_config)
        device = find_device(config.device)
        dtype = _DTYPES[computed_dtype(config.dtype, model_config)]
        ops = select_ops(config.ops, device, dtype, model_config.head_dim, config.quantization)
        cache_dtype = torch.int8 if config.kv_cache_dtype == "int8" else dtype
        if isinstance(model_config, DecoderConfig) and model_config.mixers and ops.recurrence() is None:
            if config.implementation == "native":
                raise UnsupportedModel(f"ops {ops.name!r} know no layers with states: leave implementation at 'auto'")
            model_config = read_any_config(folder, "transformers")
        if isinstance(model_config, DecoderConfig):
            with Weights(folder, dtype, device, model_config.packing) as weights:
                self.model = Decoder(model_config, ops, weights, cache_dtype=cache_dtype)
        else:
            # Only now, since transformers takes seconds, and is not there for everybody.
            from chairlift.runners.decoder.transformers_model import TransformersModel

            self.model = TransformersModel(folder, model_config, ops, dtype, device, cache_dtype)
        self._say_if_unpacked(folder, model_config)
        if config.num_threads is None and self.model.weight_bytes < _ONE_THREAD_BYTES:
            set_threads(1)
        bytes_per_token = self.model.kv_bytes_per_token()
        num_blocks, num_snapshots = self._allocate(max_model_len, bytes_per_token, available_bytes(device))
        self._pages = KvPages(self.model.caches)
        self.batch = PersistentBatch(config.slots, max_model_len, config.block_size)
        self.sampler = Sampler(config.slots, model_config.vocab_size, config.seed, device, ops)
        self.grammars = GrammarCompiler(folder, model_config.vocab_size)
        self.info = SequenceInfo(
            vocab_size=model_config.vocab_size,
            max_model_len=max_model_len,
            num_blocks=num_blocks,
            block_size=config.block_size,
            dtype=str(dtype).removeprefix("torch."),
            device=str(device),
            ops=ops.name if isinstance(model_config, DecoderConfig) else f"{ops.name}, through transformers",
            weight_bytes=self.model.weight_bytes,
            kv_bytes=num_blocks * config.block_size * bytes_per_token,
            num_snapshots=num_snapshots,
            experts=self.model.experts,
        )
        return self.info

    def _allocate(self, max_model_len: int, bytes_per_token: int, free: int) -> tuple[int, int | None]:
        """Make the KV cache, and rows of states if layers have any; return how many blocks and snapshots there are."""
        config, model = self.config, self.model
        if not model.state_bytes:
            num_blocks = num_kv_blocks(config, max_model_len, bytes_per_token, free)
            with taking_kv_memory(num_blocks * config.block_size * bytes_per_token):
                model.allocate(num_blocks, config.block_size, max_model_len)
            return num_blocks, None
        free = free_beside_states(config, model.state_bytes, free)
        each = model.state_bytes + config.block_size * bytes_per_token
        num_snapshots = num_state_snapshots(config, each, free)
        num_blocks = num_kv_blocks(config, max_model_len, bytes_per_token, free, num_snapshots * each)
        with taking_kv_memory(num_blocks * config.block_size * bytes_per_token + num_snapshots * each):
            states = model.make_states(2 * config.slots + num_snapshots)
            model.allocate(num_blocks + num_snapshots, config.block_size, max_model_len)
        self._states = StateKeeper(states, model.caches, config.slots, num_blocks)
        return num_blocks, num_snapshots

    def _say_if_unpacked(self, folder: Path, model_config: DecoderConfig | TransformersConfig) -> None:
        """Files of few bits may take more memory here than on the disk, which nobody expects of them."""
        gguf = folder / GGUF_WEIGHTS
        if self.config.quantization != "none" or not (model_config.packing is not None or gguf.exists()):
            return
        files = parts_of(gguf) if gguf.exists() else weight_files(folder)
        stored, held = sum(file.stat().st_size for file in files), self.model.weight_bytes
        if held > 1.5 * stored:
            advice = "; quantization int8 or int4 keeps them small" if self.model.device.type == "cpu" else ""
            log.warning("weights of %.1f MB on the disk take %.1f MB here%s", stored / 1e6, held / 1e6, advice)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run a full prefill, one as expected, and decodes of one and of all slots, on blocks that nobody holds."""
        longest = min(self.config.max_num_batched_tokens, self.info.max_model_len)
        for tokens in {longest, min(self.config.expected_input_tokens or longest, longest)}:
            self._dry_run(1, tokens)
        for slots in {1, self.config.slots}:
            self._dry_run(slots, 1)
        wait_for(self.model.device)
        # Made later, it would stop all threads for as long as that takes. Without one, grammars are refused.
        with contextlib.suppress(GrammarError):
            _ = self.grammars.tokenizer

    def _dry_run(self, seqs: int, tokens: int) -> None:
        device, block_size = self.model.device, self.config.block_size
        blocks = torch.arange(-(-tokens // block_size), dtype=torch.int32, device=device)
        positions = torch.arange(tokens, device=device).repeat(seqs)
        attention = AttentionBatch(
            query_start=torch.arange(seqs + 1, dtype=torch.int32, device=device) * tokens,
            context_len=torch.full((seqs,), tokens, dtype=torch.int32, device=device),
            block_tables=blocks.repeat(seqs, 1),
            slot_mapping=positions,
            positions=positions,
            max_query_len=tokens,
            max_context_len=tokens,
        )
        last = torch.arange(1, seqs + 1, device=device) * tokens - 1
        inputs = Inputs(torch.zeros_like(positions), attention, last)
        if self._states is not None:
            inputs.states = StateSpans(list(range(seqs)), [0] * seqs, [tokens * each for each in range(seqs + 1)], {})
        hidden = self.model.forward(inputs)
        self.model.best(hidden)

    def find_grammar(self, grammar: str) -> object | None:
        """Return what holds a grammar, if it is compiled."""
        return self.grammars.find(grammar)

    def compile_grammar(self, grammar: str, done: GrammarDone) -> None:
        """Compile a grammar in another thread, which calls `done` with what holds it, or with the error."""
        self.grammars.compile_aside(grammar, done)

    def cancel_grammar(self, grammar: str) -> bool:
        """Forget a grammar that waits to be compiled; return whether it did, so that nobody will call its `done`."""
        return self.grammars.cancel(grammar)

    @torch.inference_mode()
    def execute(self, step: Step) -> StepResult:
        """Compute one forward pass and sample for every sequence that then has all of its tokens computed.

        What goes wrong with one request alone is in the result's `errors`; what fails the whole pass is raised.
        """
        began = time.perf_counter()
        with while_computing():
            self._update(step)
            result = StepResult(tokens={}, num_rows=step.total_tokens)
            if step.num_tokens:
                prepared = self.batch.prepare(step)
                self._run(prepared, step, result, began)
                for name in prepared.ids:
                    if name in self._failed:
                        result.errors[name] = self._failed[name]
        result.seconds = time.perf_counter() - began
        return result

    def _update(self, step: Step) -> None:
        if self._states is not None:
            self._states.keep(step, self.batch)
        for name in step.released:
            row = self.batch.remove(name)
            if row is not None:
                self.sampler.remove(row)
                if self._grammar_rows is not None:
                    self._grammar_rows.remove(row)
                self._prompts.pop(row, None)
                self._failed.pop(name, None)
        for start in step.started:
            self._pages.use(max(start.block_table, default=-1))
            self._start(start)
        for name, blocks in step.new_blocks.items():
            self._pages.use(max(blocks, default=-1))
            self.batch.extend(self.batch.row_of[name], blocks)

    def _start(self, start: Start) -> None:
        request, vocab_size = start.request, self.info.vocab_size
        if min(start.token_ids) < 0 or max(start.token_ids) >= vocab_size:
            self._failed[request.id] = f"the prompt has a token id outside the vocabulary of {vocab_size}"
            # It still takes part in this step, with tokens that can be looked up.
            row = self.batch.add(replace(start, token_ids=[0] * len(start.token_ids)))
        else:
            row = self.batch.add(start)
        if self._states is not None:
            self._states.begin(row, start, self.config.block_size)
        if request.id in self._failed:
            return
        try:
            self.sampler.add(row, request, start.token_ids)
        except ValueError as error:
            self._failed[request.id] = str(error)
        if request.grammar is not None:
            if self._grammar_rows is None:
                # Elsewhere than on the host each token that is tried would be waited for.
                tries = self.model.device.type == "cpu"
                self._grammar_rows = GrammarRows(tries, tries_best=tries and self.model.num_candidates > 1)
            self._grammar_rows.add(row, start, self.grammars.compile(request.grammar))
        if request.params.prompt_logprobs is not None and len(start.token_ids) == len(request.prompt_ids):
            self._prompts[row] = request.params.prompt_logprobs, len(request.prompt_ids)

    def _run(self, prepared: Prepared, step: Step, result: StepResult, began: float) -> None:
        sampling = prepared.samples
        if self._failed:
            sampling = sampling & np.array([name not in self._failed for name in prepared.ids])
        indices = sampling.nonzero()[0]
        logit_rows = ends = prepared.query_start[1:][indices] - 1
        spans = self._prompt_spans(prepared)
        if spans:
            logit_rows = np.unique(
                np.concatenate([ends, *(np.arange(start, stop) for start, stop, _ in spans.values())])
            )
        inputs = self._inputs(prepared, logit_rows, step.saves)
        if self._grammar_rows is not None:
            self._grammar_rows.go_on()
            inputs.side_work = self._grammar_rows.side_work
        hidden = self.model.forward(inputs)
        if self._grammar_rows is not None:
            self._grammar_rows.finish()
        if self._states is not None:
            self._states.save_tails(prepared, step.saves, self.batch)
        self.batch.commit(prepared)
        prompts: dict[int, list[Logprobs]] = {}
        for index, (start, stop, top) in spans.items():
            following = self.batch.tokens[prepared.rows[index], prepared.positions[start:stop] + 1]
            place = int(np.searchsorted(logit_rows, start))
            prompts[index] = self._prompt_logprobs(hidden[place : place + stop - start], following, top)
        places = np.searchsorted(logit_rows, ends) if spans else None
        if self._grammar_rows:
            indices, places = self._settle(self._grammar_rows, prepared, indices, places, result)
        choice = None
        if len(indices):
            choice, indices = self._choose(hidden, places, prepared, indices, result)
        # All that a step gives comes to the host in one copy.
        tensors = [tensor for parts in prompts.values() for part in parts for tensor in part.tensors]
        arrays = iter(to_host(tensors + ([] if choice is None else choice.tensors)))
        if choice is None and not tensors:
            # Nothing was read, and what the step took is not what it took to ask for it.
            wait_for(self.model.device)
        for index, parts in prompts.items():
            result.prompt_logprobs[prepared.ids[index]] = [each for part in parts for each in part.read(arrays)]
        if choice is not None:
            self._append(choice, arrays, prepared, indices, result)
            if self._grammar_rows:
                rows, names = prepared.rows[indices].tolist(), [prepared.ids[index] for index in indices.tolist()]
                self._append_forced(
                    self._grammar_rows.say(rows, names, time.perf_counter() - began, result), prepared, result
                )

    def _inputs(self, prepared: Prepared, logit_rows: Ints, saves: Saves) -> Inputs:
        inputs = prepared.inputs(logit_rows, self.model.device)
        if self._states is not None:
            inputs.states = self._states.spans(prepared, saves, self._grammar_rows)
        return inputs

    def _settle(
        self, ruled: GrammarRows, prepared: Prepared, indices: Ints, places: Ints | None, result: StepResult
    ) -> tuple[Ints, Ints | None]:
        """Give tokens to those that do not choose theirs now; return the `indices` of the others, and their places."""
        rows = prepared.rows[indices].tolist()
        names = [prepared.ids[index] for index in indices.tolist()]
        given = ruled.settle(rows, names, result, are_all=len(rows) == len(prepared.ids))
        if not given:
            return indices, places
        self._append_forced(given, prepared, result)
        self._take_back([self.batch.row_of[name] for name in result.late])
        kept = np.array([place for place, row in enumerate(rows) if row not in given], np.int64)
        return indices[kept], kept if places is None else places[kept]

    def _append_forced(self, given: dict[int, list[int]], prepared: Prepared, result: StepResult) -> None:
        """Append tokens that follow without being chosen to the sequences in these rows, and tell the result."""
        names = dict(zip(prepared.rows.tolist(), prepared.ids, strict=True)) if given else {}
        for row, token_ids in given.items():
            if token_ids:
                self.batch.append_forced(row, token_ids)
                self.sampler.count_forced(row, token_ids)
                result.tokens.setdefault(names[row], []).extend(token_ids)

    def _prompt_spans(self, prepared: Prepared) -> dict[int, tuple[int, int, int]]:
        """Map a sequence's index to the tokens of this pass that predict a prompt token, and how many alternatives."""
        spans = {}
        if self._prompts:
            for index, row in enumerate(prepared.rows.tolist()):
                top, prompt = self._prompts.get(row, (0, 0))
                count = min(int(prepared.context[index]), prompt - 1) - int(prepared.first[index])
                if count > 0:
                    start = int(prepared.query_start[index])
                    spans[index] = start, start + count, top
        return spans

    def _prompt_logprobs(self, hidden: Tensor, following: Ints, top: int) -> list[Logprobs]:
        found = []
        for start in range(0, len(following), _PROMPT_ROWS):
            part = torch.from_numpy(following[start : start + _PROMPT_ROWS]).to(hidden.device)
            logits = self.model.logits(hidden[start : start + len(part)])
            found.append(Logprobs(logits, part, [top] * len(part)))
        return found

    def _choose(
        self, hidden: Tensor, places: Ints | None, prepared: Prepared, indices: Ints, result: StepResult
    ) -> tuple[Choice, Ints]:
        """Choose tokens for the sequences at `indices`; their last hidden states are at `places`, or all there are.

        Return them, and the `indices` of those that are not late.
        """
        if places is not None:
            hidden = hidden[torch.from_numpy(places).to(hidden.device)]
        rows, lengths = prepared.rows[indices], prepared.context[indices]
        choices = self._grammar_rows.choices(rows.tolist()) if self._grammar_rows else None
        if not self.sampler.takes_best(rows):
            choice = self.sampler.sample(self.model.logits(hidden), rows, lengths, choices)
        elif choices is None:
            choice = self.sampler.take(*self.model.best(hidden))
        elif choices.tried:
            choice = self.sampler.try_best(*self.model.candidates(hidden, choices.allowed()), choices)
        else:
            choice = self.sampler.take(*self.model.best(hidden, choices.allowed()))
        if self._grammar_rows and choices is not None and choices.refused:
            late = indices[choices.refused].tolist()
            self._grammar_rows.refuse(rows[choices.refused].tolist(), [prepared.ids[index] for index in late], result)
            self._take_back(rows[choices.refused].tolist())
            kept = np.delete(np.arange(len(indices)), choices.refused)
            choice.keep(kept)
            indices = indices[kept]
        return choice, indices

    def _take_back(self, rows: Sequence[int]) -> None:
        """Have the last tokens of those that are late computed again."""
        for row in rows:
            self.batch.take_back(row)
            if self._states is not None:
                self._states.take_back(row)

    def _append(
        self, choice: Choice, arrays: Iterator[NDArray[Any]], prepared: Prepared, indices: Ints, result: StepResult
    ) -> None:
        """Append the chosen tokens, which `arrays` holds, to their sequences, and tell the result."""
        rows = prepared.rows[indices]
        sampled = self.sampler.finish(choice, rows, arrays)
        names = [prepared.ids[index] for index in indices.tolist()]
        for index, message in sampled.errors.items():
            self._failed[names[index]] = message
        result.invalid.update(names[index] for index in sampled.excluded)
        self.batch.append(rows, sampled.token_ids)
        for index, token in enumerate(sampled.token_ids.tolist()):
            if index not in sampled.errors:
                result.tokens[names[index]] = [token]
        for index, found in sampled.logprobs.items():
            result.logprobs[names[index]] = [found]

    def close(self) -> None:
        """Release the weights and the cache."""
        if self._grammar_rows is not None:
            self._grammar_rows.close()
        self._states, on_cuda = None, False
        if hasattr(self, "model"):
            on_cuda = self.model.device.type == "cuda"
            # It holds the model in turn, and what is in a circle stays until the collector comes by.
            self.model.recorded = None
        for name in ("_pages", "model", "batch", "sampler"):
            if hasattr(self, name):
                delattr(self, name)
        if on_cuda:
            gc.collect()
            torch.cuda.empty_cache()


def wait_for(device: torch.device) -> None:
    """Until what was asked for is computed; on the CPU it is already."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def to_host(tensors: Sequence[Tensor]) -> list[NDArray[Any]]:
    """Return tensors of one device as arrays, by one copy; on the CPU they are the same memory."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return [tensor.numpy() for tensor in tensors]
    return split(pack(tensors).cpu().numpy(), tensors)


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """The bytes of all tensors, end to end."""
    parts = []
    for tensor in tensors:
        flat = tensor.contiguous().flatten().view(torch.uint8)
        parts += [flat, flat.new_zeros(-len(flat) % _ALIGNMENT)]
    return torch.cat(parts)


def split(packed: NDArray[np.uint8], tensors: Sequence[Tensor]) -> list[NDArray[Any]]:
    """Read arrays of the shapes and types of `tensors` out of what `pack` made of them."""
    arrays: list[NDArray[Any]] = []
    start = 0
    for tensor in tensors:
        end = start + tensor.nbytes
        arrays.append(packed[start:end].view(_NUMPY[tensor.dtype]).reshape(tensor.shape))
        start = end + -end % _ALIGNMENT
    return arrays

"""Families whose layers have states: a text goes on from a snapshot as if all of it had been computed."""

import functools

import pytest
import torch
from support.decoder_harness import Harness, all_logits, make_request, make_runner, prompts, requests
from support.foreign_factory import FOREIGN, STATEFUL, foreign_folder, foreign_reference, greedy
from support.native_isa import needs_native

from chairlift.config.sequences import SequenceConfig
from chairlift.core.sequences.request import Request
from chairlift.core.sequences.sampling_params import SamplingParams
from chairlift.core.sequences.scheduler import SequenceScheduler
from chairlift.core.sequences.step import Step
from chairlift.runners.decoder.runner import DecoderRunner
from chairlift.runners.grammars.grammar_rows import GrammarRows

NUM_OUTPUT = 16
# Of the prompt of 300 tokens: within a block, at its end, and one before all.
PLACES = (17, 100, 160, 299)


# One of each kind of state. What the reference operations do with a step's cut is of these: they meet the other
# families behind the marker `slow`, and Jamba, whose states know no operations of ours.
KINDS = ["lfm2", "qwen3_5_text", "falcon_h1", "jamba"]


# Those that native kernels compute, too, and both ways of each.
NATIVELY = ["lfm2", "lfm2_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "granitemoehybrid", "granite4_dense"]
BOTH_WAYS = [*((name, "transformers") for name in STATEFUL), *((name, "native") for name in NATIVELY)]


@functools.cache
def runner_of(name: str, ops: str = "native", implementation: str = "transformers") -> DecoderRunner:
    return make_runner(foreign_folder(FOREIGN[name][0], name), ops=ops, implementation=implementation)


class Rows(GrammarRows):
    """Rows that may have to go back by a token."""

    def __init__(self, rows: set[int]) -> None:
        super().__init__(tries=False, tries_best=False)
        self._rows = rows

    def __contains__(self, row: int) -> bool:
        return row in self._rows


def continued(name: str, prompt: list[int], guess: list[int]) -> list[int]:
    return greedy(foreign_reference(name), prompt, guess)


@functools.cache
def expected(name: str) -> list[int]:
    request = make_request("guess", prompts()["300"])
    return continued(name, request.prompt_ids, Harness(runner_of(name)).generate([request], NUM_OUTPUT)["guess"])


@pytest.mark.parametrize(
    ("name", "ops", "implementation"),
    [
        *(
            pytest.param(name, "reference", "transformers", marks=() if name in KINDS[:3] else pytest.mark.slow)
            for name in STATEFUL
        ),
        *(pytest.param(name, "native", way, marks=needs_native) for name, way in BOTH_WAYS),
    ],
)
def test_a_text_goes_on_from_snapshots(name: str, ops: str, implementation: str) -> None:
    """Those that a pass saved in the middle of a prompt, in company, at places that need not be ends of blocks."""
    runner = runner_of(name, ops, implementation)
    if implementation == "transformers":
        stateful = getattr(runner.model, "_stateful")  # noqa: B009 only models through transformers have it
        way = "tokens" if name == "jamba" else "kernels" if ops == "native" else "pieces"
        assert {*stateful.ways.values()} == {way}
    harness, prompt = Harness(runner), prompts()["300"]
    for request in requests("first"):
        harness.add(request)
    harness.saves = {"first300": [(place, slot) for slot, place in enumerate(PLACES)]}
    harness.step()
    for slot, place in enumerate(PLACES):
        shared = harness.tables["first300"][: place // harness.block_size]
        harness.add(make_request(f"from {place}", prompt), place, shared, slot)
    ids = [f"from {place}" for place in PLACES]
    harness.step(chunk=50)
    assert harness.finish(ids, NUM_OUTPUT) == dict.fromkeys(ids, expected(name))


@needs_native
@pytest.mark.parametrize(
    "settings", [{"dtype": "bfloat16"}, {"quantization": "int8"}, {"quantization": "int4"}], ids=str
)
@pytest.mark.parametrize("name", STATEFUL)
def test_fewer_bits_change_nothing_about_the_way(name: str, settings: dict[str, str]) -> None:
    """Not for Jamba either, whose modules forget what was before, which in bfloat16 shows little in its logits."""
    runner = make_runner(
        foreign_folder(FOREIGN[name][0], name), ops="native", implementation="transformers", **settings
    )
    stateful = getattr(runner.model, "_stateful")  # noqa: B009 only models through transformers have it
    assert {*stateful.ways.values()} == {"tokens" if name == "jamba" else "kernels"}


@pytest.mark.parametrize(("name", "implementation"), BOTH_WAYS)
def test_who_leaves_is_kept(name: str, implementation: str) -> None:
    """A conversation goes on where an answer ended, and a preempted sequence where it was."""
    harness, prompt = Harness(runner_of(name, "native", implementation)), prompts()["300"]
    harness.add(make_request("first", prompt))
    harness.step()
    for _ in range(10):
        harness.step()
    computed, table = harness.computed["first"], harness.tables["first"]
    assert computed == len(prompt) + 10
    more = [*harness.tokens("first"), *prompts()["17"]]
    # Its blocks are not handed out again here.
    harness.kept = {"first": 0}
    harness.released.append("first")
    del harness.tables["first"], harness.owned["first"]
    harness.add(make_request("again", prompt + harness.outputs["first"]), computed, table[: computed // 16], 0)
    harness.add(make_request("turn", more), computed, table[: computed // 16], 0)
    found = harness.finish(["again", "turn"], NUM_OUTPUT)
    assert found["again"] == continued(name, prompt + harness.outputs["first"], found["again"])
    assert found["turn"] == continued(name, more, found["turn"])


@pytest.mark.parametrize(
    ("name", "ops", "implementation"),
    [
        *((name, "reference", "transformers") for name in KINDS),
        *(pytest.param(name, "native", "transformers", marks=needs_native) for name in KINDS),
        *(pytest.param(name, "native", "native", marks=needs_native) for name in ("lfm2", "qwen3_5_text")),
    ],
)
@torch.inference_mode()
def test_a_token_that_is_taken_back_leaves_nothing(name: str, ops: str, implementation: str) -> None:
    """Its state is what it was, in a prompt's last part as in a decode, also where that is saved at the same place."""
    runner = runner_of(name, ops, implementation)
    harness, prompt = Harness(runner), prompts()["100"]
    harness.add(make_request("ruled", prompt))
    harness.add(make_request("other", prompts()["17"]))
    harness.step({"ruled": 60, "other": 17})
    keeper, row = runner._states, runner.batch.row_of["ruled"]
    assert keeper is not None
    found = []
    for counts in ({"ruled": 40, "other": 1}, {"ruled": 1}, {"ruled": 1}):
        more = {"ruled": [harness.free.pop() for _ in range(3)]} if not found else {}
        runner._update(Step(0, counts, [], more, [], []))
        prepared = runner.batch.prepare(Step(0, counts, [], {}, [], []))
        inputs = prepared.inputs(prepared.query_start[1:2] - 1, runner.model.device)
        saves = {"ruled": [(99, 0)]} if len(counts) > 1 else {}
        inputs.states = keeper.spans(prepared, saves, Rows({row}))
        found.append(runner.model.logits(runner.model.forward(inputs))[0].clone())
        keeper.save_tails(prepared, saves, runner.batch)
        runner.batch.commit(prepared)
        runner.batch.take_back(row)
        keeper.take_back(row)
    # From what was saved where the token was taken back.
    harness.released = ["ruled", "other"]
    harness.tables.clear()
    harness.add(make_request("ruled again", prompt), 96 + 3, [harness.free.pop() for _ in range(7)], 0)
    table = harness.tables["ruled again"]
    source = runner.batch.block_tables[row][:6]
    for cache in runner.model.caches:
        for each in cache:
            each[table[:6]] = each[source]
    step = Step(0, {"ruled again": 1}, [harness.start("ruled again", [])], {}, [], [])
    runner._update(step)
    prepared = runner.batch.prepare(step)
    inputs = runner._inputs(prepared, prepared.query_start[1:] - 1, {})
    found.append(runner.model.logits(runner.model.forward(inputs))[0])
    wanted = foreign_reference(name)(torch.tensor([prompt])).logits[0, -1]
    for logits in found:
        assert (logits.cpu() - wanted).abs().max() <= 1e-3 * wanted.abs().max()


@pytest.mark.parametrize(("name", "implementation"), BOTH_WAYS)
def test_bfloat16_is_as_near_as_transformers_own(name: str, implementation: str) -> None:
    """Some of these, of random weights, are far from float32 themselves."""
    from transformers import AutoModelForCausalLM

    folder = foreign_folder(FOREIGN[name][0], name)
    rounded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, attn_implementation="eager").eval()
    runner = make_runner(folder, ops="native", implementation=implementation, dtype="bfloat16")
    far, theirs = [], []
    for own, prompt in zip(all_logits(runner, list(prompts().values())), prompts().values(), strict=True):
        with torch.no_grad():
            wanted, other = (model(torch.tensor([prompt])).logits[0] for model in (foreign_reference(name), rounded))
        far.append(1 - torch.cosine_similarity(own.float(), wanted, dim=-1))
        theirs.append(1 - torch.cosine_similarity(other.float(), wanted, dim=-1))
    assert torch.cat(far).mean() <= 1.2 * torch.cat(theirs).mean() + 5e-4


def serve(runner: DecoderRunner, scheduler: SequenceScheduler, request: Request) -> list[int]:
    """Answer a request as the engine does."""
    scheduler.add(request)
    tokens: list[int] = []
    while scheduler.num_unfinished:
        step = scheduler.schedule(0.0)
        assert step is not None
        result = runner.execute(step)
        tokens += result.tokens.get(request.id, [])
        scheduler.update(step, result, 0.0)
    return tokens


def chats(runner: DecoderRunner, num_chats: int, num_turns: int) -> tuple[float, list[tuple[list[int], list[int]]]]:
    """Have conversations in turn, with one system prompt and turns of all lengths; return the share that is cached."""
    info, config = runner.info, SequenceConfig(model=runner.config.model, max_num_seqs=4)
    scheduler = config.make_scheduler(info.num_blocks, info.block_size, info.max_model_len, info.num_snapshots)
    generator = torch.Generator().manual_seed(3)
    system = torch.randint(320, (61,), generator=generator).tolist()
    params = SamplingParams(temperature=0, max_tokens=None)
    texts, said = [list(system) for _ in range(num_chats)], []
    for turn in range(num_turns):
        for chat, text in enumerate(texts):
            length = 7 + (11 * chat + 5 * turn) % 37
            text += torch.randint(320, (length,), generator=generator).tolist()
            request = Request(
                id=f"{chat}-{turn}", prompt_ids=list(text), params=params, max_tokens=5 + (chat + turn) % 9, arrival=0.0
            )
            answer = serve(runner, scheduler, request)
            said.append((list(text), answer))
            text += answer
    return scheduler.prefixes.hit_tokens / scheduler.prefixes.queried_tokens, said


CHATS_SIZES = {"max_model_len": 512, "max_num_seqs": 4}


@functools.cache
def dense_share() -> float:
    dense = make_runner(foreign_folder(FOREIGN["phi"][0], "phi"), ops="native", **CHATS_SIZES)
    return chats(dense, 12, 6)[0]


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5_text", "granitemoehybrid"])
def test_chats_hit_what_a_dense_model_hits(name: str) -> None:
    """At least nine tenths of it, though states are there at few places; and what is said is right."""
    own = make_runner(foreign_folder(FOREIGN[name][0], name), ops="native", **CHATS_SIZES)
    found, said = chats(own, 12, 6)
    wanted = dense_share()
    print(f"{name}: {found:.3f} of tokens cached, a dense model's {wanted:.3f}")
    assert found >= 0.9 * wanted
    for prompt, answer in said[::7]:
        assert answer == continued(name, prompt, answer)


def test_states_go_with_their_model() -> None:
    runner = make_runner(foreign_folder(FOREIGN["lfm2"][0], "lfm2"), implementation="transformers")
    assert runner._states is not None
    runner.close()
    assert runner._states is None

"""The sampler against plain restatements of each rule, and its random numbers against their promises."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from chairlift.core.sequences.request import Request
from chairlift.core.sequences.sampling_params import SamplingParams
from chairlift.ops import drawing as torch_drawing
from chairlift.ops.base import Draws, Ints
from chairlift.ops.contract import Ops
from chairlift.ops.cpu import CpuOps
from chairlift.ops.drawing import apply_filters
from chairlift.ops.native import LIBRARY
from chairlift.ops.reference import ReferenceOps
from chairlift.runners.decoder.runner import pack, split, to_host
from chairlift.runners.decoder.sampler import Sampled, Sampler, request_seed, uniform
from chairlift.runners.grammars.grammar import Follower
from chairlift.runners.grammars.grammar_choices import GrammarChoices

VOCAB = 300
CPU = torch.device("cpu")
drawing: list[Ops] = [ReferenceOps()]
KINDS = {"reference": ReferenceOps, "native": lambda: CpuOps(torch.float32)}


@pytest.fixture(autouse=True, params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    """Every test draws with both implementations."""
    if request.param == "native" and not LIBRARY.exists():
        pytest.skip("the native library is not built")
    drawing[0] = KINDS[request.param]()
    return str(request.param)


def draw_one(logits: torch.Tensor, uniform: float, **filters: float) -> int:
    """Draw once from logits [V] at one point of the CDF."""
    fields = {"temperature": 1.0, "min_p": 0.0, "top_p": 1.0} | filters
    top_k = np.array([int(fields.pop("top_k", 0))])
    values = {name: np.array([value], np.float32) for name, value in fields.items()}
    return int(drawing[0].draw(logits[None], Draws(top_k=top_k, uniform=np.array([[uniform]]), **values))[0])


def random_logits(rows: int, vocab: int = VOCAB, scale: float = 3.0, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def make_request(id: str, params: SamplingParams, prompt: list[int], stop_ids: frozenset[int] = frozenset()) -> Request:
    return Request(id=id, prompt_ids=prompt, params=params, max_tokens=9999, arrival=0.0, stop_ids=stop_ids)


def test_allowed_tokens_and_words() -> None:
    sampler = Sampler(8, VOCAB, seed=0, device=CPU, ops=drawing[0])
    logits = random_logits(4)
    rank = logits.argsort(-1, descending=True)
    greedy = SamplingParams(temperature=0)
    allowed = sorted(rank[0, 5:40].tolist())
    requests = [
        make_request("a", SamplingParams(temperature=0, allowed_token_ids=[*allowed, allowed[0]]), [1]),
        make_request("b", greedy, [1]),
        make_request("c", greedy, [1]),
        make_request("d", greedy, [1]),
    ]
    first, second = rank[1, :2].tolist()
    requests[1].bad_word_ids = [[first], [7, 8, second]]
    requests[2].bad_word_ids = [[5, 6, int(rank[2, 0])]]
    rows, lengths = np.arange(4), np.full(4, 3)
    for row, (request, output) in enumerate(zip(requests, ([], [7, 8], [5], []), strict=True)):
        sampler.add(row, request, [1, *output])
    assert not sampler.takes_best(rows)
    assert sampler.takes_best(np.array([3]))

    def chosen() -> list[int]:
        return take(sampler, logits, rows, lengths).token_ids.tolist()

    best = rank[:, 0].tolist()
    assert chosen() == [int(rank[0, 5]), int(rank[1, 2]), best[2], best[3]]
    # What was generated completes no word of the second row any more; of the third it does after one more token.
    sampler.count_forced(2, [5, 6])
    assert chosen() == [int(rank[0, 5]), second, int(rank[2, 1]), best[3]]
    for row in range(4):
        sampler.remove(row)
    assert chosen() == best


def test_nothing_left_is_an_error_of_that_row() -> None:
    sampler = Sampler(2, VOCAB, seed=0, device=CPU, ops=drawing[0])
    request = make_request("a", SamplingParams(allowed_token_ids=[3]), [1])
    request.bad_word_ids = [[3]]
    sampler.add(0, request, [1])
    sampler.add(1, make_request("b", SamplingParams(), [1]), [1])
    rows = np.arange(2)
    choice = sampler.sample(random_logits(2), rows, np.full(2, 1))
    sampled = sampler.finish(choice, rows, iter(to_host(choice.tensors)))
    assert set(sampled.errors) == set(sampled.excluded) == {0}
    assert "no token is left" in sampled.errors[0]


def sample(
    logits: torch.Tensor,
    params: list[SamplingParams],
    prompts: list[list[int]] | None = None,
    outputs: list[list[int]] | None = None,
    stop_ids: frozenset[int] = frozenset(),
) -> Sampled:
    """Sample once for one request per row of logits."""
    count = len(params)
    prompts = prompts or [[1]] * count
    outputs = outputs or [[]] * count
    sampler = Sampler(count, logits.shape[1], 0, CPU, drawing[0])
    for row in range(count):
        request = make_request(f"r{row}", params[row], prompts[row], stop_ids)
        sampler.add(row, request, prompts[row] + outputs[row])
    lengths = np.array([len(prompts[row]) + len(outputs[row]) for row in range(count)])
    return take(sampler, logits, np.arange(count), lengths)


def take(sampler: Sampler, logits: torch.Tensor, rows: Ints, lengths: Ints) -> Sampled:
    """Sample and bring the results over; the logits stay as they are."""
    choice = sampler.sample(logits.clone(), rows, lengths)
    return sampler.finish(choice, rows, iter(to_host(choice.tensors)))


class Tried(Follower):
    """A sequence whose tokens are tried, of which only some may be next."""

    can_be_tried = True

    def __init__(self, token_ids: list[int], vocab: int, is_open: bool) -> None:
        self.is_tried, self.is_open, self.error = True, is_open, None
        self.allowed = np.zeros(-(-vocab // 32), np.int32)
        self.bits = torch.from_numpy(self.allowed)
        self._ids = set(token_ids)
        for token in token_ids:
            self.allowed[token // 32] |= np.uint32(1 << token % 32).view(np.int32)

    def accept(self, token: int) -> bool:
        return token in self._ids if self.is_open else super().accept(token)

    def refuse(self) -> None:
        """Nothing is looked for."""


@pytest.mark.parametrize("token_ids", [[1, 4, 31, 40], [37]])
def test_what_is_tried_is_drawn_as_if_nothing_else_were_there(token_ids: list[int]) -> None:
    """Though most of what is drawn may not be next. Whether it is known what may makes no difference."""
    logits, count = random_logits(1, 41), 4000
    sampler = Sampler(1, 41, 7, CPU, drawing[0])
    sampler.add(0, make_request("x", SamplingParams(temperature=1.5), [1]), [1])
    rows, lengths = np.zeros(count, np.int64), np.arange(count)

    def tried(is_open: bool) -> tuple[GrammarChoices, Ints]:
        choices = GrammarChoices([Tried(token_ids, 41, is_open)] * count)
        return choices, sampler.sample(logits.expand(count, -1).clone(), rows, lengths, choices).token_ids.numpy()

    choices, found = tried(False)
    assert not choices.refused
    left_out = torch.full((41,), -torch.inf)
    left_out[token_ids] = logits[0, token_ids]
    chi_square(np.bincount(found, minlength=41).astype(float), (left_out / 1.5).softmax(-1))
    choices, same = tried(True)
    kept = np.delete(np.arange(count), choices.refused)
    assert 0 < len(kept) < count
    assert np.array_equal(found[kept], same[kept])


def frequencies(logits: torch.Tensor, params: SamplingParams, draws: int = 20_000) -> np.ndarray[Any, Any]:
    """How often each token is drawn from one row of logits at successive positions."""
    sampler = Sampler(1, logits.shape[0], 7, CPU, drawing[0])
    sampler.add(0, make_request("x", params, [1]), [1])
    rows, found = np.zeros(1000, np.int64), np.zeros(logits.shape[0])
    for start in range(0, draws, 1000):
        sampled = take(sampler, logits.expand(1000, -1), rows, np.arange(start, start + 1000))
        found += np.bincount(sampled.token_ids, minlength=logits.shape[0])
    return found


def chi_square(counts: np.ndarray[Any, Any], probabilities: torch.Tensor) -> None:
    """Fail if the counts are improbable (beyond about five standard deviations) under the probabilities."""
    expected = probabilities.double().numpy() * counts.sum()
    assert counts[expected == 0].sum() == 0
    big = expected >= 5
    observed = np.append(counts[big], counts[~big].sum())
    expected = np.append(expected[big], max(expected[~big].sum(), 1e-9))
    statistic = ((observed - expected) ** 2 / np.maximum(expected, 1.0)).sum()
    freedom = len(observed) - 1
    assert statistic < freedom + 5 * math.sqrt(2 * freedom) + 5


def filtered_oracle(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Probabilities after temperature, min_p, top_k and top_p, one token at a time."""
    probabilities = torch.softmax(logits.double() / params.temperature, -1)
    kept = [(p, i) for i, p in enumerate(probabilities.tolist()) if p >= params.min_p * float(probabilities.max())]
    kept.sort(reverse=True)
    if params.top_k > 0:
        kept = kept[: params.top_k]
    total, mass, nucleus = sum(p for p, _ in kept), 0.0, []
    for p, token in kept:
        if params.top_p < 1 and mass / total >= params.top_p:
            break
        nucleus.append(token)
        mass += p
    result = torch.zeros_like(probabilities)
    result[nucleus] = probabilities[nucleus]
    return result / result.sum()


FILTERS = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 5000},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 1e-6},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.8},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
]


@pytest.mark.parametrize("fields", FILTERS)
def test_drawn_frequencies_follow_the_distribution(fields: dict[str, Any]) -> None:
    params, logits = SamplingParams(**fields), random_logits(1, seed=3)[0]
    chi_square(frequencies(logits, params), filtered_oracle(logits, params))


@pytest.mark.parametrize("fields", FILTERS)
@pytest.mark.parametrize(("vocab", "scale"), [(300, 3.0), (3000, 4.0), (3000, 0.5)])
def test_filters_keep_what_the_oracle_keeps(fields: dict[str, Any], vocab: int, scale: float) -> None:
    params, logits = SamplingParams(**fields), random_logits(6, vocab, scale)
    scaled = logits / params.temperature
    kept = apply_filters(
        scaled,
        np.full(6, params.min_p, np.float32),
        np.full(6, min(params.top_k, vocab)),
        np.full(6, params.top_p, np.float32),
    )
    for row in range(6):
        wanted = filtered_oracle(logits[row], params)
        assert torch.equal(kept[row] > -torch.inf, wanted > 0)
        assert torch.allclose(torch.softmax(kept[row], -1), wanted.float(), atol=1e-6)


def test_ties_at_the_cut_are_all_kept() -> None:
    logits = torch.tensor([2.0, 1.0, 1.0, 1.0, 0.0])
    points = np.linspace(0, 1 - 2**-53, 200)
    for filters in ({"top_k": 2}, {"top_p": 0.5}):
        assert {draw_one(logits, float(point), **filters) for point in points} == {0, 1, 2, 3}


@pytest.mark.parametrize("fields", FILTERS)
@pytest.mark.parametrize(("vocab", "scale"), [(40, 3.0), (3000, 0.5)])
def test_draws_keep_just_what_the_oracle_keeps(fields: dict[str, Any], vocab: int, scale: float) -> None:
    """The last token of the CDF is the last that is kept, and one put behind it is never drawn once it is dropped."""
    params, logits = SamplingParams(**fields), random_logits(1, vocab, scale)[0]
    order = logits.argsort(descending=True)
    kept = int((filtered_oracle(logits[order], params) > 0).sum())
    names = ("temperature", "min_p", "top_p", "top_k")
    filters = {name: getattr(params, name) for name in names}
    assert draw_one(logits[order], 1 - 2**-53, **filters) == kept - 1
    assert draw_one(logits[order], 0.0, **filters) == 0


def test_each_row_has_its_own_parameters() -> None:
    params = [SamplingParams(**fields, seed=5) for fields in FILTERS] + [SamplingParams(temperature=0)]
    logits = random_logits(len(params))
    together = sample(logits, params).token_ids
    alone = [int(sample(logits[row : row + 1], [one]).token_ids[0]) for row, one in enumerate(params)]
    assert together.tolist() == alone
    assert together[-1] == logits[-1].argmax()


def test_greedy_takes_the_likeliest_and_tiny_temperatures_nearly_are() -> None:
    logits = random_logits(50)
    likeliest = logits.argmax(-1).tolist()
    assert sample(logits, [SamplingParams(temperature=0)] * 50).token_ids.tolist() == likeliest
    assert sample(logits, [SamplingParams(temperature=1e-30)] * 50).token_ids.tolist() == likeliest
    bfloat16 = logits.bfloat16()
    found = sample(bfloat16, [SamplingParams(temperature=0)] * 50).token_ids
    assert bfloat16.float().gather(1, torch.from_numpy(found)[:, None])[:, 0].equal(bfloat16.float().amax(-1))


@pytest.mark.parametrize("vocab", [VOCAB, 3000])
def test_what_rounds_to_zero_is_not_zero(vocab: int) -> None:
    """Such a top_p keeps the likeliest, and such a temperature is none that is greedy: it draws where two tie."""
    logits = random_logits(50, vocab)
    likeliest = logits.argmax(-1).tolist()
    for fields in ({"top_p": 1e-46}, {"temperature": 1e-46}, {"top_p": 1e-300, "temperature": 1e-300, "top_k": 9}):
        assert sample(logits, [SamplingParams(**fields)] * 50).token_ids.tolist() == likeliest
    tied = torch.zeros(200, 2)
    drawn = sample(tied, [SamplingParams(temperature=1e-46)] * 200).token_ids.tolist()
    assert set(drawn) == {0, 1}
    # What is excluded before a penalty stays so, where it would be no number once multiplied by 0.
    logits[:, :5] = -torch.inf
    params = SamplingParams(repetition_penalty=1e-46, temperature=0)
    sampled = sample(-logits.abs(), [params] * 50, prompts=[[1, 2, 3]] * 50)
    assert not sampled.errors


@pytest.mark.parametrize("penalty", [1e-46, 1e-38])
def test_a_tiny_repetition_penalty_leaves_finite_logits(penalty: float) -> None:
    logits = random_logits(50).abs() + 1
    logits[:, 1] = -torch.inf
    for temperature in (0, 1, 1e-46):
        params = SamplingParams(repetition_penalty=penalty, temperature=temperature)
        sampled = sample(logits, [params] * 50, prompts=[[1, 2, 3]] * 50)
        assert not sampled.errors
        assert set(sampled.token_ids.tolist()) <= {2, 3}
    # A model that gives no number is not hidden by it.
    logits[:, 2] = torch.inf
    assert len(sample(logits, [params] * 50, prompts=[[1, 2, 3]] * 50).errors) == 50


def test_a_temperature_that_rounds_to_zero_is_drawn_with_of_what_a_grammar_allows() -> None:
    logits = random_logits(20, 41)
    rows, lengths = np.arange(20), np.full(20, 1)
    sampler = Sampler(20, 41, 7, CPU, drawing[0])
    for row in range(20):
        sampler.add(row, make_request(f"r{row}", SamplingParams(temperature=1e-46), [1]), [1])
    choices = GrammarChoices([Tried([37], 41, is_open=False) for _ in range(20)])
    choice = sampler.sample(logits.clone(), rows, lengths, choices)
    assert choice.token_ids.tolist() == [37] * 20


def test_inverse_cdf_runs_in_vocabulary_order_and_skips_the_impossible() -> None:
    logits = torch.tensor([0.0, 0.5, 0.0, 0.25, 0.25, 0.0]).log()
    points = (0.0, 0.49, 0.5, 0.74, 0.75, 1 - 2**-53)
    assert [draw_one(logits, point) for point in points] == [1, 1, 3, 3, 4, 4]
    wide = torch.full((1000,), -torch.inf)
    wide[5] = wide[200] = 0.0
    assert [draw_one(wide, point) for point in (0.0, 0.4999, 0.5, 0.9999)] == [5, 5, 200, 200]


def test_uniform_numbers_are_uniform_and_uncorrelated() -> None:
    seeds = np.arange(300, dtype=np.uint64)
    grid = np.stack([uniform(seeds, np.full(300, position)) for position in range(300)])
    assert grid.min() >= 0
    assert grid.max() < 1
    chi_square(np.histogram(grid, 100, (0, 1))[0].astype(float), torch.full((100,), 0.01))
    for pair in ((grid[1:], grid[:-1]), (grid[:, 1:], grid[:, :-1])):
        assert abs(np.corrcoef(pair[0].ravel(), pair[1].ravel())[0, 1]) < 0.02


def test_seeds() -> None:
    assert request_seed(-1, 0, "a") == 2**64 - 1
    assert request_seed(2**64 - 1, 0, "a") == 2**64 - 1
    assert request_seed(None, 0, "a") != request_seed(None, 0, "b")
    assert request_seed(None, 0, "a") != request_seed(None, 1, "a")
    assert request_seed(None, 0, "a") == request_seed(None, 0, "a")


def test_a_seed_gives_the_same_tokens_whatever_else_runs() -> None:
    logits = random_logits(1, seed=9)
    seeded = SamplingParams(seed=42, top_p=0.9)
    alone = [int(sample(logits, [seeded], outputs=[[0] * n]).token_ids[0]) for n in range(40)]
    others = [SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_k=3), SamplingParams(min_p=0.1)]
    for place in range(5):
        params = [*others[:place], seeded, *others[place:]]
        rows = torch.cat([random_logits(4, seed=n)[:place] for n in [1]] + [logits, random_logits(4, seed=2)[place:]])
        got = [int(sample(rows, params, outputs=[[0] * n] * 5).token_ids[place]) for n in range(40)]
        assert got == alone
    assert len(set(alone)) > 5
    assert alone != [
        int(sample(logits, [SamplingParams(seed=43, top_p=0.9)], outputs=[[0] * n]).token_ids[0]) for n in range(40)
    ]


def test_penalties_by_hand() -> None:
    logits = torch.tensor([[2.0, -2.0, 1.0, 0.5, 3.0]])
    params = SamplingParams(temperature=0, repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5)
    sampler = Sampler(1, 5, 0, CPU, drawing[0])
    sampler.add(0, make_request("x", params, [0, 1]), [0, 1, 4, 4, 2])
    sampler._edit(logits, np.zeros(1, np.int64), np.array([5]))
    assert logits.tolist() == [[1.0, -4.0, 0.5 - 0.25 - 0.5, 0.5, 1.5 - 0.25 - 2 * 0.5]]


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_repetition_penalty_equals_transformers(penalty: float) -> None:
    transformers = pytest.importorskip("transformers")
    logits = random_logits(1)
    tokens = torch.randint(0, VOCAB, (1, 200), generator=torch.Generator().manual_seed(1))
    sampler = Sampler(1, VOCAB, 0, CPU, drawing[0])
    params = SamplingParams(repetition_penalty=penalty)
    sampler.add(0, make_request("x", params, tokens[0, :150].tolist()), tokens[0].tolist())
    wanted = transformers.RepetitionPenaltyLogitsProcessor(penalty)(tokens, logits.clone())
    sampler._edit(logits, np.zeros(1, np.int64), np.array([200]))
    assert torch.equal(logits, wanted)


def test_penalty_counts_grow_with_the_output_as_if_built_anew() -> None:
    """300 distinct outputs, more than the counts first have room for, among rows without penalties."""
    logits = random_logits(3)
    params = SamplingParams(temperature=0, repetition_penalty=1.1, presence_penalty=1.0, frequency_penalty=2.0)
    plain = SamplingParams(temperature=0)
    sampler = Sampler(3, VOCAB, 0, CPU, drawing[0])
    for row, one in enumerate((plain, params, plain)):
        sampler.add(row, make_request(str(row), one, [3, 4]), [3, 4])
    tokens = [3, 4]
    for length in range(2, 302):
        anew = sample(logits[1:2], [params], [[3, 4]], [tokens[2:]]).token_ids[0]
        got = take(sampler, logits, np.arange(3), np.full(3, length)).token_ids
        assert got.tolist() == [int(logits[0].argmax()), anew, int(logits[2].argmax())]
        tokens.append(int(got[1]))
    assert len(set(tokens)) > 100


def test_logit_bias_and_min_tokens() -> None:
    logits = torch.zeros(3, 10)
    logits[:, 4] = 5.0
    greedy = SamplingParams(temperature=0)
    biased = SamplingParams(temperature=0, logit_bias={7: 6.0, 4: -2.0})
    patient = SamplingParams(temperature=0, min_tokens=2)
    logits[:, 3] = 1.0
    for outputs, last in (([], 3), ([3], 3), ([3, 3], 4)):
        got = sample(
            logits, [greedy, biased, patient], outputs=[outputs] * 3, stop_ids=frozenset({4, 99, -1})
        ).token_ids
        assert got.tolist() == [4, 7, last]


def test_bias_outside_the_vocabulary_is_refused() -> None:
    for token in (-1, 10, 2**70):
        with pytest.raises(ValueError, match=f"logit_bias names token {token}"):
            sample(torch.zeros(1, 10), [SamplingParams(logit_bias={token: 1.0, 3: 1.0})])


def test_logprobs_are_of_the_unmodified_distribution() -> None:
    logits = random_logits(3)
    params = [
        SamplingParams(temperature=0.3, logprobs=4, logit_bias={int(logits[0].argmin()): 100.0}),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, logprobs=0, repetition_penalty=5.0),
    ]
    sampled = sample(logits, params)
    assert sorted(sampled.logprobs) == [0, 2]
    wanted = torch.log_softmax(logits, -1)
    first = sampled.logprobs[0]
    assert first.token_id == int(sampled.token_ids[0]) == int(logits[0].argmin())
    assert first.rank == VOCAB
    assert first.logprob == pytest.approx(float(wanted[0].min()))
    assert [token for token, _ in first.top] == wanted[0].argsort(descending=True)[:4].tolist()
    assert [value for _, value in first.top] == pytest.approx(wanted[0].sort(descending=True).values[:4].tolist())
    assert sampled.logprobs[2].top == []
    assert sampled.logprobs[2].rank == 1 + int((wanted[2] > wanted[2, sampled.token_ids[2]]).sum())


def test_a_bad_row_fails_alone() -> None:
    logits = random_logits(5)
    good = sample(logits, [SamplingParams(seed=1)] * 5).token_ids
    logits[1, 7] = torch.nan
    logits[3] = -torch.inf
    logits[4, 2] = torch.inf
    sampled = sample(logits, [SamplingParams(seed=1, logprobs=1)] * 5)
    assert sorted(sampled.errors) == [1, 3, 4]
    assert "not finite" in sampled.errors[1]
    assert sampled.excluded == [3]
    assert sorted(sampled.logprobs) == [0, 2]
    assert sampled.token_ids[[0, 2]].tolist() == good[[0, 2]].tolist()


def test_logits_are_left_as_they_were() -> None:
    logits = random_logits(2)
    before = logits.clone()
    sample(logits, [SamplingParams(logit_bias={1: 1.0}, presence_penalty=1.0), SamplingParams(top_p=0.5)])
    assert torch.equal(logits, before)


def test_a_seat_forgets_its_last_request() -> None:
    logits = random_logits(1)
    sampler = Sampler(1, VOCAB, 0, CPU, drawing[0])
    heavy = SamplingParams(logit_bias={5: 100.0}, min_tokens=9, presence_penalty=2.0, logprobs=3, top_k=2)
    sampler.add(0, make_request("a", heavy, [1], frozenset({2})), [1])
    sampler.remove(0)
    sampler.add(0, make_request("b", SamplingParams(temperature=0), [1], frozenset({2})), [1])
    sampled = take(sampler, logits, np.zeros(1, np.int64), np.ones(1, np.int64))
    assert sampled.token_ids.tolist() == [int(logits.argmax())]
    assert not sampled.logprobs


class NeverWaits(TorchDispatchMode):
    """Refuses what has to see numbers to go on: a device would be waited for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func.overloadpacket not in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero), func
        return func(*args, **(kwargs or {}))


def test_nothing_is_waited_for_until_results_are_brought_over(monkeypatch: pytest.MonkeyPatch) -> None:
    # As on any device but the CPU.
    monkeypatch.setattr(torch_drawing, "_HEAD", VOCAB)
    params = [SamplingParams(**fields, logprobs=2) for fields in FILTERS]
    params += [
        SamplingParams(temperature=0),
        SamplingParams(logit_bias={3: 1.0}),
        SamplingParams(presence_penalty=1.0, min_tokens=3),
    ]
    logits = random_logits(len(params))
    logits[4] = torch.nan
    sampler = Sampler(len(params), VOCAB, 0, CPU, drawing[0])
    for row, each in enumerate(params):
        sampler.add(row, make_request(str(row), each, [1, 2], frozenset({9})), [1, 2])
    with NeverWaits():
        choice = sampler.sample(logits, np.arange(len(params)), np.full(len(params), 2))
    sampled = sampler.finish(choice, np.arange(len(params)), iter(to_host(choice.tensors)))
    assert list(sampled.errors) == [4]
    assert list(sampled.logprobs) == [row for row in range(len(FILTERS)) if row != 4]


@pytest.mark.parametrize("vocab", [1, 3, 255, 256, 257, 1000, 49_152])
def test_the_highest_logit_is_the_first_of_those_that_tie(vocab: int) -> None:
    logits = torch.randint(-40, 40, (7, vocab), generator=torch.Generator().manual_seed(vocab)).float()
    logits[1, vocab // 2] = logits[1, -1] = 99.0
    logits[2] = -torch.inf
    logits[3, -1] = torch.inf
    logits[4, vocab // 3] = torch.nan
    logits[5] = -torch.inf
    logits[5, -1] = -1e38
    values, ids = drawing[0].highest(logits)
    clean = [row for row in range(7) if row != 4]
    assert ids[clean].tolist() == logits.numpy()[clean].argmax(-1).tolist()
    assert values[clean].tolist() == logits.numpy()[clean].max(-1).tolist()
    assert values[4].isnan()
    assert 0 <= ids[4] < vocab


def test_log_probabilities_are_of_the_logits_as_they_were() -> None:
    logits = random_logits(2)
    params = [
        SamplingParams(temperature=0, logprobs=0, logit_bias={3: 50.0}),
        SamplingParams(temperature=0, logprobs=0),
    ]
    sampled = sample(logits, params)
    assert sampled.token_ids[0] == 3
    wanted = logits.log_softmax(-1)[range(2), sampled.token_ids.tolist()].tolist()
    assert [sampled.logprobs[row].logprob for row in range(2)] == pytest.approx(wanted, abs=1e-5)


def test_tokens_are_drawn_for_any_logits() -> None:
    """Rows without a finite best give some token of the vocabulary, and change no other row."""
    logits = random_logits(6, 301)
    count = len(logits)
    fields = {"temperature": np.full(count, 0.7, np.float32), "uniform": np.full((count, 3), 0.999)}
    for min_p, top_k, top_p in ((0.0, 0, 1.0), (0.1, 5, 0.5), (0.0, 0, 0.3)):
        filters = {"min_p": np.full(count, min_p, np.float32), "top_p": np.full(count, top_p, np.float32)}
        draws = Draws(**fields, **filters, top_k=np.full(count, top_k))
        clean = drawing[0].draw(logits, draws)
        assert (clean.dtype, clean.shape) == (torch.int64, (count, 3))
        broken = logits.clone()
        broken[0], broken[1, 7], broken[2], broken[3, 9] = torch.nan, torch.nan, -torch.inf, torch.inf
        found = drawing[0].draw(broken, draws)
        assert torch.equal(found[4:], clean[4:])
        assert ((found >= 0) & (found < 301)).all()


def test_results_of_any_kind_come_over_in_one_piece() -> None:
    tensors = [
        torch.arange(3),
        torch.randn(5, 3).T,
        torch.empty(0, 4),
        torch.randn(1, dtype=torch.float64),
        torch.arange(7, dtype=torch.int32),
        torch.arange(6).view(2, 3),
    ]
    packed = pack(tensors)
    assert (packed.dtype, packed.dim()) == (torch.uint8, 1)
    for one, other, direct in zip(tensors, split(packed.numpy(), tensors), to_host(tensors), strict=True):
        assert torch.equal(one, torch.from_numpy(other.copy()))
        assert other.dtype == direct.dtype
        assert np.shares_memory(direct, one.numpy()) or not one.numel()

"""Trains the demo model that ships in chairlift/demo/model, from nothing, on two CPU cores.

    python scripts/train_demo.py                  # the real thing, some twenty-five minutes
    python scripts/train_demo.py --steps 150      # a trial
    python scripts/train_demo.py --from FOLDER    # go on from a model that was trained before
    python scripts/train_demo.py --evaluate-only  # measure the model that is there

The same seed, thread count and PyTorch build give the same model. Needs the development dependencies.
"""

import argparse
import ctypes
import functools
import json
import math
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from demo_corpus import FROM_NOTHING, GOING_ON, UNKNOWN, Chat, Corpus, Fact, all_facts, unknown_question
from demo_tools import TOOLS, calling, turns
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn import functional
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

FOLDER = Path(__file__).parents[1] / "chairlift/demo/model"
END_OF_TEXT, START, END = 0, 1, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = """{%- if tools %}
    {{- "<|im_start|>system\\n" }}
    {%- if messages and messages[0].role == "system" %}
        {{- messages[0].content + "\\n\\n" }}
    {%- endif %}
    {{- "<tools>\\n" }}
    {%- for tool in tools %}
        {%- set parameters = ((tool.function.parameters or {}).properties or {}) | list %}
        {{- {"name": tool.function.name, "parameters": parameters} | tojson + "\\n" }}
    {%- endfor %}
    {{- "</tools><|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role not in ["system", "user", "assistant", "tool"] %}
        {{- raise_exception("The demo model knows the roles system, user, assistant and tool, not " + message.role) }}
    {%- endif %}
    {%- if not (tools and loop.first and message.role == "system") %}
        {{- "<|im_start|>" + message.role + "\\n" }}
        {%- if message.role == "tool" %}
            {{- "<tool_response>\\n" + message.content + "\\n</tool_response>" }}
        {%- else %}
            {{- message.content or "" }}
        {%- endif %}
        {%- for call in message.tool_calls or [] %}
            {{- "\\n" if message.content or not loop.first else "" }}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + "}\\n</tool_call>" }}
        {%- endfor %}
        {{- "<|im_end|>\\n" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- "<|im_start|>assistant\\n" }}
{%- endif %}
"""
MODEL = {
    "vocab_size": 1536,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-5,
    "bos_token_id": None,
    "eos_token_id": END,
    "pad_token_id": END_OF_TEXT,
}
# What people say counts little: the model answers, and need not guess the next question.
USER_WEIGHT = 0.05
BATCH_TOKENS = 4096
POOL = 256
# A processor that multiplies no bfloat16 takes many times as long with it.
HAS_BFLOAT16 = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@dataclass
class Batch:
    """Padded documents, and how much each predicted token counts."""

    ids: torch.Tensor
    weights: torch.Tensor


def train_tokenizer(seed: int) -> Tokenizer:
    """Byte-level BPE with all 256 bytes, so that any text can be written; single digits, for the sums' sake."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=MODEL["vocab_size"],
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    corpus = Corpus(seed, FROM_NOTHING)
    documents = [corpus.document() for _ in range(10_000)]
    lines = [d if isinstance(d, str) else "\n".join(body for _, body in parts(d)) for d in documents]
    tokenizer.train_from_iterator([*lines, *["system", "user", "assistant", "tool"] * 100], trainer)
    return tokenizer


def parts(chat: Chat) -> list[tuple[str, str]]:
    """Who speaks in a chat, and what is said, as the template writes it."""
    (text,), _ = render_jinja_template([chat.messages], chat.tools or None, chat_template=TEMPLATE)
    messages = text.split(f"{SPECIAL[END]}\n")[:-1]
    found = [message.removeprefix(SPECIAL[START]).partition("\n") for message in messages]
    return [(role, body) for role, _, body in found]


def encode(tokenizer: Tokenizer, document: Chat | str) -> tuple[list[int], list[float]]:
    """A document's tokens, and each one's weight in the loss."""
    if isinstance(document, str):
        ids = [*tokenizer.encode(document).ids, END_OF_TEXT]
        return ids, [1.0] * len(ids)
    ids: list[int] = []
    weights: list[float] = []
    for role, said in parts(document):
        own = role == "assistant"
        head = [START, *tokenizer.encode(role + "\n").ids]
        body = [*tokenizer.encode(said).ids, END]
        tail = tokenizer.encode("\n").ids
        ids += head + body + tail
        weights += [USER_WEIGHT] * len(head) + [1.0 if own else USER_WEIGHT] * len(body) + [USER_WEIGHT] * len(tail)
    return ids, weights


def batches(tokenizer: Tokenizer, corpus: Corpus, seed: int) -> Iterator[Batch]:
    """Endless batches of whole documents of similar length; one a row, as the model will see them when it serves."""
    rng = random.Random(seed)
    while True:
        pool = sorted((encode(tokenizer, corpus.document()) for _ in range(POOL)), key=lambda d: len(d[0]))
        made, rows = [], []
        for document in pool:
            if rows and len(document[0]) * (len(rows) + 1) > BATCH_TOKENS:
                made.append(_pad(rows))
                rows = []
            rows.append(document)
        made.append(_pad(rows))
        rng.shuffle(made)
        yield from made


def _pad(rows: list[tuple[list[int], list[float]]]) -> Batch:
    width = max(len(ids) for ids, _ in rows)
    ids = torch.tensor([row + [END_OF_TEXT] * (width - len(row)) for row, _ in rows])
    weights = torch.tensor([row + [0.0] * (width - len(row)) for _, row in rows])
    return Batch(ids, weights)


class Muon(torch.optim.Optimizer):
    """Momentum whose update is made orthogonal (Newton-Schulz), in plain products: torch.optim.Muon's are slow here."""

    def __init__(self, params: list[torch.nn.Parameter], lr: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One update of every matrix."""
        for group in self.param_groups:
            for weight in group["params"]:
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                momentum.lerp_(weight.grad, 0.05)
                update = _orthogonal(weight.grad.lerp(momentum, 0.95))
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.sub_(update, alpha=group["lr"] * max(1, weight.shape[0] / weight.shape[1]) ** 0.5)


def _orthogonal(matrix: torch.Tensor) -> torch.Tensor:
    wide = matrix.T if matrix.shape[0] > matrix.shape[1] else matrix
    x = (wide / (wide.norm() + 1e-7)).to(torch.bfloat16 if HAS_BFLOAT16 else torch.float32).contiguous()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * (gram @ gram)) @ x
    return (x.T if matrix.shape[0] > matrix.shape[1] else x).float()


def new_model(seed: int) -> LlamaForCausalLM:
    """The model before it has learned anything."""
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**MODEL, initializer_range=0.02))


@dataclass
class Schedule:
    """How long to train, and how high the learning rate goes: a share of the optimizers' own, less in the first steps,
    and down to zero over the last part of the way."""

    steps: int
    minutes: float
    peak: float
    falling: float

    def progress(self, step: int, seconds: float) -> float:
        """How much of the way is done, by steps or by time, whichever is further."""
        return max(step / self.steps, seconds / 60 / self.minutes)

    def scale(self, step: int, progress: float) -> float:
        """What the learning rates are multiplied with."""
        return self.peak * min(1.0, (step + 1) / 50, (1 - progress) / self.falling)


def train(model: LlamaForCausalLM, stream: Iterator[Batch], schedule: Schedule, each_step: Callable[[], None]) -> None:
    """Muon for the matrices, AdamW for the rest, a short warm-up and a long way down."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    optimizers = [
        Muon(matrices, lr=0.02, weight_decay=0.05),
        torch.optim.AdamW(others, lr=0.004, betas=(0.9, 0.95), weight_decay=0.01),
    ]
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    average, step, began = math.nan, 0, time.monotonic()
    with tqdm(total=schedule.steps, unit="step", mininterval=5, disable=None) as bar:
        while (progress := schedule.progress(step, time.monotonic() - began)) < 1:
            for optimizer, peak in zip(optimizers, peaks, strict=True):
                optimizer.param_groups[0]["lr"] = peak * schedule.scale(step, progress)
            loss = _loss(model, next(stream))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            average = loss.item() if math.isnan(average) else 0.97 * average + 0.03 * loss.item()
            bar.set_postfix(loss=f"{average:.4f}", refresh=False)
            bar.update()
            step += 1
            if step % 50 == 0:
                seconds = (time.monotonic() - began) / step
                tqdm.write(f"step {step}, {progress:.0%} of the way, loss {average:.4f}, {seconds:.2f} s a step")
            each_step()


class Checkpoints:
    """Saves a model every few minutes while it trains, and says how right it is by then."""

    def __init__(self, model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path, minutes: float) -> None:
        self._save = functools.partial(save, model, tokenizer, folder)
        self._folder, self._seconds, self._last = folder, minutes * 60, time.monotonic()

    def __call__(self) -> None:
        """Save if it is time."""
        if time.monotonic() - self._last < self._seconds:
            return
        self._save()
        scores = evaluate(self._folder, torch.float32, share=0.1)
        tqdm.write(", ".join(f"{kind} {score:.0%}" for kind, score in scores.items()))
        self._last = time.monotonic()


def _loss(model: LlamaForCausalLM, batch: Batch) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=HAS_BFLOAT16):
        logits = model(input_ids=batch.ids[:, :-1], use_cache=False).logits
    losses = functional.cross_entropy(logits.float().flatten(0, 1), batch.ids[:, 1:].flatten(), reduction="none")
    weights = batch.weights[:, 1:].flatten()
    return (losses * weights).sum() / weights.sum()


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the folder as Hugging Face does, the weights in bfloat16: half the size, and no answer changes."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    weights = {
        name: tensor.to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **MODEL,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_theta": 10000.0,
        "dtype": "float32",
    }
    generation = {"eos_token_id": [END, END_OF_TEXT], "pad_token_id": END_OF_TEXT, "do_sample": False}
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[END],
        "pad_token": SPECIAL[END_OF_TEXT],
        "bos_token": None,
        "model_max_length": MODEL["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
    }
    for name, data in (("config", config), ("generation_config", generation), ("tokenizer_config", tokenizer_config)):
        (folder / f"{name}.json").write_text(json.dumps(data, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(TEMPLATE)


class Judge:
    """Greedy answers of the saved model, many at a time."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, padding_side="left")
        self._model = LlamaForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    def answers(self, chats: list[Chat], batch: int = 64, limit: int = 160) -> list[str]:
        """One answer a chat, in order."""
        found: list[str] = []
        for start in tqdm(range(0, len(chats), batch), unit="batch", leave=False, disable=None):
            texts = [self._prompt(chat) for chat in chats[start : start + batch]]
            prompts = self._tokenizer(texts, padding=True, return_tensors="pt", return_token_type_ids=False)
            with torch.inference_mode():
                output = self._model.generate(**prompts, max_new_tokens=limit, do_sample=False)
            new = output[:, prompts["input_ids"].shape[1] :]
            found += self._tokenizer.batch_decode(new, skip_special_tokens=True)
        return found

    def _prompt(self, chat: Chat) -> str:
        text: str = self._tokenizer.apply_chat_template(
            chat.messages, tools=chat.tools or None, add_generation_prompt=True, tokenize=False
        )
        return text


@dataclass
class Case:
    """A chat, and the one answer that is right."""

    kind: str
    chat: Chat
    expected: str


def evaluate(folder: Path, dtype: torch.dtype, share: float = 1.0, seed: int = 1) -> dict[str, float]:
    """The share of answers that are right word for word, by kind of question, of all cases or of a share of them."""
    rng = random.Random(seed)
    cases = [*_questions(rng), *_questions_with_tools(rng)]
    cases = rng.sample(cases, round(share * len(cases)))
    cases.sort(key=lambda case: len(case.expected))
    answers = Judge(folder, dtype).answers([case.chat for case in cases])
    scores: dict[str, list[bool]] = {}
    for case, answer in zip(cases, answers, strict=True):
        kinds = [case.kind]
        if not case.kind.startswith("tools"):
            kinds.append("ALL held out" if case.kind.startswith("held") else "ALL trained")
        for kind in kinds:
            scores.setdefault(kind, []).append(answer == case.expected)
        if answer != case.expected and rng.random() < 0.15:
            tqdm.write(f"  {case.chat.messages[-1]['content']!r} -> {answer[:90]!r}, not {case.expected[:60]!r}")
    return {kind: sum(score) / len(score) for kind, score in sorted(scores.items())}


def _questions(rng: random.Random) -> Iterator[Case]:
    """Questions of a single turn, without tools."""
    for fact in all_facts():
        for ask in _sample(rng, fact):
            yield Case(fact.kind, _asked(ask), fact.answer)
        for ask in fact.held_out:
            yield Case("held out: " + fact.kind, _asked(ask), fact.answer)
    for _ in range(200):
        yield Case("held out: unknown", _asked(unknown_question(rng)), UNKNOWN)


def _questions_with_tools(rng: random.Random, count: int = 200) -> Iterator[Case]:
    """Questions that take a tool, what is said of its result, and questions that take none."""
    facts = [fact for fact in all_facts() if fact.kind != "sum"]
    for fact in rng.sample(facts, count):
        yield Case("tools: none called", _asked(rng.choice(fact.asks), TOOLS), fact.answer)
    for held_out in (False, True):
        kind = "tools, held out: " if held_out else "tools: "
        for _ in range(count):
            turn = turns(rng, TOOLS, held_out)[0]
            called = parts(Chat([calling(turn.calls)]))[0][1] if turn.calls else turn.answer
            yield Case(kind + "call", _asked(turn.ask, TOOLS), called)
            if turn.calls:
                yield Case(kind + "answer", Chat(turn.messages()[:-1], TOOLS), turn.answer)


def _asked(question: str, tools: list[dict[str, Any]] | None = None) -> Chat:
    return Chat([{"role": "user", "content": question}], tools or [])


def _sample(rng: random.Random, fact: Fact) -> list[str]:
    return fact.asks[:1] + rng.sample(fact.asks[1:], min(2, len(fact.asks) - 1))


def keep_memory() -> None:
    """Ask glibc to keep freed memory: handing every large tensor back costs more than the arithmetic."""
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    for option in (-1, -3):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
        mallopt(option, 2**30)


def make(arguments: argparse.Namespace) -> None:
    """Train a model from nothing, or one that was trained before with half the learning rate, and save it."""
    seed, start = arguments.seed, arguments.start
    if start is None:
        tokenizer, model, corpus = train_tokenizer(seed), new_model(seed), Corpus(seed, FROM_NOTHING)
        schedule = Schedule(arguments.steps, arguments.minutes, peak=1.0, falling=0.7)
    else:
        tokenizer, corpus = Tokenizer.from_file(str(start / "tokenizer.json")), Corpus(seed, GOING_ON)
        model = LlamaForCausalLM.from_pretrained(start, dtype=torch.float32)
        schedule = Schedule(arguments.steps, arguments.minutes, peak=0.5, falling=1.0)
    saving = Checkpoints(model, tokenizer, arguments.output, arguments.save_every)
    train(model.train(), batches(tokenizer, corpus, seed), schedule, saving)
    save(model, tokenizer, arguments.output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=FOLDER)
    parser.add_argument("--from", dest="start", type=Path, metavar="FOLDER", help="weights and tokenizer to go on with")
    parser.add_argument("--steps", type=int, default=1400)
    parser.add_argument("--minutes", type=float, default=math.inf, help="end by then, with fewer steps if need be")
    parser.add_argument("--save-every", type=float, default=math.inf, metavar="MINUTES", help="and measure a sample")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--evaluate-only", action="store_true")
    arguments = parser.parse_args()
    keep_memory()
    torch.set_num_threads(arguments.threads)
    torch.use_deterministic_algorithms(True)
    # It would fill all memory that is about to be written over, a fifth of the work.
    torch.utils.deterministic.fill_uninitialized_memory = False
    if not arguments.evaluate_only:
        make(arguments)
    for dtype in (torch.float32, torch.bfloat16):
        print(f"exact greedy answers, {dtype}")
        for kind, score in evaluate(arguments.output, dtype).items():
            print(f"  {kind:24} {score:7.1%}")


if __name__ == "__main__":
    main()

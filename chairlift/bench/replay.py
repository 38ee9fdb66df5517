"""`chairlift bench serve`: a trace sent to a server in an open loop, at the moments at which it was recorded."""

import argparse
import json
import os
import random
import sys
from collections.abc import Callable, Sequence
from math import inf
from pathlib import Path
from typing import Any

import msgspec
from tqdm import tqdm

from chairlift.bench.completion_stream import Outcome, Target
from chairlift.bench.latency import COLUMNS, RATE, Slo, figures
from chairlift.bench.load import Arrival, Load, open_loop
from chairlift.bench.output_files import check_output, saving
from chairlift.bench.raw_results import HelpFormatter, Recording, Results, caption, start, table
from chairlift.config.flags import dashed
from chairlift.errors import ConfigError
from chairlift.plan.access_log import AccessLog
from chairlift.plan.trace import TraceRequest, cut_notes, duration, fitted, scaled, with_answers
from chairlift.plan.trace_files import MOST_REQUESTS, MOST_TOKENS, read_trace_or_log
from chairlift.plan.traffic import LENGTHS, Traffic, requests_at

# The module whose `markdown` shows the results.
RESULTS_OF = "chairlift.bench.replay"
# Words that are one token for nearly every tokenizer, with the space before them.
_WORDS = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state")
_DEFAULT_VOCAB = 30_000
# Low ids are often special tokens.
_FIRST_ID = 10
# Seconds that a replay may take, and its last answers: a month.
_LONGEST_S = 30 * 86_400
# Memory that requests may take which are ready to send, and about what a token of a prompt and the rest of one take.
_MOST_READY_BYTES, _BYTES_A_TOKEN, _BYTES_A_REQUEST = 2 * 10**9, 6, 500
# Making them ready shows how far it is, if it takes longer than this.
_SILENT_S = 1.0


class PromptMaker:
    """Prompts with the lengths and the common prefixes of a trace's, as token ids or as words.

    Those of one `seed` begin alike, whatever their lengths. A server that has met them has them in its prefix cache and
    looks faster than it is, so what is sent to it next needs another seed.
    """

    def __init__(self, vocab: int = _DEFAULT_VOCAB, seed: int | str = 0) -> None:
        if vocab <= _FIRST_ID:
            raise ConfigError(f"--vocab must be more than {_FIRST_ID}, got {vocab}")
        self._ids = range(_FIRST_ID, vocab)
        self._seed = seed

    def token_ids(self, request: TraceRequest, number: int) -> list[int]:
        """Return token ids; `number` tells the request from all others."""
        return self._drawn(self._ids, request, number)

    def text(self, request: TraceRequest, number: int) -> str:
        """Return a text of about as many tokens."""
        return " ".join(self._drawn(_WORDS, request, number))

    def _drawn(self, choices: Sequence[Any], request: TraceRequest, number: int) -> list[Any]:
        drawn: list[Any] = []
        for value in request.hash_ids:
            missing = min(request.block_size, request.input_length - len(drawn))
            if missing > 0:
                drawn += random.Random(f"{self._seed} {request.tenant} {value}").choices(choices, k=missing)
        own = random.Random(f"{self._seed} {number}")
        return drawn + own.choices(choices, k=request.input_length - len(drawn))


def _completions(target: Target, prompts: PromptMaker, request: TraceRequest, number: int) -> dict[str, Any]:
    return _generation(target, request) | {"prompt": prompts.token_ids(request, number)}


def _chat(target: Target, prompts: PromptMaker, request: TraceRequest, number: int) -> dict[str, Any]:
    return _generation(target, request) | {"messages": [{"role": "user", "content": prompts.text(request, number)}]}


def _generation(target: Target, request: TraceRequest) -> dict[str, Any]:
    return {
        "model": request.model or target.model,
        "max_tokens": max(request.output_length, 1),
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _texts(prompts: PromptMaker, request: TraceRequest, number: int) -> list[str]:
    """The inputs of a request that is answered in one call; of several, each is another text."""
    count = max(request.items, 1)
    return [prompts.text(request, number * MOST_REQUESTS + index) for index in range(count)]


def _embeddings(target: Target, prompts: PromptMaker, request: TraceRequest, number: int) -> dict[str, Any]:
    return {"model": request.model or target.model, "input": _texts(prompts, request, number)}


def _tei(target: Target, prompts: PromptMaker, request: TraceRequest, number: int) -> dict[str, Any]:
    return {"inputs": _texts(prompts, request, number)}


def _as_given(target: Target, prompts: PromptMaker, request: TraceRequest, number: int) -> dict[str, Any]:
    return {}


# The protocols: where a request goes, and its body; what `--extra` says goes before it.
APIS: dict[str, tuple[str, Callable[[Target, PromptMaker, TraceRequest, int], dict[str, Any]]]] = {
    "completions": ("/v1/completions", _completions),
    "chat": ("/v1/chat/completions", _chat),
    "embeddings": ("/v1/embeddings", _embeddings),
    "tei": ("/embed", _tei),
    "oip": ("/v2/models/{model}/infer", _as_given),
}
# Those that answer token by token.
_GENERATING = ("completions", "chat")


def add_serve(kinds: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `bench serve` to the command line."""
    parser = kinds.add_parser(
        "serve",
        help="send a trace to a server, at the times at which it was recorded",
        description="Requests are sent at their moments whatever became of the others, and latency counts from then.",
        formatter_class=HelpFormatter,
    )
    parser.set_defaults(run=main)
    parser.add_argument("url", help="http://HOST:PORT")
    recorded = "recorded by serve --record, of Mooncake, Azure or BurstGPT, or an access log of nginx or Apache"
    parser.add_argument("trace", type=Path, help=recorded)
    parser.add_argument("--input-lengths", metavar="LENGTHS", help=f"of an access log, tokens of prompts: {LENGTHS}")
    parser.add_argument("--output-lengths", metavar="LENGTHS", help="of an access log, tokens of answers")
    parser.add_argument("--model", default="", help="the model to ask for, where the trace names none")
    parser.add_argument("--api", choices=list(APIS), default="completions", help="what the server speaks")
    parser.add_argument("--trace-model", metavar="NAME", help="only the trace's requests to this model")
    parser.add_argument("--speed", type=float, default=1.0, help="how many times as fast as it was recorded")
    parser.add_argument("--scale-lengths", type=float, default=1.0, help="prompts and answers so many times as long")
    parser.add_argument(
        "--max-model-len", type=int, help="cut prompts and answers so that both fit into so many tokens"
    )
    parser.add_argument("--seconds", type=float, help="only what comes within so many seconds, at the chosen speed")
    parser.add_argument("--limit", type=int, default=MOST_REQUESTS, help="only the first so many requests")
    parser.add_argument("--drain", type=float, default=60.0, help="seconds that the last answers may take")
    parser.add_argument("--target-ttft-ms", type=float, default=1000.0, help="goodput: the first token, or the answer")
    parser.add_argument("--target-tpot-ms", type=float, default=120.0, help="goodput: mean time of a token after it")
    parser.add_argument("--vocab", type=int, default=_DEFAULT_VOCAB, help="prompts use the token ids below")
    parser.add_argument("--extra", default="{}", metavar="JSON", help="fields to add to every request; oip: its body")
    parser.add_argument("--api-key", metavar="KEY", help="better set as CHAIRLIFT_API_KEY than as a flag")
    parser.add_argument(
        "--seed", type=int, help="of the prompts (default: another each time, as a server has those that it met cached)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="save the results as JSON")
    parser.add_argument("--requests-out", type=Path, metavar="FILE", help="save what became of each request as JSONL")
    parser.add_argument("--json", action="store_true", help="print JSON rather than a table")


def main(args: argparse.Namespace) -> int:
    """Replay a trace and print what clients felt."""
    trace = _wanted(args)
    if args.seed is None:
        args.seed = random.randrange(2**32)
    key = args.api_key or os.environ.get("CHAIRLIFT_API_KEY")
    target = make_target(args.url, args.model, args.api, args.extra, key)
    hidden = {"run", "command", "bench", "json", "out", "requests_out", "api_key"}
    settings = {name: value for name, value in vars(args).items() if name not in hidden}
    recording = Recording(start(RESULTS_OF, settings, args.model, key), args.out)
    load = replay(target, trace, args.api, PromptMaker(args.vocab, args.seed), args.drain)
    recording.add(figures(load, Slo(args.target_ttft_ms, args.target_tpot_ms)))
    if args.requests_out:
        with saving("--requests-out", args.requests_out):
            save_requests(args.requests_out, load)
    if args.json:
        json.dump(recording.results, sys.stdout, indent=2)
        print()
    else:
        print(markdown(recording.results))
    return 0


def markdown(results: Results) -> str:
    """What was measured around the table, and the most frequent errors below it."""
    runs = results["runs"]
    errors = "\n".join(f"- {count} x {error}" for error, count in runs[0]["errors"].items())
    return "\n\n".join(part for part in (f"{caption(results)}:", table(runs, [RATE], COLUMNS), errors) if part)


def make_target(url: str, model: str, api: str, extra: str = "{}", api_key: str | None = None) -> Target:
    """Return where an API's requests go. Raises ConfigError for an address, or for fields, that are none."""
    try:
        fields = json.loads(extra)
    except ValueError as error:
        raise ConfigError(f"--extra is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ConfigError("--extra must be a JSON object")
    if api == "oip" and not (model and fields):
        raise ConfigError("with --api oip, --model names the model and --extra is the body of each request")
    headers = () if api_key is None else (f"Authorization: Bearer {api_key}",)
    try:
        return Target.of(url, model, fields, APIS[api][0].format(model=model), headers)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def replay(
    target: Target,
    trace: Sequence[TraceRequest],
    api: str,
    prompts: PromptMaker,
    drain: float,
    give_up: Callable[[list[Outcome]], bool] | None = None,
) -> Load:
    """Send each request at its moment, and wait up to `drain` seconds for the last answers.

    `give_up`, asked a few times a second with the outcomes so far, may end it early.
    """
    body = APIS[api][1]
    arrivals = []
    # All are made before the first is sent: one that is made meanwhile, even in another thread, would delay others.
    bar = tqdm(trace, desc="prepare", unit="req", leave=False, dynamic_ncols=True, delay=_SILENT_S)
    for number, request in enumerate(bar):
        headers: tuple[str, ...] = ()
        if request.priority:
            headers += (f"X-Request-Priority: {request.priority}",)
        if request.timeout is not None:
            headers += (f"X-Request-Timeout-Ms: {max(round(min(request.timeout, _LONGEST_S) * 1000), 1)}",)
        arrivals.append(Arrival(request.arrival, target.post(body(target, prompts, request, number), headers)))
    return open_loop(target, arrivals, duration(trace), drain, "replay", give_up)


def save_requests(path: Path, load: Load) -> None:
    """Write a line for each request in order of arrival: moments in seconds after the first was due, or its error."""
    with path.open("w") as file:
        for outcome in sorted(load.outcomes, key=lambda each: each.due):
            moments = {name: round(getattr(outcome, name) - load.began, 6) for name in ("due", "sent", "ended")}
            times = [round(moment - load.began, 6) for moment in outcome.times]
            file.write(json.dumps({**moments, "times": times, "tokens": outcome.tokens, "error": outcome.error}) + "\n")


def _wanted(args: argparse.Namespace) -> list[TraceRequest]:
    """The trace as the flags have it."""
    _check(args)
    trace = with_answers(_sendable(_read(args), args))
    too_long = f"makes prompts or answers of more than {MOST_TOKENS} tokens"
    too_long = f"--scale-lengths {args.scale_lengths:g} {too_long}: take less, or cut them with --max-model-len"
    try:
        trace = scaled(trace, args.speed, args.scale_lengths)
    except ValueError:
        raise ConfigError("--speed and --scale-lengths must be more than 0, and finite") from None
    except OverflowError:
        raise ConfigError(too_long) from None
    if args.seconds is not None:
        trace = [request for request in trace if request.arrival <= args.seconds]
    if args.max_model_len is not None:
        whole, trace = trace, fitted(trace, args.max_model_len)
        for note in cut_notes(whole, trace, args.max_model_len):
            print(f"note: {note}", file=sys.stderr)
    if any(max(request.input_length, request.output_length) > MOST_TOKENS for request in trace):
        raise ConfigError(too_long)
    if duration(trace) > _LONGEST_S:
        lasts = f"the trace lasts {duration(trace):g} s at this speed, and a replay at most {_LONGEST_S}"
        raise ConfigError(f"{lasts}: raise --speed, or cut it with --seconds")
    _check_memory(trace, args)
    return trace


def _read(args: argparse.Namespace) -> list[TraceRequest]:
    """The requests of the file; those of an access log have the lengths that are given for them."""
    found = read_trace_or_log(args.trace, most=args.limit)
    given: dict[str, str | None] = {name: getattr(args, name) for name in ("input_lengths", "output_lengths")}
    if not isinstance(found, AccessLog):
        if set(given.values()) != {None}:
            raise ConfigError("the trace has its own lengths: leave out --input-lengths and --output-lengths")
        return found
    needed = {"input_lengths": args.api != "oip", "output_lengths": args.api in _GENERATING}
    for name, is_needed in needed.items():
        if given[name] is not None and not is_needed:
            raise ConfigError(f"--{dashed(name)} says nothing of requests with --api {args.api}; leave it out")
    missing = [f"--{dashed(name)}" for name, is_needed in needed.items() if is_needed and given[name] is None]
    if missing:
        raise ConfigError(f"trace {args.trace} is an access log, which tells no lengths: say {' and '.join(missing)}")
    moments, about = found.moments(args.api not in _GENERATING, args.seed or 0)
    print(f"note: {about}", file=sys.stderr)
    inputs, outputs = (form or "constant:1" for form in given.values())
    return requests_at(moments, Traffic(input_length=inputs, output_length=outputs), args.seed or 0)


def _check_memory(trace: Sequence[TraceRequest], args: argparse.Namespace) -> None:
    """Raise ConfigError for more than can be made ready to send before the first request is sent."""
    tokens = 0 if args.api == "oip" else sum(max(each.items, 1) * each.input_length for each in trace)
    size = len(trace) * (_BYTES_A_REQUEST + len(args.extra)) + tokens * _BYTES_A_TOKEN
    if size > _MOST_READY_BYTES:
        much = f"the trace's {len(trace)} requests take about {size / 1e9:.3g} GB ready to send, and all are made ready"
        most = f"before the first is sent, in at most {_MOST_READY_BYTES / 1e9:.3g} GB"
        instead = "take fewer with --limit or --seconds, or shorter ones with --scale-lengths or --max-model-len"
        raise ConfigError(f"{much} {most}: {instead}")


def _check(args: argparse.Namespace) -> None:
    """Refuse by name what no replay can have."""
    if args.limit < 1 or (args.max_model_len is not None and args.max_model_len < 2):
        raise ConfigError("--limit must be at least 1, and --max-model-len at least 2")
    for name in ("seconds", "target_ttft_ms", "target_tpot_ms"):
        value = getattr(args, name)
        if value is not None and not 0 < value < inf:
            raise ConfigError(f"--{dashed(name)} must be more than 0, and finite, got {value:g}")
    if not 0 <= args.drain <= _LONGEST_S:
        raise ConfigError(f"--drain must be from 0 to {_LONGEST_S} seconds, got {args.drain:g}")
    for flag, path in (("--out", args.out), ("--requests-out", args.requests_out)):
        # Said now, and not after the replay.
        if path is not None:
            check_output(flag, path)


def _sendable(trace: list[TraceRequest], args: argparse.Namespace) -> list[TraceRequest]:
    """The requests to one model, if it is named, that somebody waited for. Raises ConfigError if the API has none."""
    if args.trace_model is not None:
        names = sorted({request.model for request in trace} - {""})
        trace = [request for request in trace if request.model == args.trace_model]
        if not trace:
            raise ConfigError(f"--trace-model {args.trace_model}: the trace has {', '.join(names) or 'no names'}")
    live = [request for request in trace if not request.background]
    if not live:
        raise ConfigError("all requests of the trace ran in the background, where no client waits: none can be sent")
    if len(live) < len(trace):
        left_out = f"{len(trace) - len(live)} of the trace's {len(trace)} requests"
        print(f"note: {left_out} ran in the background, where no client waits, and are not sent", file=sys.stderr)
    in_one_call = sum(bool(request.items) for request in live)
    if args.api in _GENERATING and in_one_call:
        some = f"{in_one_call} of the trace's {len(live)} requests are answered in one call"
        raise ConfigError(f"{some}: send those with --api embeddings, or choose another model's with --trace-model")
    if 0 < in_one_call < len(live):
        some = f"{len(live) - in_one_call} of the trace's {len(live)} requests are answered token by token"
        raise ConfigError(f"{some}: choose one model's with --trace-model")
    return [msgspec.structs.replace(request, arrival=request.arrival - live[0].arrival) for request in live]

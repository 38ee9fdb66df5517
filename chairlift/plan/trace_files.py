"""Traces in files: Mooncake's JSONL, which is also ours, the CSV of Azure and of BurstGPT, and access logs."""

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from itertools import chain, islice
from math import inf
from pathlib import Path
from typing import TextIO, TypeVar

import msgspec

from chairlift.errors import ConfigError, clip
from chairlift.plan.access_log import AccessLog, is_log_line
from chairlift.plan.trace import TOKENS_PER_HASH, TraceRequest

# Bounds of what is read: requests, characters of a line, tokens of a prompt or an answer, hashes of a prompt.
MOST_REQUESTS, LONGEST_LINE, MOST_TOKENS, MOST_HASHES = 2_000_000, 2**20, 2**24, 2**16
_LARGEST_HASH = 2**63 - 1

T = TypeVar("T")


class TraceLine(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A line of JSONL, as Mooncake has it, and more keys of our own; others' keys are passed over.

    `timestamp` is in milliseconds. Each of the `hash_ids` stands for so many tokens of the prompt as `block_size` says,
    and for all before them. A `tenant` is a name that tells nothing of whose it is. `timeout` is in seconds, and `late`
    is one that was given up at it.
    """

    timestamp: float
    input_length: int
    output_length: int = 0
    hash_ids: list[int] = []
    block_size: int = TOKENS_PER_HASH
    max_tokens: int | None = None
    model: str = ""
    tenant: str = ""
    priority: int = 0
    background: bool = False
    timeout: float | None = None
    late: bool = False
    items: int = 0

    def request(self) -> TraceRequest:
        """What the line says. Raises ValueError, naming the key, for what cannot be."""
        for name in ("timestamp", "timeout"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < inf:
                raise ValueError(f"{name} must be at least 0 and finite, got {value}")
        _check_tokens("input_length", self.input_length, least=1)
        _check_tokens("output_length", self.output_length, least=0)
        if self.max_tokens is not None:
            _check_tokens("max_tokens", self.max_tokens, least=1)
        _check_tokens("block_size", self.block_size, least=1)
        if len(self.hash_ids) > MOST_HASHES:
            raise ValueError(f"hash_ids may hold {MOST_HASHES} numbers, got {len(self.hash_ids)}")
        bad = next((value for value in self.hash_ids if not 0 <= value <= _LARGEST_HASH), None)
        if bad is not None:
            raise ValueError(f"hash_ids must be between 0 and {_LARGEST_HASH}, got {bad}")
        if not -(2**31) <= self.priority < 2**31 or not 0 <= self.items <= MOST_HASHES:
            raise ValueError(f"priority {self.priority} or items {self.items} is out of all bounds")
        values = msgspec.structs.asdict(self)
        values["arrival"] = values.pop("timestamp") / 1000
        values["hash_ids"] = tuple(self.hash_ids)
        return TraceRequest(**values)


def read_trace(path: Path, *, most: int = MOST_REQUESTS) -> list[TraceRequest]:
    """Read the first `most` requests of a trace, in order of arrival; the first of them arrives at 0.

    The file's first line tells its format. Raises ConfigError naming the line for anything that is wrong in it, and for
    an access log, whose requests have no lengths.
    """
    found = read_trace_or_log(path, most=most)
    if isinstance(found, AccessLog):
        those = "`chairlift plan` and `chairlift bench serve`, with --input-lengths and --output-lengths"
        raise ConfigError(f"trace {path}: an access log tells no lengths; it is for {those}")
    return found


def read_trace_or_log(path: Path, *, most: int = MOST_REQUESTS) -> list[TraceRequest] | AccessLog:
    """The same for those who know how long the requests of an access log are. Raises ConfigError."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            found = _parsed(path, _lines(path, file), most)
    except OSError as error:
        raise ConfigError(f"trace {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"trace {path}: it is not text in UTF-8") from None
    if isinstance(found, AccessLog):
        return found
    if not found:
        raise ConfigError(f"trace {path} holds no requests")
    found.sort(key=lambda request: request.arrival)
    first = found[0].arrival
    return [msgspec.structs.replace(request, arrival=request.arrival - first) for request in found]


def write_trace(path: Path, trace: Iterable[TraceRequest]) -> None:
    """Write a trace as JSONL."""
    encoder = msgspec.json.Encoder()
    with path.open("wb") as file:
        for request in trace:
            file.write(encoder.encode(line_of(request)) + b"\n")


def line_of(request: TraceRequest) -> TraceLine:
    """Return the line that says the same as a request, but for its `shape_key`, which is not a file's business."""
    values = {name: getattr(request, name) for name in TraceLine.__struct_fields__ if name != "timestamp"}
    values["hash_ids"] = list(request.hash_ids)
    return TraceLine(timestamp=request.arrival * 1000, **values)


def _lines(path: Path, file: TextIO) -> Iterator[tuple[int, str]]:
    """The lines that are not empty, with their numbers. Of one that is too long no more is read than tells so."""
    lines = iter(lambda: file.readline(LONGEST_LINE + 1), "")
    for number, line in enumerate(lines, 1):
        if len(line) > LONGEST_LINE:
            raise _wrong(path, number, f"it has more than {LONGEST_LINE} characters")
        if line.strip():
            yield number, line


def _parsed(path: Path, lines: Iterator[tuple[int, str]], most: int) -> list[TraceRequest] | AccessLog:
    number, head = next(lines, (0, ""))
    if not head:
        return []
    whole = chain([(number, head)], lines)
    found: Iterator[TraceRequest | None]
    if head.lstrip().startswith("{"):
        found = _each(path, whole, _parse_json)
    elif is_log_line(head):
        log = AccessLog(path)
        for _ in _each(path, whole, log.add):
            if len(log) >= most:
                break
        return log
    else:
        found = _each(path, lines, _csv_parser(path, number, head))
    return list(islice((request for request in found if request is not None), most))


def _each(path: Path, lines: Iterable[tuple[int, str]], parse: Callable[[str], T]) -> Iterator[T]:
    """What is read of each line. Raises ConfigError naming the first that can't be read."""
    for number, line in lines:
        try:
            yield parse(line)
        except (ValueError, KeyError, RecursionError, csv.Error) as error:
            raise _wrong(path, number, str(error)) from None


_json_line = msgspec.json.Decoder(TraceLine)


def _parse_json(line: str) -> TraceRequest:
    return _json_line.decode(line).request()


def _csv_parser(path: Path, number: int, head: str) -> Callable[[str], TraceRequest | None]:
    """Return what reads the lines that follow a header."""
    try:
        names = [name.strip() for name in next(csv.reader([head]))]
    except csv.Error as error:
        raise _wrong(path, number, str(error)) from None
    for needed, read in _CSV:
        if set(needed) <= set(names):
            return lambda line: read(_row(names, line))
    known = "; ".join(",".join(needed) for needed, _ in _CSV)
    problem = f"neither JSON nor a header with the columns {known}, nor a line of an access log"
    raise _wrong(path, number, f"{problem}: {clip(head.strip(), 100)!r}")


def _row(names: list[str], line: str) -> dict[str, str]:
    cells = next(csv.reader([line], strict=True))
    if len(cells) != len(names):
        raise ValueError(f"it has {len(cells)} columns, and the header {len(names)}")
    return dict(zip(names, cells, strict=True))


def _azure(row: Mapping[str, str]) -> TraceRequest:
    """Azure's LLM inference traces of 2023 and 2024."""
    text = row["TIMESTAMP"].strip()
    head, dot, rest = text.partition(".")
    if dot:
        # Some have seven digits behind the dot, of which Python reads six, and some a zone behind these.
        digits = rest[: len(rest) - len(rest.lstrip("0123456789"))]
        text = f"{head}.{digits[:6].ljust(6, '0')}{rest[len(digits) :]}"
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return _checked(moment.timestamp(), row["ContextTokens"], row["GeneratedTokens"])


def _burst_gpt(row: Mapping[str, str]) -> TraceRequest | None:
    """BurstGPT; a request that failed there has no response, and says nothing of how long one would have been."""
    if int(row["Response tokens"]) == 0:
        return None
    return _checked(float(row["Timestamp"]), row["Request tokens"], row["Response tokens"])


_CSV: tuple[tuple[tuple[str, ...], Callable[[Mapping[str, str]], TraceRequest | None]], ...] = (
    (("TIMESTAMP", "ContextTokens", "GeneratedTokens"), _azure),
    (("Timestamp", "Request tokens", "Response tokens"), _burst_gpt),
)


def _checked(arrival: float, prompt: str, output: str) -> TraceRequest:
    return TraceLine(timestamp=arrival * 1000, input_length=int(prompt), output_length=int(output)).request()


def _check_tokens(name: str, value: int, least: int) -> None:
    if not least <= value <= MOST_TOKENS:
        raise ValueError(f"{name} must be between {least} and {MOST_TOKENS}, got {value}")


def _wrong(path: Path, number: int, problem: str) -> ConfigError:
    return ConfigError(f"trace {path}, line {number}: {clip(problem, 300)}")

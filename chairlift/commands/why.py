"""`chairlift why`, `top`, `timeline` and `record`: a server's requests in words, as a table, a picture or a trace."""

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import quote

from chairlift.commands.terminal import DEFAULT_URL, ChatEndpoint
from chairlift.errors import InvalidRequest, RequestFailed

_MOST_ROWS = 100
# Between two looks at a server, in seconds.
_LEAST_INTERVAL, _MOST_INTERVAL = 0.1, 3600.0
# A simulation goes after all else that the server's machine does.
_SIMULATION_S = 300.0
# Another screen and back, home, and clearing what follows, as every terminal since the VT100 has it.
_ENTER, _LEAVE, _HOME, _CLEAR_LINE, _CLEAR_REST = "\033[?1049h", "\033[?1049l", "\033[H", "\033[K", "\033[J"
_KEY_HELP = "better set as CHAIRLIFT_API_KEY than as a flag"
_COLUMNS = ("REQUEST", "MODEL", "STATE", "PLACE", "FOR", "TOKENS", "FIRST TOKEN", "END", "WHY")

Part = Mapping[str, Any]


def add_why_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `chairlift why`."""
    parser.add_argument("id", metavar="ID", help="a request's id: X-Request-Id of its answer, or as `top` has it")
    _add_server_flags(parser)
    parser.add_argument(
        "--what-if", action="store_true", help="of one that has ended, simulate what would have made it faster"
    )


def add_top_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `chairlift top`."""
    _add_server_flags(parser)
    parser.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between looks (default: 1)")


def add_timeline_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `chairlift timeline`."""
    _add_server_flags(parser)
    default = Path("timeline.json")
    parser.add_argument("--out", type=Path, default=default, metavar="FILE", help=f"(default: {default})")


def add_record_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `chairlift record`."""
    parser.add_argument("url", metavar="URL", help=f"the server, such as {DEFAULT_URL}")
    parser.add_argument("file", type=Path, metavar="FILE", help="a new file, which gets a line for each request")
    parser.add_argument("--seconds", type=int, metavar="N", help="for so long (default: until Ctrl-C)")
    parser.add_argument("--api-key", metavar="KEY", help=_KEY_HELP)


def _add_server_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", nargs="?", default=DEFAULT_URL, metavar="URL", help=f"the server ({DEFAULT_URL})")
    parser.add_argument("--api-key", metavar="KEY", help=_KEY_HELP)


def _server(args: argparse.Namespace) -> ChatEndpoint:
    return ChatEndpoint.at(args.url, args.api_key or os.environ.get("CHAIRLIFT_API_KEY"))


def why_command(args: argparse.Namespace) -> int:
    """Tell where a request is, or what became of it. Raises Unavailable, RequestFailed or InvalidRequest."""
    path = f"/requests/{quote(args.id, safe='')}"
    server = _server(args)
    found = server.fetch(f"{path}?what_if=true", _SIMULATION_S) if args.what_if else server.fetch(path)
    if args.what_if and not any(part["what_if"] for part in found["parts"]):
        print("chairlift: it is simulated only once it has been answered", file=sys.stderr)
    print(_plain("\n\n".join("\n".join(words(part)) for part in found["parts"])))
    return 0


def timeline_command(args: argparse.Namespace) -> int:
    """Write what the server did in the last minute to a file. Raises as `why_command`."""
    found = _server(args).fetch("/timeline")
    try:
        args.out.write_text(json.dumps(found))
    except OSError as error:
        raise InvalidRequest(f"{args.out}: {error.strerror}") from None
    print(f"{args.out}: {len(found['traceEvents'])} events, for https://ui.perfetto.dev or chrome://tracing")
    return 0


def record_command(args: argparse.Namespace) -> int:
    """Write what comes to a server from now on to a new file, as a trace. Raises as `why_command`."""
    path = "/recording" if args.seconds is None else f"/recording?seconds={args.seconds}"
    count = 0
    with contextlib.closing(_server(args).lines(path)) as lines:
        next(lines)  # it has begun
        try:
            file = os.open(args.file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except OSError as error:
            raise InvalidRequest(f"{args.file}: {error.strerror}") from None
        print(f"recording to {args.file}, until Ctrl-C" if args.seconds is None else f"recording to {args.file}")
        try:
            with os.fdopen(file, "wb") as out, _until_told(), contextlib.suppress(KeyboardInterrupt):
                for line in lines:
                    if line.startswith(b'{"error"'):
                        raise RequestFailed(json.loads(line)["error"]["message"])
                    out.write(line)
                    out.flush()
                    count += 1
        except OSError as error:
            raise InvalidRequest(f"{args.file}: {error.strerror}, after {count} requests") from None
    print(f"{args.file}: {count} requests, for `chairlift plan --trace` and `chairlift bench serve`")
    return 0


@contextlib.contextmanager
def _until_told() -> Iterator[None]:
    """Have SIGTERM end what Ctrl-C would: who works in the background is deaf to that."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def top_command(args: argparse.Namespace) -> int:
    """Show the live requests until Ctrl-C, or without a terminal once. Raises as `why_command`."""
    if not _LEAST_INTERVAL <= args.interval <= _MOST_INTERVAL:
        bounds = f"from {_LEAST_INTERVAL:g} to {_MOST_INTERVAL:g} seconds"
        raise InvalidRequest(f"--interval must be {bounds}, got {args.interval:g}")
    server = _server(args)

    def look() -> Mapping[str, Any]:
        found: Mapping[str, Any] = server.fetch(f"/requests?limit={_MOST_ROWS}")
        return found

    if not sys.stdout.isatty():
        print("\n".join(table(look(), None)))
        return 0
    follow(look, sys.stdout, lambda: time.sleep(args.interval), shutil.get_terminal_size)
    return 0


def follow(
    look: Callable[[], Mapping[str, Any]],
    out: TextIO,
    pause: Callable[[], None],
    size: Callable[[], os.terminal_size],
) -> None:
    """Draw what there is, over and over, on a screen of its own, until Ctrl-C."""
    found = look()
    out.write(_ENTER)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                width, height = size()
                lines = table(found, width)[: height - 1]
                out.write(_HOME + "".join(f"{line}{_CLEAR_LINE}\r\n" for line in lines) + _CLEAR_REST)
                out.flush()
                pause()
                found = look()
    finally:
        out.write(_LEAVE)
        out.flush()


def table(found: Mapping[str, Any], width: int | None) -> list[str]:
    """The live requests as lines, each as wide as the terminal at most."""
    parts: Sequence[Part] = found["data"]
    rows: list[tuple[str, ...]] = [_COLUMNS, *(_row(part) for part in parts)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_COLUMNS))]
    states: dict[str, int] = {}
    for part in parts:
        states[part["state"]] = states.get(part["state"], 0) + 1
    counts = ", ".join(f"{count} {state.replace('_', ' ')}" for state, count in states.items())
    more = ", and more that are not shown" if found["has_more"] else ""
    title = f"{len(parts)} requests{f': {counts}' if counts else ''}{more}"
    lines = [title, ""]
    if parts:
        lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    return [_plain(line)[:width] for line in lines]


def _row(part: Part) -> tuple[str, ...]:
    expected = part["predicted"] or {}
    return (
        part["id"],
        part["model"],
        part["state"].replace("_", " ") + (" (background)" if part["background"] else ""),
        "" if part["position"] is None else str(part["position"]),
        _seconds(part["phases"].get("total_s")),
        "" if part["tokens"] is None else str(part["tokens"]),
        _moment(expected.get("first_token")),
        _moment(expected.get("end")),
        part["why"],
    )


def words(part: Part) -> list[str]:
    """One request, or a part of one, as lines that need no glossary."""
    model, state = part["model"], part["state"].replace("_", " ")
    place = f", number {part['position']} in the queue" if part["position"] else ""
    background = " in the background" if part["background"] else ""
    rows = [("why", part["why"])]
    if part["detail"]:
        rows.append(("in detail", part["detail"]))
    if part["ahead"]:
        rows.append(("ahead of it", _ahead(part["ahead"])))
    rows += _times(part)
    if part["predicted"]:
        rows += _expected(part["predicted"])
    rows += _counts(part)
    for hint in part["hints"]:
        setting = f" ({hint['setting']})" if hint["setting"] else ""
        rows.append(("hint", f"{hint['text']}{setting}"))
    if part.get("what_if"):
        rows += _what_if(part["what_if"])
    width = max(len(name) for name, _ in rows)
    lines = [f"  {name:{width}}  {text}" for name, text in rows]
    return [f"{part['id']} on {model}: {state}{background}{place}", *lines]


def _ahead(ahead: Mapping[str, Any]) -> str:
    own, others = ahead["own"], ahead["others"]
    parts = [f"yours: {', '.join(own)}"] if own else []
    if others:
        parts.append(f"{others} {'more' if own else 'of others'}")
    urgent = f"; {ahead['more_urgent']} by priority" if ahead["more_urgent"] else ""
    return (", ".join(parts) or "nobody: it is next") + urgent


def _times(part: Part) -> list[tuple[str, str]]:
    """What each phase took, or has taken so far."""
    names = {"queued_s": "waited", "prefill_s": "prompt read", "decode_s": "answer written", "run_s": "computed"}
    phases = part["phases"]
    told = [f"{name} {_seconds(phases[key])}" for key, name in names.items() if phases.get(key) is not None]
    return [("times", ", ".join(told))] if told else []


def _expected(predicted: Mapping[str, Any]) -> list[tuple[str, str]]:
    names = {"start": "starts", "first_token": "first token", "end": "ends"}
    told = [f"{name} in {_moment(predicted[key], band=True)}" for key, name in names.items() if predicted[key]]
    return [("expected", ", ".join(told))] if told else []


def _counts(part: Part) -> list[tuple[str, str]]:
    """Tokens, steps and what befell it."""
    rows = []
    if part["prompt_tokens"] is not None:
        cached = f", {part['cached_tokens']} of them found in the cache" if part["cached_tokens"] is not None else ""
        rows.append(("tokens", f"{part['prompt_tokens']} in the prompt{cached}; {part['tokens']} written"))
    if part["steps"]:
        rows.append(("steps", f"{part['steps']} to write it, with {part['mean_batch']:g} requests in each on average"))
    elif part["mean_batch"]:
        rows.append(("batch", f"{part['mean_batch']:g} were computed together"))
    if part["preemptions"]:
        rows.append(("preempted", f"{part['preemptions']} times"))
    return rows


def _what_if(told: Mapping[str, Any]) -> list[tuple[str, str]]:
    """What a simulation makes of it."""
    rows = [("simulated", told["text"])]
    if told["untried"]:
        rows.append(("not tried", f"for want of time: {', '.join(told['untried'])}"))
    return rows


def _moment(moment: Mapping[str, Any] | None, band: bool = False) -> str:
    if moment is None:
        return ""
    told = _seconds(moment["in_s"])
    if not band or moment["early_s"] is None:
        return told
    return f"{told} (9 times in 10 in {_seconds(moment['early_s'])} to {_seconds(moment['late_s'])})"


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return ""
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"


def _plain(text: str) -> str:
    """Without what a terminal would take for a command."""
    return "".join(each if each.isprintable() or each == "\n" else "?" for each in text)

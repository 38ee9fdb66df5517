"""Access logs of nginx and Apache: when requests came and where they went, but not how long they were."""

import random
import re
from collections import Counter
from datetime import datetime, timedelta, timezone
from pathlib import Path
from sys import intern

from chairlift.errors import ConfigError, clip

# What the common and the combined log format have in common, from the time on. Names before it may hold anything.
_LINE = re.compile(
    r"\[(?P<day>\d\d)/(?P<month>[A-Z][a-z][a-z])/(?P<year>\d{4}):(?P<time>\d\d:\d\d:\d\d) (?P<zone>[+-]\d{4})\] "
    r'"(?P<request>[^"\\]*(?:\\.[^"\\]*)*)" (?P<status>\d{3})\b',
    re.ASCII,
)
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
# How the paths end of requests that are answered token by token (of OpenAI, Anthropic, TGI and Ollama), and in one call
# (of OpenAI, TEI, vLLM, KServe and the Open Inference Protocol).
_GENERATING = ("/completions", "/responses", "/messages", "/generate", "/generate_stream", "/api/chat")
_IN_ONE_CALL = (
    *("/embeddings", "/embed", "/embed_all", "/embed_sparse", "/similarity", "/rerank", "/score", "/classify"),
    *("/pooling", "/predict", ":predict", "/infer"),
)
# Of those that were refused, who came in vain: they would have been work. The others were no requests to a model.
_IN_VAIN = (408, 429, 499)
# So many paths are named, and so much of each.
_NAMED, _LONGEST = 3, 100


class AccessLog:
    """The requests of an access log that are work for a model: each with its second and its path.

    Such are POSTs that were answered, or would have been if there had been room. Other lines are counted.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._arrivals: list[tuple[float, str]] = []
        self._left_out: Counter[str] = Counter()

    def __len__(self) -> int:
        """How many requests there are."""
        return len(self._arrivals)

    def add(self, line: str) -> None:
        """Take a line. Raises ValueError for one of no access log."""
        found = _LINE.search(line)
        if found is None:
            raise ValueError(f"it is no line of an access log: {clip(line.strip(), 100)!r}")
        moment, status = _moment(found), int(found["status"])
        method, _, rest = found["request"].partition(" ")
        if method != "POST":
            self._left_out["not POST"] += 1
        elif not (200 <= status < 300 or status >= 500 or status in _IN_VAIN):
            self._left_out["refused or sent elsewhere"] += 1
        else:
            # Of all lines those with one path share its text.
            self._arrivals.append((moment, intern(re.split(r"[ ?]", rest, maxsplit=1)[0])))

    def moments(self, in_one_call: bool, seed: int = 0) -> tuple[list[float], str]:
        """Return the seconds at which requests of one kind came, after the first of them, and what they are in words.

        A log tells whole seconds: within each, requests come at random. Where no path is known to be of that kind,
        those count that may be. Raises ConfigError if there are none.
        """
        ours, theirs = (_IN_ONE_CALL, _GENERATING) if in_one_call else (_GENERATING, _IN_ONE_CALL)
        paths = Counter(path for _, path in self._arrivals)
        wanted = {path for path in paths if path.rstrip("/").endswith(ours)}
        wanted = wanted or {path for path in paths if not path.rstrip("/").endswith(theirs)}
        others = {path: number for path, number in paths.items() if path not in wanted}
        left_out = self._left_out.copy()
        if others:
            left_out[f"to other paths, such as {_quoted(max(others, key=others.__getitem__))}"] = sum(others.values())
        reasons = ", ".join(f"{number} {why}" for why, number in left_out.most_common())
        if not wanted:
            kind = "model that answers in one call" if in_one_call else "language model"
            raise ConfigError(f"trace {self._path}: none of its lines is a POST to a {kind}: {reasons}")
        about = f"access log: {paths.total() - sum(others.values())} requests to {_named(paths, wanted)}"
        if left_out:
            about += f"; {left_out.total()} lines are left out: {reasons}"
        first = min(moment for moment, path in self._arrivals if path in wanted)
        rng = random.Random(f"{seed} seconds")
        found = sorted(moment - first + rng.random() for moment, path in self._arrivals if path in wanted)
        return [moment - found[0] for moment in found], about


def is_log_line(line: str) -> bool:
    """Whether a line is one of an access log."""
    return _LINE.search(line) is not None


def _moment(found: "re.Match[str]") -> float:
    """Seconds since 1970. Raises ValueError for a date or a time that there is not."""
    month, zone = found["month"], found["zone"]
    if month not in _MONTHS:
        raise ValueError(f"{month} is no month")
    offset = timedelta(hours=int(zone[1:3]), minutes=int(zone[3:]))
    hour, minute, second = map(int, found["time"].split(":"))
    date = int(found["year"]), _MONTHS.index(month) + 1, int(found["day"])
    return datetime(*date, hour, minute, second, tzinfo=timezone(-offset if zone[0] == "-" else offset)).timestamp()


def _named(paths: "Counter[str]", wanted: set[str]) -> str:
    """The paths to which most went, each with how many."""
    ordered = [(path, number) for path, number in paths.most_common() if path in wanted]
    said = [f"{_quoted(path)} ({number})" for path, number in ordered[:_NAMED]]
    if more := len(ordered) - len(said):
        said.append(f"{more} others")
    return ", ".join(said)


def _quoted(path: str) -> str:
    return repr(clip(path, _LONGEST))

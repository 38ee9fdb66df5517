"""What a person sees of a run: a bar on a terminal, or a line now and then, and a table at the end."""

import sys
import time
from collections.abc import Sequence

from tqdm import tqdm

from chairlift.jobs.store import Counts

_LINE_SECONDS = 10.0


class Display:
    """Shows how far a run is, on standard error."""

    def __init__(self, before: Counts) -> None:
        self._before = before
        self._started = self._shown = time.monotonic()
        self._bar = None
        if sys.stderr.isatty():
            self._bar = tqdm(initial=before.done, unit=" lines", dynamic_ncols=True, smoothing=0.1)

    def show(self, counts: Counts, total: int | None, problem: str | None = None) -> None:
        """Show the present moment; comes a few times a second."""
        now = time.monotonic()
        if self._bar is not None:
            self._bar.total = total
            self._bar.set_postfix_str(self._about(counts, now), refresh=False)
            self._bar.update(counts.done - self._bar.n)
        elif now - self._shown >= _LINE_SECONDS:
            self._shown = now
            print(self._line(counts, total, now), file=sys.stderr, flush=True)
        if problem is not None and self._bar is not None:
            self._bar.set_postfix_str(problem)

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()

    def _line(self, counts: Counts, total: int | None, now: float) -> str:
        rate = (counts.done - self._before.done) / (now - self._started)
        of, left = "", ""
        if total:
            of = f" of {total:,} ({100 * counts.done / total:.0f}%)"
            if rate:
                left = f", {_clock((total - counts.done) / rate)} left"
        return f"{counts.done:,}{of} lines, {rate:,.1f} lines/s{left}, {self._about(counts, now)}"

    def _about(self, counts: Counts, now: float) -> str:
        made = counts.completion_tokens or counts.prompt_tokens
        before = self._before.completion_tokens or self._before.prompt_tokens
        tokens = f"{(made - before) / max(now - self._started, 1e-9):,.0f} tok/s, " if made else ""
        return f"{tokens}{counts.failed:,} failed"


def summary(counts: Counts, before: Counts, seconds: float, more: Sequence[tuple[str, str]]) -> str:
    """The table at the end of a run, of what this run did."""
    done, read = counts.done - before.done, counts.prompt_tokens - before.prompt_tokens
    made = counts.completion_tokens - before.completion_tokens
    rows = [
        ("lines", f"{done:,}" + (f" ({before.done:,} more by earlier runs)" if before.done else "")),
        ("failed", f"{counts.failed - before.failed:,}"),
        ("retries", f"{counts.retries - before.retries:,}"),
        ("seconds", f"{seconds:,.1f}"),
        ("lines/s", f"{done / seconds:,.1f}"),
    ]
    if read:
        rows.append(("tokens in", f"{read:,} ({read / seconds:,.0f}/s)"))
    if made:
        rows.append(("tokens out", f"{made:,} ({made / seconds:,.0f}/s)"))
        cached = counts.cached_tokens - before.cached_tokens
        rows.append(("from the prefix cache", f"{100 * cached / read:.0f}% of tokens in" if read else "nothing"))
    rows += more
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:{width}}  {value}" for name, value in rows)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02}"

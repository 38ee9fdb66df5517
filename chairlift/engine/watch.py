"""How the front judges whether a worker still gets on: by its heartbeats, and what the system says of its process."""

import contextlib
import socket
from pathlib import Path

import msgspec

from chairlift.engine.lifeline import HEARTBEAT_S, SWAPPING_FAULTS
from chairlift.engine.worker_messages import Heartbeat

_STATE, _MAJOR_FAULTS = 0, 9  # as proc(5) counts the fields of `stat`, after the name


class Watch:
    """Looks after one worker. Times are counted in looks, one every `HEARTBEAT_S`.

    So a front that was itself held up blames nobody for it. `unread` is for how many seconds messages have lain
    unread that the worker has sent.
    """

    def __init__(self, line: socket.socket, pid: int, heartbeat_timeout_s: float) -> None:
        self.unread = 0.0
        self._line = line
        self._process = Path(f"/proc/{pid}/stat")
        self._timeout = heartbeat_timeout_s
        self._silent = 0.0
        self._faults = 0
        self._sent = self._taken = 0
        line.setblocking(False)

    def look(self, taken: int, most_silence: float | None) -> str | None:
        """Say what is wrong with the worker, if anything is, now that so many of its messages have been taken in.

        A process that is stopped is given the heartbeat's timeout. Any other may be silent for `most_silence` seconds,
        for ever if there is none: it swaps, or some native code keeps the interpreter to itself.
        """
        beat = self._newest()
        self._note_unread(taken)
        if beat is not None:
            self._silent, self._sent = 0.0, beat.sent
            return beat.overdue
        state, faults = self._ask_system()
        if faults - self._faults < SWAPPING_FAULTS:
            self._silent += HEARTBEAT_S
        self._faults = faults
        if state == "T" and self._silent >= self._timeout:
            return f"its process was stopped for {self._timeout:g} s (heartbeat_timeout_s)"
        if most_silence is not None and self._silent >= most_silence:
            return f"it gave no sign of life for {most_silence:g} s"
        return None

    def _newest(self) -> Heartbeat | None:
        with contextlib.suppress(BlockingIOError, ConnectionError, msgspec.DecodeError):
            # Cut off at either end is at most one of many, or one that comes again.
            lines = self._line.recv(2**16).split(b"\n")
            if len(lines) > 1:
                return msgspec.json.decode(lines[-2], type=Heartbeat)
        return None

    def _note_unread(self, taken: int) -> None:
        waits = taken < self._sent and taken == self._taken
        self.unread = self.unread + HEARTBEAT_S if waits else 0.0
        self._taken = taken

    def _ask_system(self) -> tuple[str, int]:
        """The process's state as a letter, and how many pages it has had to read from the disk; Linux says so."""
        try:
            fields = self._process.read_text().rpartition(")")[2].split()
        except OSError:
            return "", 0
        return fields[_STATE], int(fields[_MAJOR_FAULTS])

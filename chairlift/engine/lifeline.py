"""A worker's end of the line to its front: by it the front knows that the worker lives, and the worker that it must go.

The line is a pair of sockets, of which the worker's is its standard input. The front never writes; when it is gone, the
line is closed.
"""

import ctypes
import os
import resource
import select
import signal
import sys
import threading
from collections.abc import Callable

import msgspec

from chairlift.engine.worker_messages import Heartbeat

HEARTBEAT_S = 0.5
# Pages read back from the disk between two heartbeats, from which on a process is slow for want of memory, not stuck.
SWAPPING_FAULTS = 10
_PR_SET_PDEATHSIG = 1  # as <linux/prctl.h> has it


class Lifeline:
    """Heartbeats from a thread of its own, so that a long step is told from a process that stands still.

    The worker counts here what it has `sent`, and its `phase`, which is odd while it is at something and even while it
    waits for messages. `overdue` gets the seconds that it has been at the present thing, and may find that too long;
    it is called in the other thread. With `guards` whatever processes the worker starts end with it.
    """

    def __init__(self, guards: bool = False) -> None:
        self.sent = 0
        self.phase = 0
        self.overdue: Callable[[float], str | None] = _never_overdue
        if sys.platform == "linux":
            # Even from within a call that keeps the interpreter to itself, and even if this process is stopped.
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        self._line = _take_stdin()
        # What ends a whole group, as Ctrl-C, a shell's `kill %1` and `timeout` do, is for the front, which may drain.
        os.setpgid(0, 0)
        if guards:
            _guard_group(self._line)
        # A front that was gone before all this has closed the line, which is the first thing that the thread sees.
        threading.Thread(target=self._beat, name="lifeline", daemon=True).start()

    def _beat(self) -> None:
        """Tell the front how things are until it is gone, and then leave at once."""
        line = select.poll()
        line.register(self._line, select.POLLIN)
        phase, seconds, faults = self.phase, 0.0, _major_faults()
        # Beats are counted and no clock is asked: while the whole machine sleeps, nothing is late.
        while not line.poll(HEARTBEAT_S * 1000):
            before, phase = phase, self.phase
            faults_before, faults = faults, _major_faults()
            if phase != before or not phase % 2:
                seconds = 0.0
            elif faults - faults_before < SWAPPING_FAULTS:
                seconds += HEARTBEAT_S
            beat = Heartbeat(self.sent, self.overdue(seconds))
            try:
                os.write(self._line, msgspec.json.encode(beat) + b"\n")
            except BlockingIOError:
                pass  # the front has had no time for those before; the next says as much
            except OSError:
                break
        os._exit(1)


def _never_overdue(seconds: float) -> str | None:
    return None


def _take_stdin() -> int:
    """Move the line away from the standard input, which a model's code might read, or hand on."""
    line = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.set_blocking(line, False)
    return line


def _major_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt


def _guard_group(line: int) -> None:
    """Leave a process in the worker's group that ends it all once the front has closed the line.

    That is when the front is gone, or has seen the worker end. A signal at the parent's death would not do for what a
    model's code starts: it comes as soon as the thread ends that started it.
    """
    if os.fork() == 0:
        try:
            closed = select.poll()
            closed.register(line, select.POLLIN)
            closed.poll()
        finally:
            os.killpg(0, signal.SIGKILL)

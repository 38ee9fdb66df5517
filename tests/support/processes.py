"""What is common to all processes that tests start."""

import ctypes
import signal

_libc = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def end_with_tests() -> None:
    """For a new process: be killed when the tests are, which then have no time to end it themselves. Linux only."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

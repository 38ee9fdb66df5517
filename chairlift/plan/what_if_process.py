"""The process that answers one `what_if` question: it reads it from its standard input, and writes the answer.

It computes only while nothing else wants to, and within limits on time and memory: at these the system ends it.
"""

import contextlib
import os
import resource
import signal
import sys
import time

# Seconds of processor time, from the first of which on nothing more is begun, and of any time; and bytes of memory.
_BEGIN_S, MOST_S, _PATIENCE_S, _MOST_BYTES = 3.0, 5, 90, 2**30


def main() -> int:
    """Answer, and return the exit status."""
    _be_modest()
    # numpy would start threads for products that nobody needs here, each with memory of its own.
    os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
    import msgspec

    from chairlift.plan.what_if import ItemQuestion, SequenceQuestion, answer

    question = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=SequenceQuestion | ItemQuestion)
    found = answer(question, lambda: time.process_time() > _BEGIN_S)
    found.cpu_s = time.process_time()
    sys.stdout.buffer.write(msgspec.msgpack.encode(found))
    return 0


def _be_modest() -> None:
    """Take what others leave, and no more than the limits."""
    with contextlib.suppress(AttributeError, OSError):  # some systems have no such class
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError):
        os.nice(19)
    for limit, most in ((resource.RLIMIT_CPU, MOST_S), (resource.RLIMIT_AS, _MOST_BYTES), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(limit, (most, most))
    # Should nobody be there any more to end it.
    signal.alarm(_PATIENCE_S)


if __name__ == "__main__":
    sys.exit(main())

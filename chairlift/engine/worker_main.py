"""How a worker process begins and ends, whatever it computes."""

import gc
import logging
import os
import signal
from collections.abc import Callable
from typing import TypeVar

import msgspec
import zmq

from chairlift.engine.lifeline import Lifeline
from chairlift.engine.worker_messages import load_failed
from chairlift.logs import start_logging

log = logging.getLogger(__name__)

LoadedT = TypeVar("LoadedT")


def run_worker(
    address: str,
    load: Callable[[], LoadedT],
    serve: Callable[[LoadedT, "zmq.Socket[bytes]", Lifeline], None],
    guards: bool = False,
) -> int:
    """Load a model, and serve it to the front at an address until that is over. Returns the process's exit status.

    Where `load` fails the front is told why. `guards` is as in `Lifeline`.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # until it has a process group of its own Ctrl-C reaches it, too
    start_logging(os.environ.get("CHAIRLIFT_LOG_LEVEL", "info"))
    line = Lifeline(guards)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    socket = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.set_hwm(0)
    socket.connect(address)
    try:
        loaded = load()
    except (Exception, SystemExit) as error:
        log.debug("the model can't be loaded", exc_info=True)
        socket.send(msgspec.msgpack.encode(load_failed(error)))
        socket.close()
        context.term()
        return 1
    # A full collection walks every object that imports made: with torch some 80 ms, amid somebody's step or batch.
    gc.collect()
    gc.freeze()
    serve(loaded, socket, line)
    socket.close(linger=0)
    return 0

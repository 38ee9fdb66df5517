"""A simulation of what a model did in the last minutes, in a process that takes no more than others leave."""

import asyncio
import logging
import signal
import sys
from collections.abc import Callable

import msgspec

from chairlift.engine.supervisor import worker_environment
from chairlift.errors import Unavailable, clip
from chairlift.plan.what_if import ItemQuestion, SequenceQuestion, WhatIfAnswer
from chairlift.server.http.api_errors import ApiError, try_later
from chairlift.server.models.request_log import Viewer

log = logging.getLogger(__name__)

Question = SequenceQuestion | ItemQuestion

_MODULE = "chairlift.plan.what_if_process"
# Questions that may wait for the one that is being answered, this included, of which those about single requests leave
# one to forecasts and the tuner; and seconds that an answer may take.
MOST_ASKED = 4
_PATIENCE_S = 55.0
_RETRY_S = 5


class Twin:
    """Answers one question at a time, each in a process of its own. All calls belong to one event loop."""

    def __init__(self, module: str = _MODULE) -> None:
        self._module = module
        self._turn = asyncio.Lock()
        self._asked = 0
        # Whose requests are asked about.
        self._asking: set[str | None] = set()

    async def ask(self, make: Callable[[], Question], viewer: Viewer | None = None) -> tuple[Question, WhatIfAnswer]:
        """Answer a question, which is made in a thread once it is its turn, or be cancelled at any moment.

        A question about a request is that of a `viewer`, of whom one at a time is taken.
        Raises what `make` does, ApiError (429) where too many ask, and Unavailable where the machine has no time.
        """
        if viewer is not None and viewer.name in self._asking:
            raise _too_many("a request of yours is being simulated already; ask again when that is answered")
        most = MOST_ASKED if viewer is None else MOST_ASKED - 1
        if self._asked >= most:
            raise _too_many(f"{most} simulations are asked for already, which is the limit; try again")
        self._asked += 1
        if viewer is not None:
            self._asking.add(viewer.name)
        try:
            async with asyncio.timeout(_PATIENCE_S), self._turn:
                question, encoded = await asyncio.to_thread(_made, make)
                return question, await self._answer(encoded)
        except TimeoutError:
            message = f"the machine had no time within {_PATIENCE_S:g} s to simulate it, which goes after all else"
            raise Unavailable(f"{message}; try again when there is less to do", _RETRY_S) from None
        finally:
            self._asked -= 1
            if viewer is not None:
                self._asking.discard(viewer.name)

    async def _answer(self, question: bytes) -> WhatIfAnswer:
        pipe = asyncio.subprocess.PIPE
        command = (sys.executable, "-P", "-m", self._module)
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=pipe, stdout=pipe, stderr=pipe, env=worker_environment()
            )
        except OSError as error:
            raise Unavailable(f"no process for a simulation can be started: {error.strerror}", _RETRY_S) from None
        try:
            found, said = await process.communicate(question)
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode == 0:
            return msgspec.msgpack.decode(found, type=WhatIfAnswer)
        if process.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
            raise Unavailable("simulating this traffic takes more processor time than it may", _RETRY_S)
        log.warning("a simulation failed with status %s: %s", process.returncode, clip(said.decode(errors="replace")))
        raise Unavailable("the simulation failed, which the server's log says more of", _RETRY_S)


def _too_many(message: str) -> ApiError:
    return try_later(message, "too_many_simulations", _RETRY_S)


def _made(make: Callable[[], Question]) -> tuple[Question, bytes]:
    question = make()
    return question, msgspec.msgpack.encode(question)

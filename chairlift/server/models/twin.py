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
from chairlift.server.http.api_errors import ApiError

log = logging.getLogger(__name__)

Question = SequenceQuestion | ItemQuestion

_MODULE = "chairlift.plan.what_if_process"
# Questions that may wait for the one that is being answered, this included; and seconds that an answer may take.
MOST_ASKED = 4
_PATIENCE_S = 55.0
_RETRY_S = 5


class Twin:
    """Answers one question at a time, each in a process of its own. All calls belong to one event loop."""

    def __init__(self, module: str = _MODULE) -> None:
        self._module = module
        self._turn = asyncio.Lock()
        self._asked = 0

    async def ask(self, make: Callable[[], Question]) -> tuple[Question, WhatIfAnswer]:
        """Answer a question, which is made in a thread once it is its turn, or be cancelled at any moment.

        Raises what `make` does, ApiError (429) where too many ask, and Unavailable where the machine has no time.
        """
        if self._asked >= MOST_ASKED:
            message = f"{MOST_ASKED} simulations are asked for already, which is the limit; try again"
            retry = {"Retry-After": str(_RETRY_S)}
            raise ApiError(429, message, code="too_many_simulations", kind="rate_limit_exceeded", headers=retry)
        self._asked += 1
        try:
            async with asyncio.timeout(_PATIENCE_S), self._turn:
                question, encoded = await asyncio.to_thread(_made, make)
                return question, await self._answer(encoded)
        except TimeoutError:
            message = f"the machine had no time within {_PATIENCE_S:g} s to simulate it, which goes after all else"
            raise Unavailable(f"{message}; try again when there is less to do", _RETRY_S) from None
        finally:
            self._asked -= 1

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


def _made(make: Callable[[], Question]) -> tuple[Question, bytes]:
    question = make()
    return question, msgspec.msgpack.encode(question)

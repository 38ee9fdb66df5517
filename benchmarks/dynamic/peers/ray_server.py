"""Ray Serve, POST /: python ray_server.py, in an environment with ray[serve]."""

import asyncio
import signal
from typing import Any

from ray import serve
from settings import ALPHA_MS, BETA_MS, MAX_WAITING, MOST, PORT, WAIT_MS, sleep
from starlette.requests import Request


# One replica, which takes in as many as there are: the batches are its own.
@serve.deployment(max_ongoing_requests=MAX_WAITING or 100_000, max_queued_requests=0 if MAX_WAITING else -1)
class Sleep:
    """Sleeps, and gives the sum of each item."""

    @serve.batch(max_batch_size=MOST, batch_wait_timeout_s=WAIT_MS / 1000)
    async def compute(self, items: list[Any]) -> list[Any]:
        """Compute one batch, in a thread, so that others come in meanwhile."""
        await asyncio.to_thread(sleep, ALPHA_MS, BETA_MS, len(items))
        return [sum(item) for item in items]

    async def __call__(self, request: Request) -> Any:
        """Answer one request; a GET asks whether it is there."""
        if request.method == "GET":
            return {}
        return {"y": await self.compute((await request.json())["x"])}


if __name__ == "__main__":
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    serve.run(Sleep.bind())
    signal.pause()

"""Parts of results as they come: server-sent events, or a JSON document a line."""

import contextlib
from collections.abc import AsyncGenerator
from typing import ClassVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from chairlift.server.http.api_errors import as_api_error, oip_shape
from chairlift.server.http.endpoint import until_gone
from chairlift.server.openai.streaming import DONE, one_line


class PartStream(Response):
    """An answer in parts. An error before the first is an ordinary HTTP error; later, it is the last part."""

    # What goes before and after each part, and at the end.
    KINDS: ClassVar = {"text/event-stream": (b"data: ", b"\n\n", DONE), "application/x-ndjson": (b"", b"\n", b"")}

    def __init__(self, kind: str, parts: AsyncGenerator[bytes, None]) -> None:
        self._parts = parts
        self._before, self._after, self._end = self.KINDS[kind]
        super().__init__(None, 200, {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}, kind)
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send parts until the last one, or until the client is gone."""
        start = {"type": "http.response.start", "status": 200, "headers": self.raw_headers}
        started = False
        try:
            async with until_gone(receive), contextlib.aclosing(self._parts) as parts:
                async for part in parts:
                    if not started:
                        started = True
                        await send(start)
                    await self._send(send, self._before + one_line(part) + self._after)
        except Exception as error:
            refusal = as_api_error(error)
            if not started:
                await refusal.response(oip_shape)(scope, receive, send)
                return
            await self._send(send, self._before + oip_shape(refusal)[1] + self._after)
        else:
            if not started:
                await send(start)
            await self._send(send, self._end)
        await send({"type": "http.response.body", "body": b""})

    async def _send(self, send: Send, chunk: bytes) -> None:
        await send({"type": "http.response.body", "body": chunk, "more_body": True})

"""A response that begins, and is answered in the background."""

import asyncio
import contextlib
from typing import NamedTuple

import msgspec

from chairlift.errors import DeadlineExceeded
from chairlift.server.conversations.conversation import OpenConversation
from chairlift.server.http.api_errors import ApiError, as_api_error
from chairlift.server.http.tenants import Tenant
from chairlift.server.models.sequence_service import Sample, SequenceService
from chairlift.server.responses.event_log import EventLog
from chairlift.server.responses.response_answer import ResponseAnswer, ResponseDocument, encode_document
from chairlift.server.responses.response_body import ResponseItem
from chairlift.server.responses.response_store import ResponseStore, StoredResponse


class NewResponse(NamedTuple):
    """A response that begins, for a tenant."""

    service: SequenceService
    sample: Sample
    opened: OpenConversation
    about: ResponseDocument
    items: list[ResponseItem]
    store: ResponseStore
    tenant: Tenant | None

    def stored(self, document: bytes) -> StoredResponse:
        """It with this document, as it is kept."""
        previous, given = self.about["previous_response_id"], msgspec.json.encode(self.items)
        return StoredResponse(self.about["id"], previous, given, document)

    def keep(self, document: bytes) -> None:
        """Keep it with this document."""
        self.store.put(self.tenant, self.stored(document))

    def begin(self, stack: contextlib.ExitStack) -> EventLog:
        """Have it answered in the background; its events. The stack is closed when that is over. Raises a 413."""
        store, tenant, stored = self.store, self.tenant, self.stored(encode_document(self.about))
        stored.log = EventLog()

        def keep(document: bytes) -> None:
            stored.task = None
            store.change(tenant, stored, document)

        answer = ResponseAnswer(self.service, self.about, self.sample, self.opened, keep)
        stack.callback(answer.close)
        stack.callback(stored.log.end)
        if not store.put(tenant, stored):
            stack.close()
            limits = "max_stored_responses, max_stored_bytes"
            message = f"there is no room to keep this response, as background needs ({limits})"
            raise ApiError(413, message, "background", "response_too_large")
        stored.task = asyncio.create_task(self._run(answer, stored))
        stored.task.add_done_callback(lambda _: stack.close())
        store.note(tenant, stored, answer.queued())
        return stored.log

    async def _run(self, answer: ResponseAnswer, stored: StoredResponse) -> None:
        store, tenant, queued = self.store, self.tenant, stored.document
        seconds = self.service.config.background_timeout_s
        try:
            async with asyncio.timeout(seconds), contextlib.aclosing(answer.events()) as groups:
                async for events in groups:
                    if stored.document == queued:
                        store.change(tenant, stored, encode_document(answer.document("in_progress")))
                    store.note(tenant, stored, events)
        except Exception as error:
            late = DeadlineExceeded(f"it took more than {seconds:g} s (background_timeout_s)")
            failure = as_api_error(late if isinstance(error, TimeoutError) else error)
            store.note(tenant, stored, [answer.last(failure)])
        await store.pack(tenant, stored)

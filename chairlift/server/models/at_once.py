"""What comes for a stream before its end, written at once: the task that reads the stream is not woken for it."""

from collections.abc import Callable, Sequence

from chairlift.engine.sequences.client import AtOnce
from chairlift.engine.sequences.messages import SequenceUpdate
from chairlift.server.http.part_writer import PartWriter
from chairlift.server.models.sequence_service import Piece, Sample


def at_once(
    samples: Sequence[Sample], writer: PartWriter | None, render: Callable[[list[Piece]], bytes]
) -> AtOnce | None:
    """Have what a step adds to the only sample rendered and written, if its connection takes it then.

    None where that can't be: an answer of several samples has one part for each step, and a stop string, which is found
    while text is made of tokens, may end a sample with any of them.
    """
    if writer is None or len(samples) != 1 or samples[0].stream.request.params.stop_strings:
        return None
    (sample,) = samples

    def write(updates: Sequence[SequenceUpdate]) -> bool:
        if not writer.is_ready:
            return False
        if part := render([piece for update in updates if (piece := sample.take(update)) is not None]):
            writer.write(part)
        return True

    return write

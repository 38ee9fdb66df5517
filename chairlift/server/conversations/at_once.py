"""What comes for a stream before its end, written at once: the task that reads the stream is not woken for it."""

from collections.abc import Callable, Sequence

from chairlift.engine.sequences.client import AtOnce
from chairlift.engine.sequences.messages import SequenceUpdate
from chairlift.server.http.exchange import encode_line
from chairlift.server.http.part_writer import PartWriter
from chairlift.server.models.sequence_service import Piece, Sample


def at_once(
    samples: Sequence[Sample],
    writer: PartWriter | None,
    render: Callable[[list[Piece]], bytes],
    around: tuple[bytes, bytes] | None = None,
) -> AtOnce | None:
    """Have what a step adds to the only sample rendered and written, if its connection takes it then.

    `around` is what stands before and behind a string of JSON where a part that is nothing but text has nothing else;
    most are, and then not even a Piece is made. None where nothing can be written at once: an answer of several samples
    has one part for each step, and a stop string, which is found while text is made of tokens, may end a sample with
    any of them.
    """
    if writer is None or len(samples) != 1 or samples[0].stream.request.params.stop_strings:
        return None
    (sample,) = samples
    before, after = around or (b"", b"")

    def write(update: SequenceUpdate) -> bool:
        if not writer.is_ready:
            return False
        if around is not None and (text := sample.take_text(update)) is not None:
            if text:
                writer.write(before, encode_line(text), after)
        elif (piece := sample.take(update)) is not None and (part := render([piece])):
            writer.write(part)
        return True

    return write

"""Which lines of an input are done. Pure: no files, no clock."""

from collections.abc import Iterable

_HEAD = 8


class Progress:
    """All lines up to `watermark`, and a few beyond it. Lines count from 1; 0 is the watermark of a job just begun."""

    def __init__(self, watermark: int = 0, beyond: Iterable[int] = ()) -> None:
        self.watermark = watermark
        self._beyond = set(beyond)
        self._advance()

    def __contains__(self, number: int) -> bool:
        return number <= self.watermark or number in self._beyond

    def finish(self, number: int) -> None:
        """Note that a line is done. Raises ValueError if it was already: no line may have two results."""
        if number in self:
            raise ValueError(f"line {number} is done already")
        self._beyond.add(number)
        if number == self.watermark + 1:
            self._advance()

    def _advance(self) -> None:
        while self.watermark + 1 in self._beyond:
            self.watermark += 1
            self._beyond.remove(self.watermark)

    def to_bytes(self) -> bytes:
        """The watermark in 8 bytes, and a bit for each line after it up to the last that is done."""
        bits = bytearray((max(self._beyond, default=self.watermark) - self.watermark + 7) // 8)
        for number in self._beyond:
            place = number - self.watermark - 1
            bits[place >> 3] |= 1 << (place & 7)
        return self.watermark.to_bytes(_HEAD, "little") + bytes(bits)

    @classmethod
    def from_bytes(cls, raw: bytes) -> "Progress":
        """What `to_bytes` made. Raises ValueError for anything shorter than a watermark."""
        if len(raw) < _HEAD:
            raise ValueError(f"progress has at least {_HEAD} bytes, got {len(raw)}")
        watermark = int.from_bytes(raw[:_HEAD], "little")
        bits = raw[_HEAD:]
        beyond = (watermark + 1 + place for place in range(len(bits) * 8) if bits[place >> 3] >> (place & 7) & 1)
        return cls(watermark, beyond)

"""Models that a worker process runs: well-behaved, and every way in which they are not."""

import asyncio
import functools
import os
import re
import subprocess
import time
from pathlib import Path
from typing import Any

import numpy as np

from chairlift import BadItem
from chairlift.errors import ConfigError


class HasNoText(RuntimeError):
    def __str__(self) -> str:
        raise ValueError("no text")


class Doubles:
    """Twice each number, or array; strings say what to do instead."""

    def __init__(self, most: int = 1000) -> None:
        self.most = most
        self.calls = 0

    def preprocess(self, item: Any) -> Any:
        if item == "own error":
            raise ValueError("mine alone")
        if item == "refused":
            raise BadItem("a number is wanted")
        if item == "no utf-8":
            raise FileNotFoundError("a\udc80b")
        if item == "refused in no utf-8":
            raise BadItem("a\udc80b")
        if item == "no text":
            raise HasNoText
        return item

    def predict(self, batch: list[Any]) -> list[Any]:
        self.calls += 1
        if len(batch) > self.most:
            raise MemoryError(f"{len(batch)} is more than {self.most}")
        return [self._one(item) for item in batch]

    def _one(self, item: Any) -> Any:
        match item:
            case "poison":
                raise RuntimeError("poisoned")
            case "no utf-8 late":
                raise FileNotFoundError("a\udc80b")
            case "no text late":
                raise HasNoText
            case "refused late":
                raise BadItem("a number was wanted")
            case "hang":
                time.sleep(1000)
            case "hang alone":
                re.match("(a+)+$", "a" * 60 + "b")
            case "exit":
                os._exit(3)
            case "pid":
                return os.getpid()
            case "calls":
                return self.calls
            case "stdin":
                return input()
            case "child":
                return subprocess.Popen(["sleep", "1000"]).pid
            case "odd":
                return {1j}
            case "deep":
                return functools.reduce(lambda inner, _: [inner], range(500), [])
            case "as deep as may be":
                return functools.reduce(lambda inner, _: [inner], range(95), [])
            case "threads":
                return os.environ.get("OMP_NUM_THREADS")
        values = item.values() if isinstance(item, dict) else [item]
        if any(isinstance(value, int) and abs(value) > 2**62 for value in values):
            raise BadItem("twice that is more than 64 bits hold")
        try:
            return {name: value * 2 for name, value in item.items()} if isinstance(item, dict) else item * 2
        except TypeError as error:
            raise BadItem(f"it can't be doubled: {error}") from None


class Slow:
    """A few milliseconds a call, so that there is a call to be killed in."""

    def predict(self, batch: list[int]) -> list[int]:
        time.sleep(0.005)
        return [item + 1 for item in batch]


class Counts:
    """Streams the numbers below each item; a negative one breaks or dies after so many, and when a file is there."""

    def __init__(self, until: str = "/") -> None:
        self.until = Path(until)

    def preprocess(self, item: Any) -> Any:
        if not (isinstance(item, int) and abs(item) <= 10_000):
            raise BadItem("a count is a whole number up to 10,000")
        return item

    async def predict(self, batch: list[int]) -> Any:
        buffer = np.zeros(3000, np.int64)
        for number in range(max(map(abs, batch))):
            await asyncio.sleep(0)
            if -number in batch and number:
                if number == 3:
                    while not self.until.exists():
                        await asyncio.sleep(0.001)
                    os._exit(3)
                raise RuntimeError("broke")
            buffer[:] = number
            yield [buffer if number < abs(item) else None for item in batch]


class Endless:
    """Streams for ever to "on", how many were closed before their end; to others one or two numbers.

    The second part of "odd" can't be sent.
    """

    def __init__(self) -> None:
        self.closed = 0

    def predict(self, batch: list[str]) -> Any:
        try:
            number = 0
            while "on" in batch or number < 2 - ("once" in batch):
                yield [{1j} if item == "odd" and number else self.closed if item == "on" else number for item in batch]
                number += 1
        except GeneratorExit:
            self.closed += 1
            raise


class CannotLoad:
    def load(self) -> None:
        raise OSError("no weights here")

    def predict(self, batch: list[Any]) -> list[Any]:
        return batch


class CannotLoadByName(CannotLoad):
    def load(self) -> None:
        raise FileNotFoundError("a\udc80b")


class CannotBeSo(CannotLoad):
    def load(self) -> None:
        raise ConfigError("a\udc80b")


class HasNoTextToLoad(CannotLoad):
    def load(self) -> None:
        raise HasNoText


class Exits(CannotLoad):
    def load(self) -> None:
        raise SystemExit("the model's own idea")


class DiesLoading(CannotLoad):
    def load(self) -> None:
        os._exit(5)


class Spoilt:
    """Loads unless there is a file, which asking for it makes before the worker dies."""

    def __init__(self, file: str) -> None:
        self.file = Path(file)

    def load(self) -> None:
        if self.file.exists():
            raise OSError("spoilt")

    def predict(self, batch: list[Any]) -> list[Any]:
        if "spoil" in batch:
            self.file.touch()
            os._exit(3)
        return batch


class Warm:
    """Runs out of memory above 4, which warming up finds; says which sizes it saw."""

    max_batch_size = 16

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def example(self) -> int:
        return 1

    def predict(self, batch: list[int]) -> list[Any]:
        self.sizes.append(len(batch))
        if len(batch) > 4:
            raise MemoryError
        return [list(self.sizes) for _ in batch]

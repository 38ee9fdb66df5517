"""Texts of others in a terminal and in a log: they are shown, and nothing obeys them."""

import io
import logging
from typing import Any

import pytest

from chairlift.commands.terminal import ChatEndpoint, Talk
from chairlift.logs import ShortFormatter


def test_a_terminal_obeys_no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [{"reasoning": "\x1b[2Jhm"}, {"content": "a\tb\r\n\x1b]52;c;eA==\x07\x9b31m \u3000é\u200d"}]
    monkeypatch.setattr(ChatEndpoint, "stream", lambda self, body: (each for each in texts))
    lines = iter(["x"])

    def read(prompt: str) -> str:
        for line in lines:
            return line
        raise EOFError

    monkeypatch.setattr("builtins.input", read)
    out = io.StringIO()
    Talk(ChatEndpoint.at("http://x", None), {}, None, out, True).run()
    assert out.getvalue().endswith("\033[2m[2Jhm\033[0ma\tb\n]52;c;eA==31m \u3000é\u200d\n")


def test_a_message_is_one_line_of_the_log() -> None:
    formatter = ShortFormatter("%(levelname)s %(message)s")

    def made(text: str, **more: Any) -> str:
        record = logging.LogRecord("a", logging.WARNING, "a.py", 1, "refused: %s", (text,), None)
        record.__dict__.update(more)
        return formatter.format(record)

    assert made("x\r\nERROR all is lost\x1b[2J\x9b") == r"WARNING refused: x\r\nERROR all is lost\x1b[2J\x9b"
    assert made("é\u3000\\n") == "WARNING refused: é\u3000\\n"
    assert made("x\n", exc_text="Traceback:\n  a") == "WARNING refused: x\nTraceback:\n  a"
    assert len(made("\x1b" * 2000)) < 1300

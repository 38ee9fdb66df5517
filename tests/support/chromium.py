"""A headless Chromium that does what a person does, told by the DevTools protocol over a pipe."""

import base64
import fcntl
import json
import os
import queue
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
# Where Chromium reads commands and writes what it says; ours must lie above, to be moved there.
_READS, _WRITES, _ABOVE = 3, 4, 10
_PATIENCE_S = 120.0
_KEYS = {"Enter": ("\r", 13), "Escape": ("", 27), "ArrowLeft": ("", 37), "ArrowRight": ("", 39)}


class Browser:
    """One page in a browser of its own. `requests` are the URLs that it asked for, `errors` what its console says."""

    def __init__(self, profile: Path, width: int = 1200, height: int = 1000) -> None:
        assert CHROMIUM is not None
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, _ABOVE) for end in (*os.pipe(), *os.pipe())]
        reads, self._to, self._from, writes = ends
        self.process = subprocess.Popen(
            [CHROMIUM, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=(_READS, _WRITES),
            preexec_fn=lambda: (os.dup2(reads, _READS), os.dup2(writes, _WRITES)),
        )
        os.close(reads)
        os.close(writes)
        self.requests: list[str] = []
        self.errors: list[str] = []
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue()
        self._serial = 0
        self._session: str | None = None
        threading.Thread(target=self._listen, daemon=True).start()
        target = next(each for each in self.call("Target.getTargets")["targetInfos"] if each["type"] == "page")
        attached = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.resize(width, height)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)
        os.close(self._to)

    def _listen(self) -> None:
        text = b""
        with os.fdopen(self._from, "rb", buffering=0) as incoming:
            while more := incoming.read(2**20):
                *messages, text = (text + more).split(b"\0")
                for message in map(json.loads, messages):
                    self._take(message)

    def _take(self, message: dict[str, Any]) -> None:
        about = message.get("params", {})
        match message.get("method"):
            case None:
                self._answers.put(message)
            case "Network.requestWillBeSent":
                self.requests.append(about["request"]["url"])
            case "Runtime.exceptionThrown":
                self.errors.append(json.dumps(about["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if about["type"] in ("error", "assert"):
                self.errors.append(json.dumps(about["args"]))
            case "Log.entryAdded" if about["entry"]["level"] == "error":
                self.errors.append(f"{about['entry']['text']} {about['entry'].get('url', '')}")

    def call(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Send a command, and return what it gives."""
        self._serial += 1
        message = {"id": self._serial, "method": method, "params": arguments}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        answer = self._answers.get(timeout=_PATIENCE_S)
        assert answer["id"] == self._serial
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def open(self, url: str) -> None:
        """Go there."""
        self.call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """What an expression gives on the page."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, (expression, found)
        return found["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until an expression is true."""
        deadline = time.monotonic() + _PATIENCE_S
        while not self.evaluate(f"!!({expression})"):
            assert time.monotonic() < deadline, (expression, self.evaluate("document.body.innerText"), self.errors)
            time.sleep(0.05)

    def text(self, selector: str) -> str:
        """The text of an element, as it is seen."""
        found: str = self.evaluate(f"document.querySelector({json.dumps(selector)}).innerText")
        return found

    def place(self, selector: str, across: float = 0.5, down: float = 0.5) -> tuple[float, float]:
        """A point of an element that is brought into view, as shares of its width and height."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.until(f"{found}?.getClientRects().length")
        self.evaluate(f"{found}.scrollIntoView({{block: 'center'}})")
        left, top, width, height = self.evaluate(
            f"(({{left, top, width, height}}) => [left, top, width, height])({found}.getBoundingClientRect())"
        )
        return left + across * width, top + down * height

    def move(self, x: float, y: float) -> None:
        """Move the mouse."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str, across: float = 0.5, down: float = 0.5) -> None:
        """Click on an element."""
        x, y = self.place(selector, across, down)
        self.move(x, y)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def write(self, selector: str, text: str) -> None:
        """Replace what a field holds."""
        found = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(f"{found}.focus(); {found}.select()")
        self.call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        """Press a key."""
        text, code = _KEYS[key]
        about: Mapping[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", text=text, **about)
        self.call("Input.dispatchKeyEvent", type="keyUp", **about)

    def resize(self, width: int, height: int, scheme: str = "light") -> None:
        """Another window, in light or dark."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def screenshot(self, clip: Mapping[str, float] = MappingProxyType({})) -> bytes:
        """The window as PNG, or a part of the page."""
        more = {"clip": {**clip, "scale": 1}, "captureBeyondViewport": True} if clip else {}
        return base64.b64decode(self.call("Page.captureScreenshot", format="png", **more)["data"])

"""The picture of the live page in docs/: python scripts/live_page.py (needs Chromium)

Starts the demo server with 16 slots, sends it short and long chats for a minute, and takes a picture of the page.
"""

import argparse
import json
import random
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.chromium import Browser  # noqa: E402
from support.processes import ServerProcess  # noqa: E402

QUESTIONS = ("What is continuous batching?", "What is a KV cache?", "Why do requests wait?", "What is a slot?")
PEOPLE, SLOTS = 28, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "live-page.png")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long it is under load before the picture")
    args = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        ServerProcess("--max-num-seqs", str(SLOTS), "--data-dir", "") as server,
    ):
        while not is_ready(server.url):
            time.sleep(0.1)
        over = threading.Event()
        people = [threading.Thread(target=talk, args=(server.url, seed, over)) for seed in range(PEOPLE)]
        for each in people:
            each.start()
        with Browser(Path(folder), 1200, 900) as browser:
            browser.open(f"{server.url}/")
            browser.until(
                "document.querySelector('.panel .uplot') && document.querySelector('#status').innerText === 'live'"
            )
            time.sleep(args.seconds)
            height = browser.evaluate("Math.ceil(document.querySelector('main').getBoundingClientRect().bottom)")
            args.out.write_bytes(browser.screenshot({"x": 0, "y": 0, "width": 1200, "height": height}))
        over.set()
        for each in people:
            each.join()
    print(args.out)


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError:
        return False


def talk(url: str, seed: int, over: threading.Event) -> None:
    """Chat until it is over, with answers of exponential length."""
    dice = random.Random(seed)
    while not over.wait(dice.expovariate(4)):
        length = 1 + min(int(dice.expovariate(1 / 60)), 400)
        messages = [{"role": "user", "content": dice.choice(QUESTIONS)}]
        body = {"messages": messages, "max_tokens": length, "ignore_eos": True, "stream": True}
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=300) as answer:
            answer.read()


if __name__ == "__main__":
    main()

"""The live page of a real server under load, in a real browser: every part of it, used as a person does."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from support.chromium import CHROMIUM, Browser
from support.key_files import bearer, key_of, write_keys
from support.serve_process import WORKER_MODELS, Server

from chairlift.demo import demo_path

pytestmark = [pytest.mark.processes, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]
SETTINGS = """
data_dir = "data"
[models.demo]
model = "{demo}"
kv_cache_gb = 0.05
num_threads = 1
max_num_seqs = 2
[models.doubles]
model = "{python}:Doubles"
"""
WRITTEN = {"messages": [{"role": "user", "content": "What is batching?"}], "max_tokens": 60, "model": "demo"}
# Slower than anybody who watches, and never done within the test.
JOB = {"custom_id": "", "method": "POST", "url": "/v1/chat/completions", "body": {**WRITTEN, "max_tokens": 300}}
SCHEMA = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}},
    "required": ["sure"],
    "additionalProperties": False,
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    settings = tmp_path / "models.toml"
    settings.write_text(SETTINGS.format(demo=demo_path(), python=WORKER_MODELS))
    keys = write_keys(tmp_path / "keys.toml", alice={"rights": ["infer"], "requests_at_once": 50}, root={})
    with Server(str(settings), "--api-keys", str(keys), key=key_of("root")) as it:
        it.wait_ready()
        yield it


@pytest.fixture
def load(server: Server) -> Iterator[None]:
    """Four people who always wait for an answer, which is more than there are slots, and a batch."""
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=WRITTEN, headers=bearer("alice"), timeout=300)
            assert answer.status_code == 200, answer.text

    lines = "\n".join(json.dumps(JOB | {"custom_id": str(number)}) for number in range(300))
    file = server.openai.files.create(file=("in.jsonl", lines.encode()), purpose="batch")
    batch = server.openai.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask) for _ in range(4)]
        yield
        over.set()
        for each in asking:
            each.result()
    server.openai.batches.cancel(batch.id)


def come_in(browser: Browser, server: Server) -> None:
    """With a key, which the page asks for."""
    browser.open(f"{server.url}/")
    browser.until("document.querySelector('#notice') && !document.querySelector('#notice').hidden")
    assert "asks for a key" in browser.text("#notice-text")
    assert all("401" in error and "v1/live" in error for error in browser.errors), browser.errors
    browser.write("#key", key_of("alice"))
    browser.press("Enter")
    browser.until("document.querySelector('#notice-text').innerText.includes(\"right 'admin'\")")
    browser.write("#key", key_of("root"))
    browser.press("Enter")
    browser.until("document.querySelector('#status').innerText === 'live'")
    browser.errors.clear()


def see_slots(browser: Browser) -> None:
    browser.until("document.querySelectorAll('canvas.slots').length === 2")
    browser.until("document.querySelector('.panel .queue').innerText.includes('every place to run is taken')")
    browser.until("document.querySelector('.panel').innerText.match(/KV memory: \\d+% in use/)")
    browser.until("document.querySelectorAll('.panel .uplot').length === 9")
    # The right end is the present, at which somebody runs in every slot.
    deadline = time.monotonic() + 120
    while "slot 1: chatcmpl-" not in browser.text("#bar-text"):
        assert time.monotonic() < deadline, browser.text("#bar-text")
        browser.move(*browser.place("canvas.slots", 0.99 if time.monotonic() % 0.2 < 0.1 else 0.98, 0.2))
        time.sleep(0.05)
    browser.click("canvas.slots", 0.985, 0.2)
    browser.until("document.querySelectorAll('#request .fall').length >= 2")
    assert "of them cached" in browser.text("#request")
    browser.click("#request form button")
    browser.until("!document.querySelector('#request').open")
    browser.evaluate("document.querySelector('canvas.slots').focus()")
    browser.press("ArrowLeft")
    browser.press("ArrowLeft")
    browser.press("Enter")
    browser.until("document.querySelector('#request').open")
    browser.press("Escape")
    browser.until("!document.querySelector('#request').open")


def see_forecast(browser: Browser) -> None:
    """Open the sliders of the first model, and move one by the keyboard."""
    browser.click(".panel .whatif > summary")
    browser.until(
        "document.querySelector('.whatif td') && document.querySelector('.whatif').innerText.includes('by the twin')"
    )
    assert "with these settings" not in browser.text(".whatif")
    shown = "document.querySelector('.whatif').innerText"
    browser.evaluate("document.querySelector('.whatif [data-setting=max_num_seqs]').focus()")
    browser.press("ArrowRight")
    browser.press("ArrowRight")
    slider = "document.querySelector('.whatif [data-setting=max_num_seqs]')"
    assert browser.evaluate(f"{slider}.getAttribute('aria-valuetext')") == "8"
    browser.until(f"{shown}.includes('with these settings') && {shown}.includes('max_num_seqs = 8')")
    assert "--max-num-seqs 8" in browser.text(".whatif")
    assert browser.evaluate("document.querySelector('.whatif [data-setting=batch_size]').closest('label').hidden")
    browser.evaluate(
        "{ const choice = document.querySelector('.whatif select'); choice.value = 'static'; choice.onchange(); }"
    )
    browser.until(f"{shown}.includes('strategy = \"static\"')")
    assert browser.evaluate(f"{slider}.closest('label').hidden"), "what the strategy does not read"


def apply_settings(browser: Browser) -> None:
    """What takes loading it again can't be applied; fewer slots hold from then on."""
    shown = "document.querySelector('.whatif').innerText"
    assert browser.evaluate("document.querySelector('.whatif .apply')") is None
    browser.evaluate(
        "{ const choice = document.querySelector('.whatif select'); choice.value = 'continuous'; choice.onchange(); }"
    )
    browser.evaluate("document.querySelector('.whatif [data-setting=max_num_seqs]').focus()")
    for _ in range(3):
        browser.press("ArrowLeft")
    browser.until(f"{shown}.includes('max_num_seqs = 1') && document.querySelector('.whatif .apply')")
    browser.click(".whatif .apply")
    browser.until(f"{shown}.includes('hold from now on')")


def ask_what_if(browser: Browser) -> None:
    """Of a request that ended, what would have made it faster."""
    browser.evaluate("document.querySelector('canvas.slots').focus()")
    browser.press("ArrowLeft")
    browser.press("Enter")
    browser.until("document.querySelector('#request').open && document.querySelector('#request-parts button')")
    browser.click("#request-parts button")
    browser.until("document.querySelector('#request-parts').innerText.includes('the twin takes')")
    browser.press("Escape")


def test_sliders_show_a_forecast_and_change_nothing_until_it_is_applied(server: Server, tmp_path: Path) -> None:
    with ThreadPoolExecutor(6) as pool:
        asked = [
            pool.submit(
                httpx.post, f"{server.url}/v1/chat/completions", json=WRITTEN, headers=bearer("alice"), timeout=300
            )
            for _ in range(24)
        ]
        assert [each.result().status_code for each in asked] == [200] * 24
    before = server.http.get("/v1/models/demo").json()["settings"]
    with Browser(tmp_path / "profile") as browser:
        come_in(browser, server)
        see_forecast(browser)
        assert server.http.get("/v1/models/demo").json()["settings"] == before
        apply_settings(browser)
        assert server.http.get("/v1/models/demo").json()["settings"] == before | {"max_num_seqs": 1}
        ask_what_if(browser)
        browser.resize(360, 800)
        browser.until("document.documentElement.scrollWidth <= 360")
        assert browser.errors == []
        assert {url.split("?")[0] for url in browser.requests if not url.startswith(server.url)} <= {"about:blank"}


def change_models(browser: Browser) -> None:
    browser.click("button[aria-label='Unload doubles']")
    browser.until("document.querySelector(\"button[aria-label='Really unload doubles']\")")
    browser.click("button[aria-label='Really unload doubles']")
    browser.until("document.querySelector(\"button[aria-label='Load doubles']\")")
    browser.until("document.querySelectorAll('.panel').length === 1")
    browser.until("!document.querySelector(\"button[aria-label='Load doubles']\").disabled")
    browser.click("button[aria-label='Load doubles']")
    browser.until("document.querySelectorAll('.panel').length === 2")
    browser.until("document.querySelector(\"button[aria-label='Unload doubles']:enabled\")")


def see_tenants_and_jobs(browser: Browser) -> None:
    assert "50 requests at once" in browser.text("#tenants")
    browser.until(
        "[...document.querySelectorAll('#tenants tbody tr')].some((row) => "
        "row.children[0].innerText === 'alice' && row.children[3].innerText !== '0')"
    )
    browser.until("document.querySelector('#jobs progress')?.max === 300")
    assert "in_progress" in browser.text("#jobs")


def chat(browser: Browser) -> None:
    browser.click("#tab-chat")
    browser.until("document.querySelector('#chat-model').value === 'demo'")
    browser.click("#chat-logprobs")
    browser.write("#chat-system", "You answer in few words.")
    browser.write("#chat-tokens", "40")
    browser.write("#chat-say", "What is <b>continuous</b> batching?")
    browser.evaluate(
        "window.sizes = new Set(); new MutationObserver(() => window.sizes.add("
        "document.querySelectorAll('.token').length)).observe(document.querySelector('#chat-log'), "
        "{childList: true, subtree: true})"
    )
    browser.press("Enter")
    browser.until("document.querySelector('.assistant .link')")
    assert browser.evaluate("window.sizes.size") > 3, "it comes bit by bit"
    assert "<b>continuous</b>" in browser.text(".user"), "text stays text"
    assert "tokens in" in browser.text(".assistant .quiet")
    browser.move(*browser.place(".token"))
    browser.until("document.querySelector('#probabilities').innerText.includes('%')")
    browser.click(".assistant .link")
    browser.until("document.querySelectorAll('#request .fall').length >= 2")
    browser.press("Escape")
    answer_in_a_form(browser)


def answer_in_a_form(browser: Browser) -> None:
    browser.click("#chat-clear")
    browser.click("#chat details summary")
    browser.write("#chat-schema", "{")
    browser.write("#chat-say", "Are you sure?")
    browser.press("Enter")
    browser.until("document.querySelector('#chat-log')?.innerText.includes('The JSON schema is no JSON')")
    browser.write("#chat-schema", json.dumps(SCHEMA))
    browser.click("#chat-send")
    browser.until("document.querySelector('.assistant .link')")
    assert set(json.loads(browser.text(".assistant > .text"))) == {"sure"}


def test_the_page_shows_all_and_all_of_it_works(server: Server, load: None, tmp_path: Path) -> None:
    with Browser(tmp_path / "profile") as browser:
        come_in(browser, server)
        see_slots(browser)
        see_tenants_and_jobs(browser)
        change_models(browser)
        for scheme in ("dark", "light"):
            browser.resize(360, 800, scheme)
            browser.until("document.documentElement.scrollWidth <= 360")
            chat_or_live = "#tab-live" if scheme == "dark" else "#tab-chat"
            browser.click(chat_or_live)
        browser.resize(1200, 1000)
        chat(browser)
        browser.click("#tab-live")
        browser.until("document.querySelector('#status').innerText === 'live'")
        assert browser.errors == []
        assert {url.split("?")[0] for url in browser.requests if not url.startswith(server.url)} <= {"about:blank"}
        assert any(url.endswith("/v1/live") for url in browser.requests)

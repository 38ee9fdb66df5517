"""A language model's worker is killed and stopped, over and over, while openai clients keep it busy."""

import os
import signal
import threading
import time
from collections import Counter

import openai
import pytest
from support.serve_process import Server

pytestmark = [pytest.mark.processes, pytest.mark.slow]
KILLS = int(os.environ.get("CHAIRLIFT_KILLS", "3"))
CLIENTS = 8
# On an idle machine; a busy one is waited for, so that all figures are seen.
BACK_WITHIN_S, GIVEN_UP_AFTER_S = 10.0, 60.0


class Client:
    """Asks one thing after the other, with streams and without, and notes what came of each."""

    def __init__(self, server: Server, number: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self.asked = 0
        self.over = threading.Event()
        self._openai = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
        self._streams = number % 2 == 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        self.over.set()
        self._thread.join(90)
        assert not self._thread.is_alive()
        self._openai.close()

    def _run(self) -> None:
        while not self.over.is_set():
            self.asked += 1
            try:
                outcome = self._ask()
            except openai.APIStatusError as error:
                outcome = f"refused: {error.status_code} {error.code}"
                # As its Retry-After says, though not for as long.
                time.sleep(0.25)
            except openai.APIError as error:
                outcome = f"event: {error.code}" if type(error) is openai.APIError else type(error).__name__
            self.outcomes[outcome] += 1

    def _ask(self) -> str:
        asked = {"model": "demo", "prompt": "Once there was a lift", "max_tokens": 64}
        if not self._streams:
            return f"answered: {self._openai.completions.create(**asked).choices[0].finish_reason}"
        reasons = [chunk.choices[0].finish_reason for chunk in self._openai.completions.create(**asked, stream=True)]
        return f"answered: {reasons[-1] if reasons else None}"


@pytest.mark.timeout(60 + 60 * KILLS)
def test_killed_and_stopped_in_turn_under_load() -> None:
    seconds: dict[str, list[float]] = {"SIGKILL": [], "SIGSTOP": []}
    with Server() as server:
        server.wait_ready()
        clients = [Client(server, number) for number in range(CLIENTS)]
        try:
            for round_ in range(2 * KILLS):
                _until_answered(clients)
                sign = signal.SIGSTOP if round_ % 2 else signal.SIGKILL
                began = time.monotonic()
                os.kill(server.worker(), sign)
                while server.metric("worker_restarts_total") <= round_:
                    assert time.monotonic() < began + GIVEN_UP_AFTER_S
                    time.sleep(0.02)
                server.wait_ready(GIVEN_UP_AFTER_S)
                seconds[sign.name].append(time.monotonic() - began)
        finally:
            for client in clients:
                client.end()
        outcomes = sum((client.outcomes for client in clients), Counter[str]())
        print({sign: [round(each, 1) for each in times] for sign, times in seconds.items()}, dict(outcomes))
        assert sum(outcomes.values()) == sum(client.asked for client in clients)
        expected = ("answered: stop", "answered: length", "refused: 503 worker_lost", "refused: 503 unavailable")
        assert set(outcomes) <= {*expected, "event: worker_lost"}
        assert server.metric("worker_restarts_total") == 2 * KILLS
        deadline = time.monotonic() + 10
        while any(server.metric(name) for name in ("kv_blocks_used", "requests_running", "requests_waiting")):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert server.complete(max_tokens=2).status_code == 200
        assert max(map(max, seconds.values())) <= BACK_WITHIN_S


def _until_answered(clients: list[Client]) -> None:
    """Wait until each client has been answered once more, so that a worker is lost amid its work."""
    before = [_answered(client) for client in clients]
    deadline = time.monotonic() + 60
    while any(_answered(client) <= count for client, count in zip(clients, before, strict=True)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def _answered(client: Client) -> int:
    return sum(count for outcome, count in client.outcomes.copy().items() if outcome.startswith("answered"))

"""mosec, POST /inference: python mosec_server.py, in an environment with mosec."""

import sys
from typing import Any

from mosec import Server, Worker
from settings import ALPHA_MS, BETA_MS, LIMIT_MS, MAX_WAITING, MOST, PORT, WAIT_MS, sleep


class Sleep(Worker):
    """Sleeps, and gives the sum of each item."""

    def forward(self, data: list[Any]) -> list[Any]:
        """Compute one batch."""
        sleep(ALPHA_MS, BETA_MS, len(data))
        return [{"y": sum(item["x"])} for item in data]


if __name__ == "__main__":
    sys.argv += ["--port", str(PORT)]
    if LIMIT_MS:
        sys.argv += ["--timeout", f"{LIMIT_MS:.0f}"]
    if MAX_WAITING:
        sys.argv += ["--capacity", str(MAX_WAITING)]
    server = Server()
    server.append_worker(Sleep, num=1, max_batch_size=MOST, max_wait_time=int(WAIT_MS))
    server.run()

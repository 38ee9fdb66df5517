"""LitServe, POST /predict: python litserve_server.py, in an environment with litserve."""

from typing import Any

import litserve
from settings import ALPHA_MS, BETA_MS, LIMIT_MS, MOST, PORT, WAIT_MS, sleep


class Sleep(litserve.LitAPI):
    """Sleeps, and gives the sum of each item."""

    def setup(self, device: str) -> None:
        """Nothing to load."""

    def decode_request(self, request: dict[str, Any]) -> Any:
        """The item."""
        return request["x"]

    def batch(self, inputs: list[Any]) -> list[Any]:
        """The items as they are."""
        return inputs

    def predict(self, batch: list[Any]) -> list[Any]:
        """Compute one batch."""
        sleep(ALPHA_MS, BETA_MS, len(batch))
        return [sum(item) for item in batch]

    def unbatch(self, output: list[Any]) -> list[Any]:
        """The results as they are."""
        return output

    def encode_response(self, output: Any) -> dict[str, Any]:
        """The answer."""
        return {"y": output}


if __name__ == "__main__":
    api = Sleep(max_batch_size=MOST, batch_timeout=WAIT_MS / 1000)
    limit = {"timeout": LIMIT_MS / 1000} if LIMIT_MS else {}
    server = litserve.LitServer(api, accelerator="cpu", workers_per_device=1, **limit)
    server.run(port=PORT, num_api_servers=1, generate_client_file=False, log_level="error")

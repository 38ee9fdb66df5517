"""What a client of the Files and Batches API does, over plain HTTP."""

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

OVER = ("completed", "failed", "expired", "cancelled")
FUNCTION = "/v1/models/function:predict"


def line(custom_id: str, body: dict[str, Any], url: str = FUNCTION, **more: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body} | more


def doubling(count: int) -> list[dict[str, Any]]:
    return [line(f"c{i}", {"instances": [i]}) for i in range(count)]


def jsonl(lines: Iterable[Any]) -> bytes:
    return "".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines).encode()


def check_doubled(raw: bytes, numbers: Iterable[int]) -> None:
    """Each line has exactly one result, and the right one."""
    found = [json.loads(each) for each in raw.splitlines()]
    assert raw.endswith(b"\n")
    assert sorted(each["custom_id"] for each in found) == sorted(f"c{i}" for i in numbers)
    for each in found:
        assert each["response"]["body"] == {"predictions": [int(each["custom_id"][1:]) * 2]}


class Client:
    def __init__(self, url: str, key: str | None = None) -> None:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.http = httpx.Client(base_url=f"{url}/v1", headers=headers, timeout=30)

    def upload(self, lines: Iterable[Any] | bytes, filename: str = "in.jsonl", **fields: Any) -> httpx.Response:
        raw = lines if isinstance(lines, bytes) else jsonl(lines)
        return self.http.post("/files", data={"purpose": "batch"} | fields, files={"file": (filename, raw)})

    def create(self, file_id: str, endpoint: str = FUNCTION, window: str = "24h", **fields: Any) -> httpx.Response:
        body = {"input_file_id": file_id, "endpoint": endpoint, "completion_window": window} | fields
        return self.http.post("/batches", json=body)

    def begin(self, lines: Iterable[Any] | bytes, endpoint: str = FUNCTION, **fields: Any) -> dict[str, Any]:
        created = self.create(self.upload(lines).json()["id"], endpoint, **fields)
        assert created.status_code == 200, created.text
        batch: dict[str, Any] = created.json()
        assert batch["status"] == "validating"
        return batch

    def batch(self, batch_id: str) -> dict[str, Any]:
        batch: dict[str, Any] = self.http.get(f"/batches/{batch_id}").json()
        return batch

    def wait(self, batch_id: str, is_so: Callable[[dict[str, Any]], bool] = lambda b: b["status"] in OVER) -> Any:
        deadline = time.monotonic() + 60
        while not is_so(batch := self.batch(batch_id)):
            assert time.monotonic() < deadline, batch
            time.sleep(0.01)
        return batch

    def run(self, lines: Iterable[Any] | bytes, endpoint: str = FUNCTION, **fields: Any) -> dict[str, Any]:
        batch: dict[str, Any] = self.wait(self.begin(lines, endpoint, **fields)["id"])
        return batch

    def content(self, file_id: str) -> bytes:
        answer = self.http.get(f"/files/{file_id}/content")
        assert answer.status_code == 200, answer.text
        return answer.content

    def results(self, file_id: str) -> dict[str, Any]:
        found = [json.loads(each) for each in self.content(file_id).splitlines()]
        by_id = {each["custom_id"]: each for each in found}
        assert len(by_id) == len(found)
        return by_id

    def metric(self, name: str, **labels: str) -> float:
        text = self.http.get(str(self.http.base_url).removesuffix("/v1/") + "/metrics").text
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == f"chairlift_{name}" and labels.items() <= sample.labels.items():
                    return sample.value
        return 0.0


def files_in(folder: Path) -> set[str]:
    """The names of the files that really lie in a data folder."""
    return {path.name for path in (folder / "files").iterdir()}

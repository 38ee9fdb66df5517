"""What one item in a batch that ends or hangs its worker costs the others, in seconds.

    python benchmarks/faults.py [--items 64] [--call-timeout 3] [--instances 1] [--runs 3] [KEY=VALUE ...]

A Python class in a worker process gets all items at once, one of which calls `os._exit` or sleeps for ever. The table
shows when the last of the others was answered and when the one at fault was, and of a client that sends one item every
50 ms meanwhile, the longest that one took and how many were refused. KEY=VALUE are
further settings of the model, such as standby=never. With PYTHONPATH set to another checkout it measures that one.
"""

import argparse
import asyncio
import json
import logging
import os
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from chairlift.bench.raw_results import Column, Recording, Results, caption, start, table
from chairlift.config.items import ItemConfig
from chairlift.config.settings import ServedModel
from chairlift.errors import ChairliftError
from chairlift.server.http.exchange import Terms
from chairlift.server.models.item_host import ItemHost
from chairlift.server.models.item_service import ItemService

MODEL = """
import os, time

class Faulty:
    def predict(self, batch):
        if "exit" in batch:
            os._exit(3)
        if "hang" in batch:
            time.sleep(1e6)
        return batch
"""
FAULTS = ("exit", "hang")
_EVERY_S = 0.05


class Cost(NamedTuple):
    """Seconds until all others, and the one at fault, were answered; the longest wait and the refusals meanwhile."""

    others: float
    culprit: float
    live: float
    refused: float


async def _send_on(
    service: ItemService, over: asyncio.Future[Any], waits: list[float], refused: list[Exception]
) -> None:
    """Send one item after the other, until it is over."""
    while not over.done():
        began = time.perf_counter()
        try:
            await service.infer([0], Terms())
            waits.append(time.perf_counter() - began)
        except ChairliftError as error:
            refused.append(error)
        await asyncio.sleep(_EVERY_S)


async def measure(config: ItemConfig, fault: str, items: int) -> Cost:
    """Load the model, send the items, and see when each is answered."""
    host = ItemHost(ServedModel("faulty", config), config, None)
    await host.start()
    service = host.prepare()
    await host.wait_ready()
    waits: list[float] = []
    refused: list[Exception] = []
    try:
        payloads: list[Any] = list(range(items))
        payloads[items // 2] = fault
        futures = service.submit(payloads, Terms())
        began = time.perf_counter()
        culprit = futures.pop(items // 2)
        sending = asyncio.create_task(_send_on(service, culprit, waits, refused))
        answers = await asyncio.gather(*futures, return_exceptions=True)
        others = time.perf_counter() - began
        if failed := [each for each in answers if isinstance(each, BaseException)]:
            raise SystemExit(f"{len(failed)} of the others failed: {failed[0]}")
        await asyncio.wait([culprit])
        spent = time.perf_counter() - began
        await sending
    finally:
        await host.stop()
    return Cost(others, spent, max(waits, default=0.0), len(refused))


def main() -> None:
    """Measure each fault and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--items", type=int, default=64)
    parser.add_argument("--call-timeout", type=float, default=3.0)
    parser.add_argument("--instances", type=int, default=1)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the results are saved")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    args = parser.parse_args()
    logging.basicConfig(level="CRITICAL")
    os.environ["CHAIRLIFT_LOG_LEVEL"] = "critical"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "faulty.py")
        path.write_text(MODEL)
        config = ItemConfig(
            model=f"{path}:Faulty",
            max_batch_size=args.items,
            call_timeout_s=args.call_timeout,
            instances=args.instances,
            **{key: _value(text) for key, _, text in (each.partition("=") for each in args.settings)},
        )
        record = Recording(start("faults", vars(args)), args.out)
        for number in range(1, args.runs + 1):
            for fault in FAULTS:
                cost = asyncio.run(measure(config, fault, args.items))
                record.add({"fault": fault, "round": number, **cost._asdict()})
    print(markdown(record.results))


def markdown(results: Results) -> str:
    """The table of all runs."""
    figures = (
        Column("others", "the others answered, s", "{:.2f}"),
        Column("culprit", "the culprit, s", "{:.2f}"),
        Column("live", "longest new item, s", "{:.2f}"),
        Column("refused", "new items refused"),
    )
    return f"{caption(results)}:\n\n{table(results['runs'], (Column('fault', 'an item that', '{}'),), figures)}"


def _value(text: str) -> Any:
    """A number or a flag where it is one, else the text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


if __name__ == "__main__":
    main()

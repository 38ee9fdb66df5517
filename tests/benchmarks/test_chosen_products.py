"""What benchmarks/chosen_products.py makes of what it measured."""

import platform
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import chosen_products


def run(number: int, shape: str, rows: int, ours: float, bfloat16: float, float32: float) -> dict[str, Any]:
    rates = {"ours": ours, "bfloat16": bfloat16, "float32": float32}
    about = {"round": number, "isa": "avx2", "by": "float32", "model": "m", "shape": shape, "rows": rows}
    return about | {"fma_gflop_s": 200.0, "gflop_s": rates}


RUNS = [
    *(run(1, "8x8", 1, 10.0, 5.0, 8.0), run(1, "9x9", 1, 20.0, 30.0, 8.0)),
    *(run(2, "8x8", 1, 10.0, 5.0, 10.2), run(2, "9x9", 1, 20.0, 22.0, 8.0)),
    run(1, "8x8", 512, 100.0, 80.0, 104.0),
]


def test_the_faster_of_onednns_is_what_ours_are_held_against() -> None:
    rows = {(row["round"], row["rows"]): row for row in chosen_products.summed_up(RUNS)}
    assert [rows[1, 1][name] for name in ("least", "most")] == [10.0, 20.0]
    assert rows[1, 1]["behind_percent"] == pytest.approx(50)
    assert rows[2, 1]["behind_percent"] == pytest.approx(10)
    assert rows[1, 512]["behind_percent"] == pytest.approx(4)


def test_medians_of_rounds_say_which_are_behind() -> None:
    assert chosen_products.most_behind(RUNS) == [
        "- avx2: 2 of 3 products more than 3% behind oneDNN, most of all m 9x9, 1 rows"
    ]


def test_a_table_is_made_of_saved_results() -> None:
    results = {"runs": RUNS, "failures": [], "model": "m", "machine": "x", "commit": "c", "started": "2026-01-01 00:00"}
    text = chosen_products.markdown(results | {"versions": {}, "ended": "2026-01-01 00:01", "settings": {}})
    assert "| avx2         | float32 | 512  |" in text


@pytest.mark.skipif(
    platform.machine() not in ("x86_64", "AMD64") or shutil.which("c++") is None, reason="compiled for x86"
)
def test_the_loop_of_registers_runs_on_this_processor() -> None:
    assert chosen_products.fma_rate("avx2") > 0.1

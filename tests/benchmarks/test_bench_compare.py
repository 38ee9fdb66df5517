"""Comparison with peers: arithmetic and rendering from made-up results, and that a peer that fails spoils nothing."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import compare
import compare_serving
import comparison
import engines
import peer_versions
import serving
from engines import BEFORE, BF16, INT4, INT8, Engine
from server_process import free_port, running

from chairlift.bench.latency import COLUMNS, QUANTILES
from chairlift.bench.raw_results import Results, caption, start

# Prints a line for each workload as offline programs do: the rate is the model's name.
PRINTS = """
import json, sys
for name in sys.argv[2].split(","):
    print("noise")
    print(json.dumps({"engine": "x", "workload": name, "load_s": 1.0, "output_tok_s": float(sys.argv[1])}), flush=True)
"""
DIES = PRINTS + "sys.exit('out of memory')"
# For longer than a test may take.
HANGS = PRINTS + "import time; time.sleep(1000)"

SERVES = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[-1])), Handler).serve_forever()
"""


def fake(name: str, precision: str, script: str, rate: float = 1.0, **more: Any) -> Engine:
    return Engine(name, precision, (sys.executable, "-c", script), str(rate), **more)


def line(name: str, precision: str, number: int, workload: str, rate: float) -> dict[str, Any]:
    about = {"name": name, "precision": precision, "round": number, "workload": workload}
    return about | {"load_s": 2.0, "output_tok_s": rate}


def results(*runs: dict[str, Any]) -> Results:
    return start("compare", {}, "models/llama") | {"runs": list(runs)}


FOUR = results(
    *(line("Chairlift", BF16, i, "single", rate) for i, rate in enumerate([110, 90, 100])),
    line("vLLM", BF16, 1, "single", 50),
    line("OpenVINO GenAI", BF16, 1, "single", 80),
    line("Chairlift", INT8, 1, "uniform", 700),
    line("llama.cpp", INT8, 1, "uniform", 200),
)


def test_the_share_of_the_limit_has_a_row_where_it_was_taken() -> None:
    runs = [run | {"share_percent": 80 + run["round"]} for run in FOUR["runs"] if run["precision"] == BF16]
    rows = comparison.markdown(results(*runs, *FOUR["runs"][-2:])).splitlines()
    assert [row.split("|")[3].strip() for row in rows if "limit with" in row] == ["81% (80%-82%)"]


def test_medians_and_ratios_to_the_best_peer() -> None:
    tables = comparison.by_precision(FOUR)
    assert tables[BF16]["Chairlift"] == {"single": [110, 90, 100], "load_s": [2.0, 2.0, 2.0]}
    assert comparison.ratios(tables, BF16) == {"single": (1.25, "OpenVINO GenAI", BF16)}
    assert comparison.ratios(tables, INT8) == {"uniform": (3.5, "llama.cpp", INT8)}
    assert comparison.ratios({BF16: {"vLLM": {"single": [1.0]}}}, BF16) == {}
    assert comparison.ratios({BF16: {"Chairlift": {"single": [1.0]}}}, BF16) == {}


def test_the_best_peer_may_be_a_more_exact_one_and_no_less_exact_one() -> None:
    found = results(
        *FOUR["runs"], line("vLLM", BF16, 1, "uniform", 350), line("Chairlift", BF16, 1, "uniform", 400),
        line("Chairlift", INT4, 1, "uniform", 1050)
    )  # fmt: skip
    tables = comparison.by_precision(found)
    assert comparison.ratios(tables, INT8)["uniform"] == (2.0, "vLLM", BF16)
    assert comparison.ratios(tables, INT4)["uniform"] == (3.0, "vLLM", BF16)
    assert comparison.ratios(comparison.by_precision(FOUR), BF16).keys() == {"single"}
    assert "**2.00** (vLLM bf16)" in comparison.markdown(found)


def test_a_table_says_how_llama_cpp_was_built_where_that_matters() -> None:
    amx = [run | {"ops": "native-amx"} for run in FOUR["runs"]]
    assert "was not saved" in comparison.markdown(results(*amx))
    assert "built without AMX, with" in comparison.markdown(results(*amx) | {"started": comparison.WITHOUT_AMX[0]})
    assert "; built for Zen." in comparison.markdown(FOUR | {"settings": {"llama_build": "for Zen"}})
    assert "built" not in comparison.markdown(FOUR)


def test_a_share_above_all_is_explained_by_how_the_limit_was_measured() -> None:
    runs = [run | {"share_percent": 120} for run in FOUR["runs"]]
    assert "in a slower moment" in comparison.markdown(results(*runs))
    old = comparison.markdown(results(*runs) | {"started": "2026-11-22 22:26"})
    assert "reading 1 GiB" in old
    assert "in a slower moment" not in old


def test_an_older_checkout_is_no_peer_and_is_compared_round_by_round() -> None:
    older = [line(BEFORE, BF16, i, "single", rate) for i, rate in enumerate([100, 100])]
    found = results(*FOUR["runs"], *older)
    assert comparison.ratios(comparison.by_precision(found), BF16)["single"].value == pytest.approx(1.25)
    assert comparison.progress(found, BF16) == {"single": [1.1, 0.9]}
    rows = [row for row in comparison.markdown(found).splitlines() if "Chairlift / before" in row]
    assert [row.split("|")[3].strip() for row in rows] == ["1.00 (0.90-1.10)"]


def test_table_shows_what_was_measured_and_what_failed() -> None:
    failed = [{"name": "vLLM", "precision": BF16, "round": number, "error": "died"} for number in (2, 3)]
    text = comparison.markdown(FOUR | {"failures": failed})
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in text.splitlines() if row.startswith("|")]
    assert rows[0] == ["", "engine", "single", "uniform", "load, s"]
    assert ["bf16", "Chairlift", "100 (90-110)", "-", "2.0"] in rows
    assert ["bf16", "vLLM", "50 (1 of 3 rounds)", "-", "2.0"] in rows
    assert ["8 bit", "llama.cpp *", "-", "200 (1 of 3 rounds)", "2.0"] in rows
    assert "llama.cpp: over HTTP" in text
    assert "medians of 3 rounds" in text
    assert ["bf16", "**Chairlift / best peer**", "**1.25** (OpenVINO bf16)", "-", ""] in rows
    assert ["8 bit", "**Chairlift / best peer**", "-", "**3.50** (llama.cpp 8 bit)", ""] in rows
    assert "Settings: Chairlift its defaults; vLLM" in text
    assert "vLLM, bf16 failed in round 2, 3." in text
    assert text.startswith("Output tokens a second. llama; ")


def test_the_picture_has_every_engine_and_the_older_checkout(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    older = line(BEFORE, BF16, 1, "single", 100)
    comparison.draw([results(*FOUR["runs"], older), FOUR], tmp_path / "compare.png")
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    said = "\n".join(comparison._notes(FOUR))
    assert FOUR["commit"] in said
    assert "medians of 3 rounds" in said
    assert "llama.cpp: over HTTP" in said


@pytest.mark.processes
def test_a_peer_that_fails_spoils_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = [
        fake("Chairlift", BF16, PRINTS, 30),
        fake("vLLM", BF16, DIES, 20),
        fake("OpenVINO GenAI", BF16, HANGS, 25),
        Engine("llama.cpp", BF16, (str(tmp_path / "missing"),), "m"),
    ]
    monkeypatch.setattr(compare, "chosen", lambda args: every)
    out = tmp_path / "deep" / "results.json"
    command = ["m", "--out", str(out), "--rounds", "2", "--timeout", "1.5", "--workloads", "single"]
    monkeypatch.setattr(sys, "argv", ["compare.py", *command])
    compare.main()
    saved = json.loads(out.read_text())
    # In turns, backwards the second time, and what a peer said before it failed is kept.
    names = [(run["round"], run["name"]) for run in saved["runs"]]
    first = ["Chairlift", "vLLM", "OpenVINO GenAI"]
    assert names == [(1, name) for name in first] + [(2, name) for name in reversed(first)]
    errors = {failure["name"]: failure["error"] for failure in saved["failures"]}
    assert len(saved["failures"]) == 6
    assert errors["vLLM"] == "out of memory"
    assert errors["OpenVINO GenAI"] == "not done after 1.5 s"
    assert "missing" in errors["llama.cpp"]
    assert comparison.ratios(comparison.by_precision(saved), BF16)["single"].value == pytest.approx(1.2)


@pytest.mark.processes
def test_a_program_that_ends_early_is_a_failure() -> None:
    lines, error = compare.run(fake("vLLM", BF16, "print('{}')"), ["single", "uniform"], 1, 30)
    assert (lines, error) == ([], "printed 0 of 2 results")


def test_engines_follow_the_options(monkeypatch: pytest.MonkeyPatch) -> None:
    command = "m --out x --vllm v/bin/python --openvino o --openvino-int8 oi --llama-server l --gguf g --gguf-int8 gi"
    command += " --gguf-int4 g4"
    monkeypatch.setattr(sys, "argv", ["compare.py", *command.split()])
    found = engines.chosen(compare._parser().parse_args())
    assert [(engine.name, engine.precision) for engine in found] == [
        ("Chairlift", BF16),
        ("Chairlift", INT8),
        ("Chairlift", INT4),
        ("vLLM", BF16),
        ("OpenVINO GenAI", INT8),
        ("llama.cpp", BF16),
        ("llama.cpp", INT8),
        ("llama.cpp", INT4),
    ]
    assert found[1].offline(["single", "varied"], 2)[2:] == [
        "m",
        "single,varied",
        'quantization="int8"',
        'kv_cache_dtype="int8"',
        "--roofline",
        "--repeat",
        "2",
    ]
    assert {"--quantization", "--kv-cache-dtype", "int8", "--no-enable-prefix-caching"} <= set(found[1].server)
    assert "--roofline" not in found[1].server
    assert 'quantization="int4"' in found[2].settings
    assert found[3].env["HF_HUB_OFFLINE"] == "1"
    assert not found[4].server


@pytest.mark.processes
def test_a_server_is_awaited_and_ended() -> None:
    port = free_port()
    with running([sys.executable, "-c", SERVES, str(port)], port, "/", {}) as seconds:
        assert seconds > 0
    # Nobody listens there any more.
    with (
        pytest.raises(RuntimeError, match="no such model"),
        running([sys.executable, "-c", "raise SystemExit('no such model')"], port, "/", {}),
    ):
        pass


@pytest.mark.processes
def test_servers_are_searched_in_turn_and_one_that_fails_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = fake("Chairlift", BF16, "", server=(sys.executable, "-c", SERVES), ready="/", variants=(("--fast",),))
    bad = fake("vLLM", BF16, "", server=(sys.executable, "-c", "raise SystemExit('no memory')"))
    none = fake("OpenVINO GenAI", BF16, "")
    monkeypatch.setattr(compare_serving, "chosen", lambda args: [bad, good, none])
    monkeypatch.setattr(serving, "warm_up", lambda *arguments: None)

    def figures(target: Any, rate: float, *rest: Any, needed: float | None = None) -> dict[str, Any]:
        row: dict[str, Any] = {each.key: 1.0 for each in COLUMNS if "." not in each.key}
        row |= {name: {f"p{q}": 7.0 for q in wanted} for name, wanted in QUANTILES.items()}
        inside = 100.0 if rate < 3.3 else 10.0
        return row | {"rate": rate, "inside_percent": inside, "given_up": inside < (needed or 0.0)}

    monkeypatch.setattr(serving, "at_rate", figures)
    out = tmp_path / "results.json"
    monkeypatch.setattr(sys, "argv", ["compare_serving.py", "m", "--out", str(out)])
    compare_serving.main()
    saved = json.loads(out.read_text())
    assert 3.3 / 1.05 <= saved["runs"][0]["best_rate"] <= 3.3
    assert "no memory" in saved["failures"][0]["error"]
    text = capsys.readouterr().out
    rows = [row for row in text.splitlines() if row.startswith("| Chairlift")]
    assert len(rows) == 1
    assert f"| {saved['runs'][0]['best_rate']:.2f} " in rows[0]
    assert "vLLM, bf16 failed in round 1." in text

    # A sweep tries every variant; they all hold the same here.
    swept = tmp_path / "sweep.json"
    monkeypatch.setattr(sys, "argv", ["compare_serving.py", "m", "--sweep", "--out", str(swept)])
    compare_serving.main()
    assert [run["variant"] for run in json.loads(swept.read_text())["runs"]] == ["its defaults", "--fast"]


def test_servers_take_turns_backwards_every_second_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = [fake(name, BF16, "", server=("serve",)) for name in ("Chairlift", "vLLM")]
    monkeypatch.setattr(compare_serving, "chosen", lambda args: every)
    monkeypatch.setattr(compare_serving, "trial", lambda *arguments: (1.0, None, []))
    args = compare_serving._parser().parse_args(["m", "--rounds", "2", "--out", str(tmp_path / "x.json")])
    found = compare_serving.measure(args)
    assert [run["name"] for run in found["runs"]] == ["Chairlift", "vLLM", "vLLM", "Chairlift"]


def test_a_search_in_which_no_rate_held_shows_none() -> None:
    run = {"name": "llama.cpp", "precision": BF16, "variant": "its defaults", "round": 1, "ready_s": 1.0}
    row = {"rate": 2.0, "requests": 19, "inside_percent": 50.0, "output_tok_s": 9.0, "sent_seconds": 180.0}
    args = vars(compare_serving._parser().parse_args(["m", "--out", "x"]))
    lost = compare_serving.markdown(results(run | {"best_rate": None, "rows": [row]}) | {"settings": args})
    assert "llama.cpp, bf16, its defaults: none held in round 1." in lost
    assert "| 2.00" not in lost
    held = compare_serving.markdown(
        results(run | {"best_rate": 2.0, "rows": [row, row | {"rate": 4.0, "sent_seconds": 40.0}]}) | {"settings": args}
    )
    assert "none held" not in held
    assert "; 40 to 180 s a rate;" in held
    cells = [cell.strip() for cell in held.splitlines()[4].split("|")]
    assert cells[4:7] == ["1.0", "2.00", "19"]


@pytest.mark.processes
def test_versions_are_asked_of_the_interpreter_that_runs_a_peer(tmp_path: Path) -> None:
    import msgspec
    import yaml

    names = {"ours": "msgspec", "of another name": "yaml", "odd": "no-such-package"}
    wanted = {"left out": (None, "x")} | {name: (sys.executable, package) for name, package in names.items()}
    versions = {"ours": msgspec.__version__, "of another name": yaml.__version__, "odd": peer_versions.UNKNOWN}
    assert peer_versions.package_versions(wanted) == versions
    binary = tmp_path / "llama-server"
    binary.write_text("#!/bin/sh\necho 'version: 7 (abc)' >&2\necho 'built with g++' >&2\n")
    binary.chmod(0o755)
    assert peer_versions.binary_version(str(binary)) == "version: 7 (abc); built with g++"
    assert peer_versions.binary_version(str(tmp_path / "none")) == peer_versions.UNKNOWN
    assert "vLLM 0.32" in caption(start("compare", {}, peers={"vLLM": "0.32"}))


def test_settings_come_from_the_variant_that_held_most() -> None:
    engine = fake("vLLM", BF16, "", variants=(("-b", "128"), ("-b", "256")))
    held = {"its defaults": 2.0, "-b 128": None, "-b 256": 3.0}
    runs = [{"name": "vLLM", "precision": BF16, "variant": name, "best_rate": rate} for name, rate in held.items()]
    assert compare_serving.best_variant(engine, results(*runs)) == ("-b", "256")
    assert compare_serving.best_variant(engine, results(*runs[:2])) == ()
    assert compare_serving.best_variant(engine, results(*(run | {"name": "other"} for run in runs))) == ()
    assert compare_serving.best_variant(engine, None) == ()


@pytest.mark.processes
def test_own_program_prints_a_line_for_each_workload(monkeypatch: pytest.MonkeyPatch) -> None:
    from chairlift.demo import demo_path

    # The demo model's vocabulary is smaller than the prompts' ids; they need not make sense, only exist.
    script = (
        "import sys, runpy; sys.path.insert(0, sys.argv[1]); import offline_run, workloads; "
        "offline_run.MEASURED_SECONDS = 0.1; whole = workloads.requests; "
        "workloads.requests = lambda name: [(ids[:8], 4) for ids, _ in whole(name, vocab=300)[:2]]; "
        "sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0] + '/offline.py', run_name='__main__')"
    )
    program = (sys.executable, "-c", script, str(Path(engines.__file__).parent))
    settings = ("max_model_len=64", "kv_cache_gb=0.05", "num_threads=1", 'dtype="float32"')
    engine = Engine("Chairlift", BF16, program, str(demo_path()), settings)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    lines, error = compare.run(engine, ["single", "varied"], 1, 120)
    assert error is None
    assert [row["workload"] for row in lines] == ["single", "varied"]
    assert all(row["output_tok_s"] > 0 and row["engine"] == "chairlift" for row in lines)

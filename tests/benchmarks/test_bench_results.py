"""Raw results and what is made of them: captions and tables say what was saved, and the documentation what they say."""

import argparse
import importlib
import json
import re
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "dynamic"))

import accuracy
import background
import compare_embed
import goodput
import interference
import jobs
import jobs_compare
import plan_sweep
import render
import scheduler
import serving
import shape_tokenizers
import sharing
import simulate
import texts
import workloads

from chairlift.bench.raw_results import (
    Column,
    HelpFormatter,
    Recording,
    Results,
    caption,
    failures,
    save,
    spread,
    start,
    table,
)
from chairlift.demo import demo_path


def test_help_tells_each_default_once_and_no_none() -> None:
    parser = argparse.ArgumentParser(prog="x", formatter_class=HelpFormatter)
    parser.add_argument("--items", help="inputs (default: 1)")
    parser.add_argument("--rate", help="a second")
    parser.add_argument("--name", default="", help="of the model")
    parser.add_argument("--slots", default=8, help="at once")
    told = parser.format_help()
    assert (told.count("default: "), "None" in told, "at once (default: 8)" in told) == (2, False, True)


def results(*runs: dict[str, Any], **more: Any) -> Results:
    return start("made_up", {}, "models/tiny") | {"runs": list(runs)} | more


def cells(text: str, table_number: int = 0) -> list[list[str]]:
    """The rows of one of a text's tables, header first and without the line below it."""
    found = [part.splitlines() for part in text.split("\n\n") if part.startswith("|")][table_number]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in found]
    return [rows[0], *rows[2:]]


def test_results_say_what_was_run_and_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/far/away/sharing.py", "--llm", "/secret/place/llama", "--weights=2"])
    found = start("sharing", {"llm": Path("/secret/place/llama"), "weights": [2, 1], "run": print}, "/secret/llama")
    assert found["command"] == ["sharing.py", "--llm", "llama", "--weights=2"]
    assert found["settings"] == {"llm": "llama", "weights": [2, 1]}
    assert found["model"] == "llama"
    assert found["commit"]
    assert "cores of" in found["machine"]
    recording = Recording(found, tmp_path / "deep" / "saved.json")
    recording.add({"round": 1, "x": 1.5})
    recording.fail({"name": "vLLM", "round": 2}, "died")
    saved = json.loads((tmp_path / "deep" / "saved.json").read_text())
    assert saved == found
    assert saved["started"] <= saved["ended"]
    assert failures(saved) == ["vLLM failed in round 2."]
    assert "secret" not in json.dumps(saved)


def test_a_caption_says_what_was_saved_and_what_was_not() -> None:
    old = {"model": "m", "machine": "2 cores", "started": "2026-11-21 18:00", "ended": "2026-11-21 18:51", "runs": [{}]}
    assert caption(old) == "m; 2 cores; 2026-11-21 18:00 to 18:51; commit not saved; one round"
    new = old | {"commit": "abc", "versions": {"torch": "2.13"}, "runs": [{"round": 1}, {"round": 2}, {"round": 2}]}
    assert "commit abc; torch 2.13; medians of 2 rounds" in caption(new)
    assert "18:00 to 2026-11-22 00:10" in caption(old | {"ended": "2026-11-22 00:10"})


def test_a_cell_is_a_median_with_its_range_and_says_what_it_lacks() -> None:
    assert spread([3, 1, 2]) == "2 (1-3)"
    assert spread([2.01, 2.0], "{:.1f}") == "2.0"
    assert spread([1, 2], rounds=3) == "2 (1-2, 2 of 3 rounds)"
    assert spread([5], rounds=2) == "5 (1 of 2 rounds)"
    assert spread([]) == "-"


def test_a_table_has_a_row_for_each_name_and_no_column_that_nobody_has() -> None:
    runs = [
        {"round": 1, "name": "a", "t": {"p50": 1.0}, "rate": 2.0},
        {"round": 1, "name": "b", "t": {"p50": 4.0}},
        {"round": 2, "name": "a", "t": {"p50": 3.0}},
    ]
    figures = [Column("t.p50", "t", "{:.1f}"), Column("none", "none"), Column("rate", "rate")]
    assert cells(table(runs, [Column("name", "who")], figures)) == [
        ["who", "t", "rate"],
        ["a", "2.0 (1.0-3.0)", "2 (1 of 2 rounds)"],
        ["b", "4.0 (1 of 2 rounds)", "-"],
    ]


def test_the_documentation_is_what_the_saved_results_say() -> None:
    for document in render.DOCUMENTS:
        text = document.read_text()
        assert render.render(text, render.RESULTS) == text


def test_no_table_and_no_rate_of_the_documentation_is_written_by_hand() -> None:
    by_hand = "\n".join(render.outside(page.read_text()) for page in render.PAGES)
    assert not re.findall(r"^\|.*", by_hand, re.MULTILINE)
    assert not re.findall(r"\d+ (?:tok/s|tokens/s|us|MB)\b|\d/s", by_hand)


def test_every_saved_result_has_a_place_in_the_documentation() -> None:
    text = "\n".join(page.read_text() for page in render.PAGES)
    assert {file.stem for file in render.RESULTS.glob("*.json")} <= set(re.findall(r"<!-- results: (\S+) -->", text))


def test_rendering_replaces_what_is_in_a_place_and_names_what_is_missing(tmp_path: Path) -> None:
    save(results({"round": 1, "workload": "decode", "waiting": 10, "sum": 0.5}, benchmark="scheduler",
                 settings={"running": 256}), tmp_path / "one.json")  # fmt: skip
    before = "a\n<!-- results: one -->\nold\n<!-- end -->\nb\n<!-- results: two -->\n<!-- end -->\nc\n"
    once = render.render(before, tmp_path)
    assert "old" not in once
    assert "| decode | 10" in once
    assert "--out benchmarks/results/two.json" in once
    assert render.render(once, tmp_path) == once
    assert render.outside(once) == "a\n\nb\n\nc\n"


def test_shares_are_of_the_same_round() -> None:
    rates = {"llm": 100.0, "embedder": 10.0, "function": 50.0}
    runs = [{"round": number, "phase": "alone", "rates": rates} for number in (1, 2)]
    halves = [{name: rate * share for name, rate in rates.items()} for share in (0.2, 0.3)]
    runs += [{"round": number, "phase": "together", "rates": half} for number, half in enumerate(halves, 1)]
    text = sharing.markdown(results(*runs, settings={"weights": [2.0, 1.0, 1.0], "seconds": 10.0}))
    assert cells(text)[1] == ["llm", "2", "-", "100", "25 (20-30)", "50%", "25% (20%-30%)", "0.50 (0.40-0.60)"]


def test_jobs_and_background_show_rounds() -> None:
    line = {"name": "run", "quantization": "none", "tokens_in": 5, "tokens_out": 7, "with_load_tok_s": 2.0}
    text = jobs_compare.markdown(results(*(line | {"round": i, "output_tok_s": 10.0 * i} for i in (1, 2, 3))))
    assert cells(text)[1] == ["`chairlift run`", "none", "5", "7", "20 (10-30)", "2"]
    run = {"lines": 1000, "lines_per_s": 50.0, "overhead_us_per_line": 27.0, "resident_mb_first": 65.6}
    assert cells(jobs.markdown(results(run)))[1] == ["1,000", "50", "27", "65.6"]
    times = {"p50": 100.0, "p95": 200.0, "p99": 300.0}
    phases = [{"phase": background.BEST, "tokens_s": 1500.0, "of_best": 1.0, "round": 1}]
    for phase, factor in ((background.ALONE, 1.0), (background.BESIDE, 1.5)):
        ttft = {q: value * factor for q, value in times.items()}
        phases.append({"phase": phase, "tokens_s": 700.0, "of_best": 0.5, "round": 1, "ttft_ms": ttft, "itl_ms": times})
    text = background.markdown(results(*phases, settings={"server": []}))
    assert "p50 +50.0%, p95 +50.0%, p99 +50.0%" in text


def test_interference_shows_windows() -> None:
    times = {"p50": 10.0, "p95": 20.0, "p99": 30.0}
    row = {"target_itl_ms": 40.0, "ttft_ms_long": times, "long_prompts": 12}
    row["itl_ms_alone"] = times | {"p99_by_window": [30.0]}
    row["itl_ms_with_long"] = times | {"p99_by_window": [40.0, 60.0, 80.0]}
    settings = {"streams": 16, "prompt": 1500, "every": 2.0, "seconds": 8.0, "rounds": 3}
    shown = cells(interference.markdown(results(row, settings=settings)))[1]
    assert shown == ["40 ms", "10.0 / 20.0 / 30.0", "10.0 / 20.0 / 30.0", "30.0", "60.0 (40.0-80.0)",
                     "1.50 (1.00-2.00)", "10.0 / 20.0", "12"]  # fmt: skip


def test_a_shared_prefix_is_compared_round_by_round() -> None:
    runs = [
        {"pass": name, "round": i, "ttft_p50_ms": ttft * i, "ttft_p95_ms": 1.0, "computed": computed, "cached": 0.0}
        for i in (1, 2)
        for name, ttft, computed in (("nothing shared", 80.0, 100.0), ("prefix shared", 10.0, 25.0))
    ]
    text = serving.markdown(results(*runs))
    assert "TTFT p50: 8.00 times faster." in text
    assert "Prefill work: 75.0% less." in text


def test_the_best_setting_of_each_engine_is_shown_and_named() -> None:
    runs = [
        {"round": i, "engine": "infinity", "dtype": "bfloat16", "batch_size": size, "tok_s": rate + i}
        for i in (1, 2, 3)
        for size, rate in ((8, 5000), (16, 9000))
    ]
    text = compare_embed.markdown(results(*runs, settings={"texts": 1000}))
    assert cells(text)[1:] == [["infinity", "bfloat16", "batch_size 16", "9,002 (9,001-9,003)"]]


def test_the_best_setting_is_one_that_ran_in_every_round() -> None:
    one = {"engine": "vllm", "dtype": "bfloat16"}
    runs = [one | {"round": i, "batch_tokens": 512, "tok_s": 900 - i} for i in (1, 2, 3)]
    text = compare_embed.markdown(
        results(*runs, one | {"round": 1, "batch_tokens": 64, "tok_s": 899}, settings={"texts": 1})
    )
    assert cells(text)[1:] == [["vllm", "bfloat16", "batch_tokens 512", "898 (897-899)"]]


@pytest.mark.processes
def test_of_programs_that_differ_in_a_setting_the_fastest_runs_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def program(setting: int, rate: int) -> tuple[str, list[str]]:
        line = json.dumps({"engine": "vllm", "dtype": "bfloat16", "batch_tokens": setting, "tok_s": rate})
        return "peer", [sys.executable, "-c", f"print({line!r})"]

    failing = ("broken", [sys.executable, "-c", "raise SystemExit('no memory')"])
    monkeypatch.setattr(compare_embed, "commands_of", lambda *_: [program(1, 10), program(2, 30), failing])
    args = compare_embed._parser().parse_args(["minilm", "--rounds", "2", "--out", str(tmp_path / "embed.json")])
    found = compare_embed.measure(args)
    assert [(run["round"], run["batch_tokens"]) for run in found["runs"]] == [(1, 1), (1, 2), (2, 2)]
    assert "no memory" in str(found["failures"])


def test_programs_of_embedding_peers_get_the_settings_that_they_cannot_try_themselves() -> None:
    peers = ["--vllm", "vllm-python", "--onnxruntime", "onnx-python", "--infinity", "infinity-python"]
    args = compare_embed._parser().parse_args(["minilm", *peers, "--out", "embed.json"])
    flags = [
        (name, command[5:]) for name, command in compare_embed.commands_of(args, "work") if name in compare_embed.PEERS
    ]
    assert flags == [
        *[("vllm", ["--batch-tokens", tokens]) for tokens in ("512", "2048", "8192")],
        ("infinity", []),
        ("onnxruntime", ["--work", "work"]),
        ("onnxruntime", ["--work", "work", "--int8"]),
    ]


def test_llama_cpp_embeds_by_a_program_for_each_of_its_files() -> None:
    peer = ["--llama-server", "llama-server", "--gguf", "a.gguf", "--gguf-int8", "b.gguf"]
    args = compare_embed._parser().parse_args(["minilm", *peer, "--out", "embed.json"])
    commands = dict(compare_embed.commands_of(args, "work"))
    for name, gguf in (("bfloat16", "a.gguf"), ("int8", "b.gguf")):
        wanted = ["--binary", "llama-server", "--gguf", gguf, "--precision", name]
        assert commands[f"llama.cpp {name}"][5:] == wanted
    without = compare_embed._parser().parse_args(["minilm", *peer[:4], "--out", "embed.json"])
    assert "llama.cpp int8" not in dict(compare_embed.commands_of(without, "work"))


@pytest.mark.processes
def test_a_file_through_chairlift_run_is_timed_from_its_first_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    jobs = [([40, 41, 42], 3), ([43], 2)]
    monkeypatch.setattr(workloads, "requests", lambda name: jobs)
    model = str(demo_path())
    lines = tmp_path / "in.jsonl"
    lines.write_text("".join(json.dumps(line) + "\n" for line in jobs_compare.batch(model)))
    # It ends the program if the line that begins the time, or the one that ends it, was never printed.
    row = jobs_compare._measure("run", "none", argparse.Namespace(model=model), lines)
    assert row["tokens_out"] == 5


def test_a_window_comes_from_the_sweep_that_held_most() -> None:
    mosec = goodput.PEERS["mosec"]
    runs = [
        {"name": "mosec", "executor": "fast", "wait_ms": wait, "holds": holds}
        for wait, holds in ((1.0, 900.0), (5.0, 1100.0), (10.0, None))
    ]
    assert goodput.best_wait(mosec, "fast", results(*runs)) == 5.0
    assert goodput.best_wait(goodput.PEERS["chairlift"], "fast", None) == 0.0
    with pytest.raises(RuntimeError, match="--sweep"):
        goodput.best_wait(mosec, "slow", results(*runs))


def test_goodput_names_settings() -> None:
    run = {"name": "mosec", "executor": "fast", "wait_ms": 1.0, "holds": None, "p99": None, "overload": 3.0,
           "best_overload": 1608.0, "best_limits": {"limit_ms": 50.0, "max_waiting": 64}}  # fmt: skip
    text = goodput.markdown(results(run, settings={"seconds": 5.0, "client": "open_loop.py"}))
    assert cells(text)[1] == ["mosec", "1 ms", "50 ms, 64 waiting", "0", "3", "1608"]


OLD = {"name": "Chairlift", "executor": "fast", "round": 1, "wait_ms": 0.0, "holds": 1900.0, "p99": 45.0,
       "overload": 1926.0, "best_overload": 1926.0, "best_limits": {"limit_ms": 0.0, "max_waiting": 0}}  # fmt: skip


def test_goodput_says_where_a_server_had_a_limit_in_all_columns() -> None:
    settings = {"seconds": 5.0, "client": "open_loop.py"}
    assert cells(goodput.markdown(results(OLD, settings=settings)))[1][2] == "50 ms, in all columns"
    new = OLD | {"search_limits": {"limit_ms": 0.0, "max_waiting": 0}}
    assert cells(goodput.markdown(results(new, settings=settings)))[1][2] == "-"


def trial(name: str) -> goodput.Trial:
    return goodput.Trial(goodput.PEERS[name], sys.executable, goodput.EXECUTORS["fast"], argparse.Namespace(seconds=1))


def test_our_own_server_has_a_limit_where_those_of_others_do(tmp_path: Path) -> None:
    ours = trial("chairlift")
    for limits in (goodput.Limits(), *ours.peer.limits(ours.slo)):
        ours._command(1, str(tmp_path), limits)
        said = (tmp_path / "chairlift.toml").read_text()
        assert ("timeout_ms = 50" in said) == bool(limits.limit_ms)
    assert len(ours.peer.limits(ours.slo)) == 1


def test_a_rate_that_fails_is_the_last_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[list[float]] = []

    @contextmanager
    def serving(wait: float, limits: goodput.Limits) -> Iterator[Any]:
        asked: list[float] = []
        served.append(asked)
        assert limits == goodput.Limits()

        def ask(rate: float) -> dict[str, float]:
            asked.append(rate)
            return {"inside": 100.0 if rate < 500 else 0.0, "p99": 1.0}

        yield ask

    mosec = trial("mosec")
    monkeypatch.setattr(mosec, "_serving", serving)
    found = mosec._search(1.0, 0.02)
    assert 500 - 0.02 * mosec.capacity <= found["holds"] < 500
    assert len(served) > 2
    assert all(rate < 500 for asked in served for rate in asked[:-1])


def test_an_embedder_says_by_what_it_was_called_and_when_a_peer_ended_with_an_error() -> None:
    runs = [{"round": i, "engine": "chairlift", "dtype": "bfloat16", "tok_s": 1.0} for i in (1, 2)]
    theirs = {"engine": "vllm pooling", "dtype": "bfloat16", "max_num_seqs": 64, "tok_s": 1.0}
    runs += [{"round": i} | theirs for i in (1, 2)]
    ended = [{"name": "vllm", "round": 2, "error": "terminate"}, {"name": "infinity", "round": 1, "error": "died"}]
    text = compare_embed.markdown(results(*runs, settings={"texts": 1}, failures=ended))
    assert [row[0] for row in cells(text)[1:]] == ["chairlift, its runner alone", "vllm pooling"]
    assert "infinity failed in round 1." in text
    assert "vllm ended with an error after its result in round 2." in text
    assert "vllm failed" not in text
    assert "64 texts a step" in text
    new = [run | {"through": "LLM.embed"} if run["engine"] == "chairlift" else run for run in runs]
    saved = [each | {"results": 0} for each in ended]
    text = compare_embed.markdown(results(*new, settings={"texts": 1}, failures=saved))
    assert cells(text)[1][0] == "chairlift, `LLM.embed`"
    assert "vllm failed in round 2." in text


def test_a_plan_says_how_many_were_inside_at_what_it_promises() -> None:
    run = {"traffic": "chat", "target": "brisk", "settings": plan_sweep.plan_name("brisk"), "stage": "again"}
    runs = [run | {"round": i, "goodput": 8.0, "at_each_rate": [part, 8.0]} for i, part in ((1, 5.0), (2, 3.0))]
    plan = {"traffic": "chat", "target": "brisk", "rate": 5.0, "seconds": 1.0}
    found = results(*runs, settings={"shares": [1.0, 2.0], "seconds": 10.0}, plans=[plan])
    assert plan_sweep._ratios(found)[1] == "  (the plan says 5.00/s; at the promised rate: 80% (60%-100%) inside)"
    found["settings"] = {"shares": [0.8, 2.0], "seconds": 10.0}
    assert "at 4.00/s, the nearest measured: 100% (75%-125%) inside" in plan_sweep._ratios(found)[1]


def test_ways_to_run_a_file_take_turns_backwards_every_second_round(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[str] = []
    row = {"tokens_in": 1, "tokens_out": 1, "output_tok_s": 1.0, "with_load_tok_s": 1.0}
    monkeypatch.setattr(jobs_compare, "_measure", lambda name, *rest: ran.append(name) or row)
    monkeypatch.setattr(jobs_compare, "batch", lambda model: [])
    monkeypatch.setattr(sys, "argv", ["jobs_compare.py", "m", "--rounds", "2"])
    jobs_compare.main()
    assert ran == ["run", "library", "library", "run"]


def documented() -> list[tuple[str, list[str]]]:
    """The commands of the pages that are to be typed as they stand, as program and arguments."""
    found = []
    for page in render.DOCUMENTS:
        text = render.outside(page.read_text()).replace("\\\n", " ")
        for name, rest in re.findall(r"^(?:`?)python benchmarks/(?:dynamic/)?(\w+)\.py ([^`\n]+)", text, re.MULTILINE):
            words = [word for word in shlex.split(rest) if word != "ENGINES"]
            found.append((name, words[: words.index("--")] if "--" in words else words))
    return found


def test_documented_commands_have_all_that_they_need() -> None:
    parsed = set()
    for name, words in documented():
        # Of some programs the parser can't be had alone.
        if parser := getattr(importlib.import_module(name), "_parser", None):
            parser().parse_args(words)
            parsed.add(name)
    assert {"compare", "compare_serving", "overload", "goodput", "compare_embed"} <= parsed


def test_a_vocabulary_of_words_has_its_size_and_texts_can_be_made_of_it(tmp_path: Path) -> None:
    shape_tokenizers.write_words(tmp_path, 400)
    assert len(set((tmp_path / "vocab.txt").read_text().splitlines())) == 400
    made, lengths = texts.make_texts(tmp_path, 5)
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert [len(each.ids) for each in tokenizer.encode_batch(made)] == lengths


def test_virtual_time_has_a_table_for_each_part() -> None:
    rows = [{"part": "table"} | row for row in simulate.highest(0.2, 1)]
    text = simulate.markdown(results(*rows, settings={"seconds": 0.2, "seeds": 1, "parts": ["table"]}))
    shown = cells(text)
    assert [row[0] for row in shown[1:]] == ["8 + 0.25 b ms", "8 + 0.25 b ms", "1 + 4 b ms"]
    assert all(int(row[3]) > 0 for row in shown[1:])


def test_scheduler_and_accuracy_show_what_was_saved() -> None:
    run = {"workload": "decode", "waiting": 100000, "schedule": 0.4, "update": 0.25, "sum": 0.65}
    assert cells(scheduler.markdown(results(run, settings={"running": 256})))[1] == [
        "decode", "100,000", "0.40", "0.25", "0.65", "1.00"]  # fmt: skip
    run = {"text": "chats", "variant": "int8", "tokens": 8192, "perplexity": 2.96, "ratio": 1.0002}
    text = accuracy.markdown(results(run | {"standard_error": 0.0004, "agreement": 0.994, "prefix": 63.5}))
    assert cells(text)[1] == ["chats", "8,192", "int8", "1.0002 ±0.0004", "2.96", "99.4%", "63.5"]

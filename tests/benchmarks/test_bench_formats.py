"""`bench formats`: what each format takes and gives, and that it says so of the right one."""

import json
import math
from pathlib import Path

import pytest

from chairlift.bench.formats_command import FORMATS, RESULTS_OF, markdown
from chairlift.bench.perplexity import Surprise
from chairlift.cli import main

QUICK = ("--sequences", "1", "3", "--prompt-len", "8", "--output-len", "4", "--text-tokens", "600")


def bench(*arguments: object) -> int:
    return main(["bench", "formats", *map(str, arguments), "--num-threads", "1"])


def test_every_format_of_the_demo_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    saved, picture = tmp_path / "formats.json", tmp_path / "formats.png"
    assert bench(*QUICK, "--rounds", 2, "--out", saved, "--plot", picture) == 0
    printed = capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
    results = json.loads(saved.read_text())
    assert results["benchmark"] == RESULTS_OF
    assert markdown(results) in printed
    runs = results["runs"]
    assert [(run["round"], run["format"]) for run in runs] == [
        *((1, name) for name in FORMATS),
        *((2, name) for name in reversed(FORMATS)),
    ]
    first = {run["format"]: run for run in runs[:4]}
    sizes = [first[name]["weight_mb"] for name in FORMATS]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[3] < 0.7 * sizes[2] < 0.7 * 0.7 * sizes[1]
    assert (first["float32"]["ratio"], first["float32"]["agreement"]) == (1, 1)
    assert first["bfloat16"]["ratio"] == pytest.approx(1, abs=0.01)
    assert 0.5 < first["int4"]["agreement"] < first["int8"]["agreement"] < 1
    assert ", int8" in first["int8"]["ops"]
    assert ", int4" in first["int4"]["ops"]
    assert all(list(run["tok_s"]) == ["1", "3"] and min(run["tok_s"].values()) > 0 for run in runs)
    # What is computed does not depend on the round, only how long it takes.
    assert {run["perplexity"] for run in runs if run["format"] == "float32"} == {first["float32"]["perplexity"]}

    assert bench("--saved", saved, "--json") == 0
    assert json.loads(capsys.readouterr().out)["formats"] == runs


def test_a_text_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "own.txt"
    text.write_text("The capital of France is Paris. " * 60)
    command = ("--formats", "bfloat16", "--text", text, "--sequences", "2", "--kv-cache-dtype", "int8")
    assert bench(*command, "--prompt-len", 8, "--output-len", 4, "--json") == 0
    (run,) = json.loads(capsys.readouterr().out)["formats"]
    assert (run["ratio"], run["agreement"]) == (1, 1)
    assert run["text_tokens"] % min(256, run["text_tokens"]) == 0


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--sequences", "0"), "--sequences must be at least 1"),
        (("--sequences", "2", "2"), "--sequences has one of them twice"),
        (("--formats", "int8", "int8"), "--formats has one of them twice"),
        (("--output-len", "0"), "--output-len must be at least 1"),
        (("--text-tokens", "0"), "--text-tokens must be at least 1"),
        (("--rounds", "-1"), "--rounds must be at least 1"),
        (("--text", "nowhere.txt"), "--text nowhere.txt: "),
        (("--text-tokens", "8"), "8 tokens of the text are too few: take a text, and --text-tokens, of at least 256"),
        (("--prompt-len", "100000"), "--prompt-len and --output-len make 100064"),
        (("--saved", "nowhere.json"), "--saved nowhere.json: "),
        (("nowhere/at-all/here",), "nowhere/at-all/here"),
    ],
)
def test_what_can_not_be_is_refused_by_name(
    arguments: tuple[str, ...], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(*arguments) == 1
    assert problem in capsys.readouterr().err


def test_results_of_something_else_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = json.dumps({"benchmark": RESULTS_OF, "settings": {}, "runs": []})
    for content in ('{"benchmark": "compare"}', "[]", "nonsense", empty):
        (tmp_path / "other.json").write_text(content)
        assert bench("--saved", tmp_path / "other.json") == 1
        assert "--saved" in capsys.readouterr().err


def test_surprise_is_of_tokens_not_of_windows() -> None:
    one, other = Surprise([1.0, 3.0], [1, 2, 3, 4]), Surprise([1.0, 2.0], [1, 2, 0, 0])
    assert one.perplexity == pytest.approx(math.exp(2))
    ratio, error = one.ratio(other)
    assert ratio == pytest.approx(one.perplexity / other.perplexity)
    assert error == pytest.approx(ratio * 0.5)
    assert one.agreement(other) == 0.5
    assert math.isnan(Surprise([1.0], []).ratio(Surprise([1.0], []))[1])

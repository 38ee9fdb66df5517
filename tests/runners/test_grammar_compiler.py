"""Grammars that take long to compile: who has its turn, who waits, who is lowered."""

import json
import shutil
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any
from unittest.mock import Mock

import llguidance
import pytest

from chairlift.config.sequences import SequenceConfig
from chairlift.demo import demo_path
from chairlift.runners.decoder.runner import DecoderRunner
from chairlift.runners.grammars.grammar import CompiledGrammar, GrammarError, GrammarTokenizer
from chairlift.runners.grammars.grammar_compiler import GrammarCompiler

VOCAB = json.loads((Path(demo_path()) / "config.json").read_text())["vocab_size"]


def test_grammars_that_take_long_to_compile_leave_others_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    go, done = threading.Event(), threading.Semaphore(0)
    results: dict[str, object] = {}
    compile_one = GrammarTokenizer.compile

    def slowly(tokenizer: GrammarTokenizer, grammar: str) -> CompiledGrammar:
        if "slow" in grammar:
            assert go.wait(60)
        return compile_one(tokenizer, grammar)

    monkeypatch.setattr(GrammarTokenizer, "compile", slowly)
    compiler = GrammarCompiler(Path(demo_path()), VOCAB)
    assert compiler.tokenizer

    def keep(name: str) -> Any:
        def take(result: object) -> None:
            results[name] = result
            done.release()

        return take

    for number in range(4):
        compiler.compile_aside(f'start: "slow{number}"', keep(f"slow{number}"))
    while compiler._num_slow < 4:
        time.sleep(0.001)
    # All that may take long do: the rest waits, in no thread of its own, and some are not wanted any more.
    before = threading.active_count()
    for number in range(2000):
        compiler.compile_aside(f'start: "quick{number}"', keep(f"quick{number}"))
    assert threading.active_count() <= before
    assert all(compiler.cancel(f'start: "quick{number}"') for number in range(1000))
    assert not compiler.cancel('start: "quick0"')
    assert not compiler.cancel('start: "slow0"')
    assert results == {}
    go.set()
    for _ in range(1004):
        assert done.acquire(timeout=60)
    assert results.keys() == {f"slow{number}" for number in range(4)} | {f"quick{i}" for i in range(1000, 2000)}
    assert all(isinstance(result, CompiledGrammar) for result in results.values())


def test_without_a_thread_to_compile_it_a_grammar_fails_and_the_next_one_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiler, results = GrammarCompiler(Path(demo_path()), VOCAB), SimpleQueue[object]()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        compiler.compile_aside('start: "a"', results.put)
        assert "can't start new thread" in str(results.get(timeout=60))
    compiler.compile_aside('start: "a"', results.put)
    assert isinstance(results.get(timeout=60), CompiledGrammar)


def test_large_grammars_are_compiled_where_others_leave_time(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered: list[threading.Thread] = []
    monkeypatch.setattr("chairlift.runners.grammars.grammar_compiler.hold_back", lowered.append)
    # Nothing takes so long, or so much of a core, that it would be noticed.
    monkeypatch.setattr("chairlift.runners.grammars.stopwatch._LONG", 600)
    monkeypatch.setattr("chairlift.runners.grammars.stopwatch.MUCH", 600)
    compiler, results = GrammarCompiler(Path(demo_path()), VOCAB), SimpleQueue[object]()
    assert compiler.tokenizer
    for text, count in (("a", 0), ("b" * 20_000, 1), ("c", 1)):
        compiler.compile_aside(f'start: "{text}"', results.put)
        assert isinstance(results.get(timeout=60), CompiledGrammar)
        assert len(lowered) == count
    while compiler._num_slow:
        time.sleep(0.001)


def test_a_tokenizer_that_breaks_the_library_leaves_a_model_without_grammars(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(demo_path(), folder)
    file = folder / "tokenizer.json"
    whole = json.loads(file.read_text())
    vocabulary, last = whole["model"]["vocab"], "".join(whole["model"]["merges"].pop())
    # It makes the library panic, which is no Exception.
    vocabulary["a" * 2000] = vocabulary.pop(last)
    file.write_text(json.dumps(whole))
    runner, results = DecoderRunner(SequenceConfig(model=str(folder))), SimpleQueue[object]()
    runner.load()
    runner.warm_up()
    runner.compile_grammar('start: "a"', results.put)
    refused = results.get(timeout=60)
    assert isinstance(refused, GrammarError)
    assert str(refused).startswith("the model's tokenizer can't be used with grammars: ")
    with pytest.raises(GrammarError, match="can't be used with grammars"):
        runner.grammars.compile('start: "a"')


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_who_stops_the_program_stops_it_while_a_tokenizer_is_made(
    kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llguidance, "LLTokenizer", Mock(side_effect=kind))
    with pytest.raises(kind):
        GrammarTokenizer(Path(demo_path()), VOCAB)

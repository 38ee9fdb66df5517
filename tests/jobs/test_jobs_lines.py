"""Inputs: every format, and every way in which a line can be wrong."""

import csv
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.items_harness import classifier, embedder, function, reranker
from support.job_harness import batch_line

from chairlift.errors import ConfigError, JobError
from chairlift.jobs.lines import JsonLines, Line, Reader, count_newlines, lines_for, parse_batch_line
from chairlift.run.tables import CsvRows, ParquetRows, count_rows
from chairlift.run.template import Template

GOOD = batch_line("id", {"instances": [1]})


def read_all(reader: Reader, most: int = 7) -> list[Line]:
    lines: list[Line] = []
    while window := reader.read(most, 2**30):
        lines += window
    reader.close()
    return lines


def of(path: Path, raw: bytes, max_line_bytes: int = 1000) -> list[Line]:
    path.write_bytes(raw)
    return read_all(JsonLines(path, parse_batch_line, max_line_bytes))


def kinds(lines: list[Line]) -> list[str]:
    return ["blank" if line.blank else line.error.code if line.error else "good" for line in lines]


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (b"", []),
        (b"\n\n", ["blank", "blank"]),
        (GOOD.encode(), ["good"]),
        (GOOD.encode() + b"\r\n \t\r\n" + GOOD.encode() + b"\r\n", ["good", "blank", "good"]),
        (b"\xef\xbb\xbf" + GOOD.encode() + b"\n", ["good"]),
        (b"\xef\xbb\xbf\n", ["blank"]),
        (GOOD.encode() + b"\n" + GOOD.encode()[:-9], ["good", "invalid_json"]),
        (b'{"custom_id": "\xff"}\n' + GOOD.encode(), ["invalid_json", "good"]),
        (b'{"body":' + b"[" * 900 + b"\n" + GOOD.encode(), ["invalid_json", "good"]),
        (b"7\nnull\n[]", ["invalid_line"] * 3),
        (b"x" * 1001 + b"\n" + GOOD.encode(), ["line_too_long", "good"]),
        (b"x" * 5000, ["line_too_long"]),
        (b" " * 1000 + b"\n" + GOOD.encode(), ["blank", "good"]),
    ],
)
def test_json_lines(raw: bytes, expected: list[str], tmp_path: Path) -> None:
    lines = of(tmp_path / "in", raw)
    assert kinds(lines) == expected
    assert [line.number for line in lines] == list(range(1, len(lines) + 1))
    assert count_newlines(tmp_path / "in") == len(lines)


@pytest.mark.parametrize(
    ("given", "code", "says"),
    [
        ({"custom_id": 3, "method": "POST", "url": "/x", "body": {}}, "invalid_line", "custom_id"),
        ({"method": "POST", "url": "/x", "body": {}}, "missing_field", "custom_id"),
        ({"custom_id": "a", "method": "PUT", "url": "/x", "body": {}}, "invalid_method", "POST"),
        ({"custom_id": "a", "method": "POST", "url": "/x?y", "body": {}}, "invalid_url", "/x?y"),
        ({"custom_id": "a", "method": "POST", "url": "/x", "body": []}, "invalid_body", "object"),
        ({"custom_id": "a", "method": "POST", "url": "/x", "body": {"stream": True}}, "stream_not_supported", "stream"),
        ({"custom_id": "a", "method": "POST", "url": "/x", "body": {}, "extra": 1}, "unknown_field", "extra"),
    ],
)
def test_a_wrong_batch_line_says_what_is_wrong(given: Any, code: str, says: str) -> None:
    line = parse_batch_line(12, json.dumps(given).encode())
    assert line.error is not None
    assert line.error.code == code
    assert line.error.message.startswith("line 12: ")
    assert says in line.error.message
    assert line.custom_id == (b'"a"' if given.get("custom_id") == "a" else b"null")


def test_no_spelling_hides_a_stream() -> None:
    line = parse_batch_line(1, rb'{"custom_id":"a","method":"POST","url":"/x","body":{"\u0073tream":true}}')
    assert line.error is not None
    assert line.error.code == "stream_not_supported"


def test_lines_that_name_no_model_are_for_one() -> None:
    for body in ("{}", " { } ", '{"model":null,"a":[1]}', '{"a": "}" }\t'):
        raw = f'{{"custom_id":"a","method":"POST","url":"/x","body":{body}}}'.encode()
        line = lines_for('the "model"')(1, raw)
        assert line.error is None
        assert json.loads(line.body) == json.loads(body) | {"model": 'the "model"'}
    assert lines_for("m")(1, b"{").error == parse_batch_line(1, b"{").error


def test_counting_ends_when_it_is_to_stop(tmp_path: Path) -> None:
    path = tmp_path / "in"
    path.write_bytes(b"\n" * 2**21)
    asked: list[bool] = []

    def stop() -> bool:
        asked.append(True)
        return len(asked) > 1

    assert count_newlines(path) == 2**21
    assert count_newlines(path, stop) == 2**20


def test_a_good_batch_line() -> None:
    raw = '{"custom_id":"ü\\"","method":"POST","url":"/v1/x","body":{"stream":false, "prompt": "\\"stream\\""}}'
    line = parse_batch_line(1, raw.encode())
    assert line.error is None
    assert json.loads(line.custom_id) == 'ü"'
    assert line.body == b'{"stream":false, "prompt": "\\"stream\\""}'


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_no_line_breaks_the_reader(raw: bytes) -> None:
    line = parse_batch_line(1, raw)
    assert line.error is not None
    json.loads(line.custom_id)


@settings(deadline=None)
@given(
    st.lists(st.sampled_from([GOOD.encode(), b"", b" ", b"{", b"x" * 1500]), max_size=30),
    st.sampled_from([b"\n", b"\r\n"]),
    st.integers(1, 9),
    st.integers(1, 400),
    st.integers(0, 5),
)
def test_reading_can_go_on_after_any_window(
    tmp_path_factory: pytest.TempPathFactory, parts: list[bytes], end: bytes, most: int, size: int, stop: int
) -> None:
    path = tmp_path_factory.mktemp("lines") / "in"
    path.write_bytes(end.join(parts))
    whole = read_all(JsonLines(path, parse_batch_line, 1000))
    first = JsonLines(path, parse_batch_line, 1000)
    lines = []
    for _ in range(stop):
        window = first.read(most, size)
        assert len(window) <= most
        lines += window
    rest = JsonLines(path, parse_batch_line, 1000)
    rest.skip_to(first.number, first.offset)
    first.close()
    assert lines + read_all(rest) == whole


def test_a_huge_line_is_not_read_into_memory(tmp_path: Path) -> None:
    path = tmp_path / "in"
    with path.open("wb") as file:
        for _ in range(40):
            file.write(b"x" * 2**20)
        file.write(b"\n" + GOOD.encode())
    tracemalloc.start()
    try:
        lines = read_all(JsonLines(path, parse_batch_line, 2**16))
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()
    assert kinds(lines) == ["line_too_long", "good"]


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="can't be read: No such file"):
        JsonLines(tmp_path / "none", parse_batch_line)
    with pytest.raises(JobError, match="can't be read"):
        CsvRows(tmp_path / "none", template(), 1000)
    with pytest.raises(JobError, match="can't be read"):
        ParquetRows(tmp_path / "none", template())


# Rows


def template(field: str = "text", id_field: str | None = None) -> Template:
    return Template(function()[0], field, id_field, {})


def bodies(lines: list[Line]) -> list[Any]:
    return [json.loads(line.body) for line in lines]


def test_rows_of_json(tmp_path: Path) -> None:
    path = tmp_path / "in"
    rows = [{"text": "a", "id": "x", "more": {}}, {"text": [1, {"b": None}], "id": 7}, {"id": "y"}, {"text": "z"}, []]
    path.write_text("\n".join(map(json.dumps, rows)))
    lines = read_all(JsonLines(path, template("text", "id").parse))
    assert kinds(lines) == ["good", "good", "missing_field", "missing_field", "invalid_line"]
    assert bodies(lines[:2]) == [{"instances": ["a"]}, {"instances": [[1, {"b": None}]]}]
    assert [line.custom_id for line in lines] == [b'"x"', b'"7"', b'"y"', b"null", b"null"]
    assert lines[0].url == "/v1/models/function:predict"
    assert [line.custom_id for line in read_all(JsonLines(path, template("id").parse))][:2] == [
        b'"line-1"',
        b'"line-2"',
    ]


def test_csv(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    raw = '\ufeffid,text\r\n1,"two\r\nlines, and ""quotes"""\r\n\r\n2,ü\r\n3\r\n'.encode() + b"4,\xff\r\n5,last"
    path.write_bytes(raw)
    lines = read_all(CsvRows(path, template("text", "id"), 1000), 2)
    assert kinds(lines) == ["good", "blank", "good", "invalid_row", "invalid_row", "good"]
    assert bodies([lines[0], lines[2], lines[5]]) == [
        {"instances": ['two\r\nlines, and "quotes"']},
        {"instances": ["ü"]},
        {"instances": ["last"]},
    ]
    assert lines[2].custom_id == b'"2"'
    assert lines[3].error is not None
    assert lines[3].error.message == "row 4: it has 1 fields, and the header 2"
    for number in range(7):
        rest = CsvRows(path, template("text", "id"), 1000)
        rest.skip_to(number, 0)
        assert read_all(rest) == lines[number:]


def test_csv_fields_have_a_limit_and_columns_a_name(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text("text\nshort\n" + "x" * 2000 + "\nshort\n")
    before = csv.field_size_limit()
    try:
        assert kinds(read_all(CsvRows(path, template(), 1000))) == ["good", "invalid_row", "good"]
    finally:
        csv.field_size_limit(before)
    with pytest.raises(JobError, match="no column 'body'; it has text"):
        CsvRows(path, template("body"), 1000)


def test_parquet(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "in.parquet"
    count = 100
    table = arrow.table({"id": list(range(count)), "text": [None if i == 3 else f"t{i}" for i in range(count)]})
    parquet.write_table(table, path, row_group_size=30)
    assert count_rows(path) == count
    lines = read_all(ParquetRows(path, template("text", "id")))
    assert [line.number for line in lines] == list(range(1, count + 1))
    assert kinds(lines) == ["missing_field" if i == 3 else "good" for i in range(count)]
    assert json.loads(lines[50].body) == {"instances": ["t50"]}
    assert lines[50].custom_id == b'"50"'
    for number in (1, 29, 30, 31, 60, 99, 100):
        rest = ParquetRows(path, template("text", "id"))
        rest.skip_to(number, 0)
        assert read_all(rest) == lines[number:]
    with pytest.raises(JobError, match="no column 'body'; it has id, text"):
        ParquetRows(path, template("body"))
    path.write_bytes(b"no parquet")
    with pytest.raises(JobError, match="can't be read"):
        ParquetRows(path, template())


def test_a_row_of_parquet_that_is_not_utf8_is_one_line(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "in.parquet"
    raw = [b"one", b"t\xffwo", b"three"]
    unchecked = arrow.array(raw, arrow.binary()).view(arrow.string())
    parquet.write_table(arrow.table({"text": unchecked}), path)
    lines = read_all(ParquetRows(path, template("text")))
    assert kinds(lines) == ["good", "invalid_row", "good"]
    assert lines[1].error is not None
    assert lines[1].error.message == "row 2: it is not UTF-8"
    assert [line.number for line in lines] == [1, 2, 3]


def test_bodies_suit_the_model() -> None:
    line = Template(embedder()[0], "text", None, {"dimensions": 4}).line(1, {"text": b'"t"'})
    assert (line.url, json.loads(line.body)) == (
        "/v1/embeddings",
        {"model": "embedder", "dimensions": 4, "input": "t"},
    )
    line = Template(classifier()[0], "text", None, {}).line(1, {"text": b'"t"'})
    assert (line.url, json.loads(line.body)) == ("/predict", {"model": "classifier", "inputs": "t"})
    for model, params, chat, says in [
        (embedder()[0], {"dimension": 4}, False, "unknown field 'dimension'"),
        (embedder()[0], {"dimensions": "4"}, False, "dimensions"),
        (embedder()[0], {"input": "x"}, False, "--prompt-field"),
        (embedder()[0], {}, True, "--chat is for language models"),
        (reranker()[0], {}, False, "/v1/rerank"),
        (function()[0], {"x": 1}, False, "takes instances and nothing else"),
    ]:
        with pytest.raises(ConfigError, match=says):
            Template(model, "text", None, params, chat)

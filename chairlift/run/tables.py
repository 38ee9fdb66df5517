"""CSV and Parquet files, a request for each row. Rows count from 1, after the header."""

import csv
import importlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec

from chairlift.errors import ConfigError, JobError
from chairlift.jobs.lines import Line, LineError, unreadable
from chairlift.run.template import Template

_BATCH_ROWS = 1024


class CsvRows:
    """A CSV file with a header, in UTF-8. A row with too few or too many fields, or bad UTF-8, is a line with an error.

    Has no offsets: to skip rows it reads them. Raises JobError if it can't be read or lacks a column.
    """

    def __init__(self, path: Path, template: Template, max_line_bytes: int) -> None:
        self.number = 0
        self.offset = 0
        self._path, self._template = path, template
        # The module has one limit for all; a field above it is an error of its row.
        csv.field_size_limit(max_line_bytes)
        try:
            self._file = path.open(encoding="utf-8-sig", errors="surrogateescape", newline="")
            self._rows = csv.reader(self._file)
            self._header = next(self._rows, [])
        except OSError as error:
            raise unreadable(path, error) from None
        check_columns(path, self._header, template)
        self._places = [self._header.index(name) for name in _columns(template)]

    def skip_to(self, number: int, offset: int) -> None:
        """Read on to a row."""
        while self.number < number and self._next() is not None:
            pass

    def read(self, most: int, max_bytes: int) -> list[Line]:
        """The next rows."""
        lines: list[Line] = []
        size = 0
        while len(lines) < most and size < max_bytes and (line := self._next()) is not None:
            lines.append(line)
            size += len(line.body)
        return lines

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _next(self) -> Line | None:
        try:
            row = next(self._rows, None)
        except csv.Error as error:
            self.number += 1
            return self._wrong(f"it is no CSV: {error}")
        except OSError as error:
            raise unreadable(self._path, error) from None
        if row is None:
            return None
        self.number += 1
        if not row:
            return Line(number=self.number, blank=True)
        if len(row) != len(self._header):
            return self._wrong(f"it has {len(row)} fields, and the header {len(self._header)}")
        try:
            values = [msgspec.json.encode(row[place]) for place in self._places]
        except UnicodeEncodeError:
            return self._wrong("it is not UTF-8")
        return self._template.line(self.number, dict(zip(_columns(self._template), values, strict=True)))

    def _wrong(self, problem: str) -> Line:
        return Line(number=self.number, error=LineError("invalid_row", f"row {self.number}: {problem}"))


class ParquetRows:
    """A Parquet file; reads only the columns that are needed. Raises JobError, and ConfigError without pyarrow."""

    def __init__(self, path: Path, template: Template) -> None:
        self.number = 0
        self.offset = 0
        self._path, self._template = path, template
        try:
            self._file = _pyarrow().ParquetFile(path)
        except (OSError, ValueError) as error:
            raise JobError(f"{path} can't be read: {error}") from None
        check_columns(path, self._file.schema_arrow.names, template)
        self._rows: Iterator[dict[str, Any]] = self._from(0)

    def skip_to(self, number: int, offset: int) -> None:
        """Go to the row's group, and read on from there."""
        before = group = 0
        meta = self._file.metadata
        while group < meta.num_row_groups and before + meta.row_group(group).num_rows <= number:
            before += meta.row_group(group).num_rows
            group += 1
        self._rows = islice(self._from(group), number - before, None)
        self.number = number

    def read(self, most: int, max_bytes: int) -> list[Line]:
        """The next rows."""
        lines: list[Line] = []
        size = 0
        try:
            while len(lines) < most and size < max_bytes and (row := next(self._rows, None)) is not None:
                self.number += 1
                lines.append(self._line(row))
                size += len(lines[-1].body)
        except (OSError, ValueError) as error:
            raise JobError(f"{self._path} can't be read: {error}") from None
        return lines

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _line(self, row: dict[str, Any]) -> Line:
        try:
            values = {name: msgspec.json.encode(value) for name, value in row.items() if value is not None}
        except (TypeError, UnicodeEncodeError) as error:
            problem = LineError("invalid_row", f"row {self.number}: {error}")
            return Line(number=self.number, error=problem)
        return self._template.line(self.number, values)

    def _from(self, group: int) -> Iterator[dict[str, Any]]:
        columns = list(dict.fromkeys(_columns(self._template)))
        groups = range(group, self._file.metadata.num_row_groups)
        for batch in self._file.iter_batches(_BATCH_ROWS, row_groups=list(groups), columns=columns):
            yield from batch.to_pylist()


def count_rows(path: Path) -> int:
    """How many rows a Parquet file has, as it says itself. Raises JobError, and ConfigError without pyarrow."""
    try:
        return int(_pyarrow().ParquetFile(path).metadata.num_rows)
    except (OSError, ValueError) as error:
        raise JobError(f"{path} can't be read: {error}") from None


def check_columns(path: Path, names: list[str], template: Template) -> None:
    """Raise JobError if a column is missing."""
    for name in _columns(template):
        if name not in names:
            raise JobError(f"{path} has no column {name!r}; it has {', '.join(names) or 'none'}")


def _columns(template: Template) -> list[str]:
    return [name for name in (template.field, template.id_field) if name is not None]


def _pyarrow() -> Any:
    try:
        return importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise ConfigError("Parquet files need pyarrow: pip install 'chairlift[parquet]'") from None

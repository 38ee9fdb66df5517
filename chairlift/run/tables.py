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

# A row of a Parquet file, or why it can't be read.
_Row = dict[str, Any] | UnicodeDecodeError


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
            return _wrong(self.number, f"it is no CSV: {error}")
        except OSError as error:
            raise unreadable(self._path, error) from None
        if row is None:
            return None
        self.number += 1
        if not row:
            return Line(number=self.number, blank=True)
        if len(row) != len(self._header):
            return _wrong(self.number, f"it has {len(row)} fields, and the header {len(self._header)}")
        try:
            values = [msgspec.json.encode(row[place]) for place in self._places]
        except UnicodeEncodeError:
            return _wrong(self.number, "it is not UTF-8")
        return self._template.line(self.number, dict(zip(_columns(self._template), values, strict=True)))


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
        self._rows: Iterator[_Row] = self._from(0)

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

    def _line(self, row: _Row) -> Line:
        try:
            if isinstance(row, UnicodeDecodeError):
                raise row
            values = {name: msgspec.json.encode(value) for name, value in row.items() if value is not None}
        except UnicodeError:
            return _wrong(self.number, "it is not UTF-8")
        except TypeError as error:
            return _wrong(self.number, str(error))
        return self._template.line(self.number, values)

    def _from(self, group: int) -> Iterator[_Row]:
        columns = list(dict.fromkeys(_columns(self._template)))
        groups = range(group, self._file.metadata.num_row_groups)
        for batch in self._file.iter_batches(_BATCH_ROWS, row_groups=list(groups), columns=columns):
            yield from _rows_of(batch)


def _rows_of(batch: Any) -> list[_Row]:
    """Its rows. pyarrow makes them all or none, so where one has bad UTF-8 each is made by itself."""
    try:
        return list(batch.to_pylist())
    except UnicodeDecodeError as error:
        if batch.num_rows == 1:
            return [error]
        return [row for place in range(batch.num_rows) for row in _rows_of(batch.slice(place, 1))]


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


def _wrong(number: int, problem: str) -> Line:
    return Line(number=number, error=LineError("invalid_row", f"row {number}: {problem}"))


def _columns(template: Template) -> list[str]:
    return [name for name in (template.field, template.id_field) if name is not None]


def _pyarrow() -> Any:
    try:
        return importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise ConfigError(f"Parquet files need pyarrow: pip install 'chairlift[parquet]' ({error})") from None

"""Rows of a data file: JSON lines, a JSON list, or parquet where pyarrow is installed; and which field means what."""

import importlib
import importlib.util
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from octavo.errors import BackendError, DataError

Row = Mapping[str, Any]

# in this order; the first that a row has. A dot leads into a nested field.
QUESTION_KEYS = ("prompt", "question", "problem", "Problem", "input", "query")
ANSWER_KEYS = (
    "reward_model.ground_truth",  # verl's files: DAPO-Math-17k, its AIME
    "answer",
    "Answer",
    "expected_answer",
    "ground_truth",
    "label",  # slime's files
    "target",
    "output",
    "solution",
    "Solution",
)


def read_rows(path: str | Path) -> Iterator[tuple[int, Row]]:
    """(index from 0, row) of each row of a .jsonl, .json or .parquet file.

    Raises:
        DataError: no such file, another format, or a row that is no object, named by its line.
        BackendError: parquet without pyarrow.
    """
    file = Path(path)
    if not file.is_file():
        raise DataError(f"{path}: no such file; give task.path a .jsonl, .json or .parquet file")
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".parquet": _read_parquet}
    if file.suffix not in readers:
        raise DataError(f"{path}: must end in .jsonl, .json or .parquet")
    return enumerate(readers[file.suffix](file))


def find_field(row: Row, key: str, candidates: tuple[str, ...], where: str) -> Any:
    """A row's field: the one that is named, else the first of the candidates.

    Raises:
        DataError: the row has none of them.
    """
    for name in (key,) if key else candidates:
        value: Any = row
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None:
            return value
    looked_for = repr(key) if key else ", ".join(candidates)
    raise DataError(
        f"{where} has no field {looked_for}; its fields are {', '.join(map(str, row))}: name one by "
        "task.question_key or task.answer_key"
    )


def _read_jsonl(file: Path) -> Iterator[Row]:
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _as_row(_parse(line, f"{file}, line {number}"), f"{file}, line {number}")


def _read_json(file: Path) -> Iterator[Row]:
    rows = _parse(file.read_text(encoding="utf-8"), str(file))
    if not isinstance(rows, list):
        raise DataError(
            f"{file}: must be a list of objects, got {type(rows).__name__}; or write JSON lines to a .jsonl"
        )
    for index, row in enumerate(rows):
        yield _as_row(row, f"{file}, row {index}")


def _read_parquet(file: Path) -> Iterator[Row]:
    if importlib.util.find_spec("pyarrow") is None:
        raise BackendError(f"{file}: parquet files need pyarrow; pip install pyarrow, or write the rows as JSON lines")
    parquet = importlib.import_module("pyarrow.parquet")
    try:
        for batch in parquet.ParquetFile(file).iter_batches():
            yield from batch.to_pylist()
    except ValueError as error:  # pyarrow.ArrowInvalid
        raise DataError(f"{file}: not a parquet file: {error}") from error


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise DataError(f"{where}: not valid JSON: {error}") from None


def _as_row(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise DataError(f"{where}: must be an object with a question and an answer, got {type(value).__name__}")
    return value

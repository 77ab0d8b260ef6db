"""Files of measured lines as CSV: written whole, or added to."""

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tilery.base import files
from tilery.base.errors import BadInput

Line = dict[str, Any]


def write(path: Path, columns: Sequence[str], lines: Iterable[Line]) -> None:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns)
    writer.writeheader()
    writer.writerows(lines)
    files.write(path, text.getvalue())


def measured(path: Path, columns: Sequence[str]) -> list[Line]:
    """The lines of a file that more is to be added to, but for cases that were left out; none if it is not there."""
    if not path.exists():
        return []
    try:
        with path.open(newline="", encoding="utf-8") as opened:
            reader = csv.DictReader(opened)
            lines, found = list(reader), reader.fieldnames or []
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise BadInput(f"{path} cannot be read: {error}; name another file") from None
    if list(found) != list(columns):
        odd = ", ".join(sorted(set(found) ^ set(columns))) or "the same ones in another order"
        raise BadInput(
            f"{path} has other columns than what would be added ({odd}); name another file, or leave out --add"
        )
    return [line for line in lines if line.get("status") != "skipped"]


def problems(lines: Iterable[Line]) -> set[tuple[str, str]]:
    """The ops and cases of lines."""
    return {(line["op"], line["case"]) for line in lines}

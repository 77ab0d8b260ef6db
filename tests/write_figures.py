"""Writes the figures of README and docs anew from results/*.csv, each with as many digits as it has now.

    PYTHONPATH=tests python -m write_figures [DOCUMENT.md …]        every document with figures, if none is named

Only numbers that name their source are written, and the bold face of their cells. A row or column that is new, words
and marks are written by hand; what is still wrong after that is printed, and is the exit code.
"""

import re
import sys
from pathlib import Path

import figures
from measured import NUMBER, Wrong, value_of

RATIO = re.compile(r"ratio|speedup|vs_(?!.*_(?:low|high)$)\w+")  # of a cell's numbers the one that is set in bold


def printed(value: float, like: str) -> str:
    """The value with the digits behind the point, and the thousands' commas, of what stands there."""
    digits, power, _ = like.partition("e")
    decimals = len(digits.partition(".")[2])
    if power:
        return re.sub(r"e\+?(-?)0*", r"e\1", f"{value:.{decimals}e}")
    return f"{value:,.{decimals}f}" if "," in like else f"{value:.{decimals}f}"


def written(text: str) -> str:
    """The document with the figures of today's results."""
    for block in figures.blocks(text):
        made = _with_quotes(block.text)
        if block.table:
            made = _with_cells(block)
        text = text.replace(block.text, made)
    return text


def _with_quotes(text: str) -> str:
    def replaced(found: re.Match) -> str:
        try:
            value, *_ = figures.quoted(found)
        except Wrong:
            return found[0]
        return printed(value, found["number"]) + found[0].removeprefix(found["number"])

    return figures.QUOTE.sub(replaced, text)


def _with_cells(block: figures.Block) -> str:
    source = figures.TableSource.parse(block.table or "")
    lines, table = block.text.splitlines(keepends=True), figures.table_lines(block.text)
    first = next(i for i, line in enumerate(lines) if line.strip())
    changed = set()
    for cell in figures.cells(block, source):
        if isinstance(cell, str):
            continue
        try:
            table[cell.at[0]][cell.at[1]] = _with_numbers(cell, source)
        except Wrong:
            continue
        changed.add(cell.at[0])
    for at in changed:
        lines[first + at] = f"| {' | '.join(table[at])} |\n".replace("|  |", "|  |")
    return "".join(lines)


def _with_numbers(cell: figures.Cell, source: figures.TableSource) -> str:
    row, names = cell.row(source.file), cell.column.values
    numbers = [printed(value_of(row, name), like) for name, like in zip(names, cell.numbers)]
    if cell.column.bold is not None and row.takes(cell.column.bold):
        ratio = next((i for i, name in enumerate(names) if RATIO.fullmatch(name)), 0)
        numbers[ratio] = f"**{numbers[ratio]}**"
    given = iter(numbers)
    plain = cell.text if cell.column.bold is None else cell.text.replace("**", "")
    text = NUMBER.sub(lambda _: next(given), plain)
    name = cell.column.name
    return text if name is None else f"{text.removesuffix(cell.name)}{row.columns[name]}"


def main(names: list[str]) -> int:
    failed = 0
    for path in [Path(name).resolve() for name in names] or figures.DOCUMENTS:
        text = path.read_text(encoding="utf-8")
        made = written(text)
        path.write_text(made, encoding="utf-8")
        left = figures.wrong(made)
        failed += len(left)
        print("\n".join([f"{path.name}: {'written' if made != text else 'as it was'}", *left]))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

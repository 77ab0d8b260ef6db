"""Figures in documents, held against results/*.csv. CONTRIBUTING.md, "Figures in docs", says how they are written.

Comments in the Markdown name the source of a figure: one behind a number in a sentence (`Quote`), one before a table
(`TableSource`). A number with a unit that has neither, and is not marked as a scan, is reported by `unsourced`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from measured import NUMBER, Result, Wrong, agrees, chosen, value_of
from tilery.pages.summary import geometric_mean

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "docs" / "ladder.md", *sorted((ROOT / "docs" / "perf").glob("*.md"))]

MARKS = {  # in a comment -> what a reader must see in the text
    "scan": re.compile(r"\b(scans?|screens?|not kept|support no claim)\b", re.IGNORECASE),
    "not yet re-measured": re.compile(r"not yet re-measured", re.IGNORECASE),
}
COMMENT = re.compile(r"<!--(.*?)-->", re.DOTALL)
FUNCTIONS = {"mean": geometric_mean, "least": min, "most": max, "count": len, "value": sum}

UNIT = r"µs|ms|ns|TFLOP/s|TB/s|GB/s|%|times|×(?!\s*[\dK])|GHz"
MEASURED = re.compile(rf"(?<![\w.×·-])(?:\d+\.\d+(?![\w.])|\d+(?:,\d{{3}})*(?=[ ](?:{UNIT})(?!\w)))")
NO_MEASUREMENT = re.compile(  # numbers with a unit that state a rule, a version or a size
    r"95 %|(?:used|run) \d+ times|(?:more|less) than \d+ %|\d+ % over the whole"
    r"|turns? (?:of|lasts) \d+ ms|rounds of \d+ ms|\d+ ms turns|\d+ ms of warm-up"
    r"|v?\d+\.\d+\.\d+\S*|(?:torch|triton|CUDA|cuDNN|Liger|TileLang|cuTile|Numba|NumPy|numba-cuda|ptxas|TileGym|DeepGEMM"
    r"|Llama|tileiras|Python|driver)[ -]\d+\.\d+",
    re.IGNORECASE,
)


@dataclass
class Block:
    """Lines between blank lines."""

    text: str
    line: int
    section: tuple[str, ...]  # the headings that it stands under
    marks: set[str] = field(default_factory=set)
    table: "str | None" = None  # the comment that names the source of a table

    @property
    def is_table(self) -> bool:
        return self.text.lstrip().startswith("|")

    @property
    def visible(self) -> str:
        return COMMENT.sub("", self.text)


def blocks(text: str) -> list[Block]:
    """With the marks that hold for each: those of its section, of the comment before it, and of its own."""
    fences = lambda found: re.sub(r"[^\n]", "", found[0])  # noqa: E731
    text = re.sub(r"^ *```.*?^ *```$", fences, text, flags=re.MULTILINE | re.DOTALL)
    found: list[Block] = []
    path: list[tuple[int, str]] = []
    marked: dict[tuple[str, ...], set[str]] = {}
    waiting: set[str] = set()
    source = None
    after_heading = False
    for piece in re.finditer(r"(?:[^\n]*\S[^\n]*\n?)+", text):
        heading = re.match(r"(#+) (.*)", piece[0])
        if heading:
            path = [(depth, title) for depth, title in path if depth < len(heading[1])] + [
                (len(heading[1]), heading[2])
            ]
            after_heading = True
            if len(piece[0].splitlines()) == 1:
                continue
        section = tuple(title for _, title in path)
        comments = [comment.strip() for comment in COMMENT.findall(piece[0])]
        marks = {comment for comment in comments if comment in MARKS}
        if not COMMENT.sub("", piece[0]).strip():
            if after_heading:
                marked.setdefault(section, set()).update(marks)
            else:
                waiting |= marks
            source = next((c for c in comments if c.startswith("from:")), source)
            continue
        of_sections = set().union(*(marked.get(section[: i + 1], set()) for i in range(len(section))))
        block = Block(piece[0], text.count("\n", 0, piece.start()) + 1, section, of_sections | waiting | marks)
        if block.is_table:
            block.table, source = source, None
        found.append(block)
        waiting, after_heading = set(), False
    return found


def unseen_marks(found: list[Block]) -> Iterator[str]:
    """Marks that a reader does not see: the words stand in the block, or before it under the same heading."""
    for i, block in enumerate(found):
        before = [other for other in found[:i] if other.section == block.section[: len(other.section)]]
        for mark in block.marks:
            if not any(MARKS[mark].search(other.visible) for other in (block, *before)):
                yield f"line {block.line}: expected the words of the mark {mark!r} in the text before or here, got none"


QUOTE = re.compile(
    rf"(?P<number>{NUMBER.pattern})(?:[*)]|[ ]?(?:{UNIT}))*"
    rf"<!--\s*(?P<what>{'|'.join(FUNCTIONS)})\s+(?P<rest>(?:(?!-->).)*?)\s*-->"
)


def wrong_quotes(block: Block) -> Iterator[str]:
    """`1.19 ×<!-- mean fp8-h200.csv peer=deepgemm M<=128 -->`: function, file, column if not the ratio, conditions."""
    for found in QUOTE.finditer(block.text):
        try:
            value, file, rows = quoted(found)
        except Wrong as why:
            yield f"line {block.line}: {why}"
            continue
        if not agrees(found["number"], value):
            source = f"{found['what']} {found['rest']}"
            yield f"line {block.line}: {found['number']} is printed, results/{file} has {value:.5g} ({source})"
        yield from unmarked(block, file, rows)
    left = len(re.findall(rf"<!--\s*(?:{'|'.join(FUNCTIONS)})\s", block.text)) - len(QUOTE.findall(block.text))
    if left:
        yield f"line {block.line}: expected a number right before each comment, got {left} without one"


def quoted(found: re.Match) -> tuple[float, str, list[Result]]:
    """What a quote should print, and the file and rows that it comes from."""
    file, *words = found["rest"].split()
    column = next((word for word in words if not re.search(r"[<>=]", word)), None)
    rows = chosen(file, [word for word in words if word != column])
    if not rows or (found["what"] == "value" and len(rows) > 1):
        wanted = "one row" if found["what"] == "value" else "rows"
        raise Wrong(f"expected {wanted} for {found['what']} {found['rest']}, got {len(rows)}")
    if found["what"] == "count":
        return float(len(rows)), file, rows
    name = column or ("speedup" if "speedup" in rows[0].columns else "ratio")
    return FUNCTIONS[found["what"]]([value_of(one, name) for one in rows]), file, rows


def unmarked(block: Block, file: str, rows: list[Result]) -> Iterator[str]:
    """What the quoted rows need said about them; a scan claims nothing, so its kernels may have changed."""
    if "scan" in block.marks:
        return
    if "screen" in file:
        yield f"line {block.line}: {file} is a screen, which claims nothing: mark the section <!-- scan --> and say so"
    if "not yet re-measured" not in block.marks and not all(one.is_current for one in rows):
        old = next(one for one in rows if not one.is_current).columns
        yield (
            f"line {block.line}: {file} was measured with another {old['op']} {old['kernel']} than there is now: "
            "measure again, or mark it <!-- not yet re-measured --> and say so"
        )


@dataclass(frozen=True)
class Column:
    header: re.Pattern
    values: tuple[str, ...]
    conditions: tuple[str, ...]
    bold: str | None
    name: str | None  # the column of the results whose text stands behind the numbers


@dataclass(frozen=True)
class TableSource:
    """What a `from:` comment says: the file, how keys of rows are read, and what each column holds."""

    file: str
    keys: tuple[tuple[re.Pattern, tuple[str, ...]], ...]
    columns: tuple[Column, ...]

    @classmethod
    def parse(cls, comment: str) -> "TableSource":
        first, *lines = [line.strip() for line in comment.removeprefix("from:").strip().splitlines()]
        file, *everywhere = first.split()
        keys, columns = [], []
        for line in lines:
            kind, _, rest = line.partition(":")
            shown, *parts = [part.strip() for part in rest.split(";")]
            if kind == "row":
                keys.append((_template(shown), (*everywhere, *" ".join(parts).split())))
            elif kind == "column":
                header, _, values = shown.rpartition("=")
                said = {part.partition(" ")[0]: part.partition(" ")[2] for part in parts}
                conditions = " ".join(part for part in parts if part.partition(" ")[0] not in ("bold", "name")).split()
                column = _template(header.strip()), tuple(values.split()), tuple(conditions)
                columns.append(Column(*column, said.get("bold"), said.get("name")))
            else:
                raise Wrong(f"expected row: or column: in a from: comment, got {line!r}")
        return cls(file, tuple(keys), tuple(columns))


def _template(text: str) -> re.Pattern:
    """`{n}, {k}`: the names are columns of the results."""
    parts = re.split(r"\{(\w+)\}", text)
    return re.compile("".join(f"(?P<{part}>[\\w.]+)" if i % 2 else re.escape(part) for i, part in enumerate(parts)))


@dataclass(frozen=True)
class Cell:
    """A cell of a table with numbers in it: where it stands, and what says what they are."""

    where: str
    at: tuple[int, int]  # line of the block, cell of the line
    text: str
    column: Column
    conditions: list[str]

    @property
    def numbers(self) -> list[str]:
        return NUMBER.findall(self.text)

    @property
    def name(self) -> str:
        """What stands behind the numbers."""
        return self.text.rpartition(" ")[2]

    def row(self, file: str) -> Result:
        """The row of the results that it shows."""
        rows = chosen(file, self.conditions)
        if len(rows) != 1:
            raise Wrong(f"expected one row of results/{file} for {' '.join(self.conditions)}, got {len(rows)}")
        if len(self.numbers) != len(self.column.values):
            names = self.column.values
            raise Wrong(f"expected {len(names)} numbers ({' '.join(names)}), got {self.text!r}")
        return rows[0]


def table_lines(text: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in text.strip().splitlines()]


def cells(block: Block, source: TableSource) -> Iterator[Cell | str]:
    """Every cell with a number, or why nothing says what it is."""
    header, _, *lines = table_lines(block.text)
    for at, (first, *others) in enumerate(lines, 2):
        where = f"line {block.line + at}, {first!r}"
        matches = [(found, more) for key, more in source.keys if (found := key.fullmatch(first))]
        if not matches:
            yield f"{where}: expected a row: of the from: comment to match, got none"
            continue
        found, more = matches[0]
        key = [*more, *(f"{name}={text}" for name, text in found.groupdict().items())]
        for i, (title, text) in enumerate(zip(header[1:], others), 1):
            columns = [(column, seen) for column in source.columns if (seen := column.header.fullmatch(title))]
            if not NUMBER.search(text):
                continue
            if not columns:
                yield f"{where}, {title!r}: expected a column: of the from: comment to match, got none"
                continue
            column, seen = columns[0]
            conditions = [*key, *column.conditions, *(f"{name}={text}" for name, text in seen.groupdict().items())]
            yield Cell(f"{where}, {title!r}", (at, i), text, column, conditions)


def wrong_cells(block: Block) -> Iterator[str]:
    """Of a table with a source: every number must be that of its row and column, as it is printed."""
    source = TableSource.parse(block.table or "")
    for cell in cells(block, source):
        if isinstance(cell, str):
            yield cell
            continue
        try:
            row = cell.row(source.file)
        except Wrong as why:
            yield f"{cell.where}: {why}"
            continue
        for printed, name in zip(cell.numbers, cell.column.values):
            value = value_of(row, name)
            if not agrees(printed, value):
                yield f"{cell.where}: {printed} is printed, results/{source.file} has {name} = {value:.5g}"
        bold = cell.column.bold
        if bold is not None and ("**" in cell.text) != row.takes(bold):
            yield f"{cell.where}: expected {'bold' if row.takes(bold) else 'no bold'} ({bold}), got {cell.text!r}"
        if cell.column.name is not None and cell.name != row.columns[cell.column.name]:
            right = f"{cell.column.name} = {row.columns[cell.column.name]}"
            yield f"{cell.where}: {cell.name!r} is printed, results/{source.file} has {right}"
        yield from (f"{cell.where}: {why}" for why in unmarked(block, source.file, [row]))


def unsourced(block: Block) -> Iterator[str]:
    """Numbers with a unit, and decimals, that nothing says the source of."""
    if "scan" in block.marks or block.table:
        return
    text = QUOTE.sub("", block.text)
    text = COMMENT.sub("", text)
    text = re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)
    text = NO_MEASUREMENT.sub("", text)
    numbers = list(MEASURED.finditer(text))
    for found in numbers[:1] if block.is_table else numbers:
        around = " ".join(text[max(found.start() - 30, 0) : found.end() + 30].split())
        yield (
            f"line {block.line}: expected the source of {found[0]} in {around!r}, got none: add a comment with "
            "its file, or mark the section <!-- scan -->"
        )


def wrong(text: str) -> list[str]:
    """Everything that is wrong with the figures of a document."""
    found = blocks(text)
    reasons = list(unseen_marks(found))
    for block in found:
        try:
            reasons += [*wrong_quotes(block), *unsourced(block), *(wrong_cells(block) if block.table else ())]
        except Wrong as why:
            reasons.append(f"line {block.line}: {why}")
    return list(dict.fromkeys(reasons))

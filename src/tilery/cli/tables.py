"""Tables that fit the terminal: no word and no figure is cut. What the width does not hold stands elsewhere.

What all rows share is said once above them, rows of one op and case stand under a heading, long texts wrap or stand
below their row, spare columns are left out by name, and reasons are paragraphs below the table.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from tilery.cli.surroundings import printable

JOINED = "\u00a0"  # a space at which no line ends
_GAP = 2  # columns of the terminal between two of a table, and of an indent
_LEAST = 24  # columns that a long text must have beside the others; with fewer it stands below its row


@dataclass(frozen=True)
class Column:
    """A column of a table. One that no row fills is not shown."""

    name: str
    right: bool = False  # a figure
    heading: bool = False  # rows that have the same stand under it
    long: bool = False  # may wrap, or stand below its row
    said_once: bool = False  # stands above the table if it is the same in all rows
    spare: int = 0  # is left out where the width does not hold all: of several the highest first; 0: never


def key(text: str) -> Column:
    """A column that tells rows apart."""
    return Column(text)


def figure(text: str, spare: int = 0) -> Column:
    return Column(text, right=True, spare=spare)


def fact(text: str, spare: int = 0) -> Column:
    """A column of words that are often the same in all rows."""
    return Column(text, said_once=True, spare=spare)


def heading(text: str) -> Column:
    return Column(text, heading=True)


def long(text: str) -> Column:
    return Column(text, long=True)


@dataclass
class Table:
    """Cells may have markup. Prints itself as wide as the console is."""

    title: str
    columns: Sequence[Column]
    rows: Iterable[Iterable[str]]
    indices: list[int] = field(init=False)  # of the columns that are filled and not said once
    cells: list[list[Text]] = field(init=False)

    def __post_init__(self) -> None:
        self.cells = [[Text.from_markup(printable(cell)) for cell in row] for row in self.rows]
        self.indices = [
            i for i in range(len(self.columns)) if any(row[i].plain for row in self.cells) and i not in self._shared()
        ]

    def _shared(self) -> list[int]:
        """Columns that are said once."""
        if len(self.cells) < 2:
            return []
        values = [{row[i].plain for row in self.cells} for i in range(len(self.columns))]
        return [i for i, c in enumerate(self.columns) if c.said_once and len(values[i]) == 1 and "" not in values[i]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = options.max_width
        yield from Paragraph(self.title, style="italic").lines(width)
        if shared := [f"{self.columns[i].name} {self.cells[0][i].plain}" for i in self._shared()]:
            yield from Paragraph(f"all rows: {', '.join(shared)}").lines(width)
        chosen = next((layout for layout in self._layouts() if layout.fits(width)), None)
        if chosen is None:
            yield from self._records(width)
            return
        yield from chosen.lines(width)
        if left_out := [self.columns[i].name for i in self.indices if i not in chosen.shown]:
            # Not all are in --json: "× first" of a ladder is computed for the table.
            said = f"{', '.join(left_out)}: not shown in {width} columns; a wider terminal shows them"
            yield from Paragraph(f"{said}, and --json has all that was measured").lines(width)

    def _layouts(self) -> "Iterator[_Layout]":
        """The first that fits is taken."""
        heads = [i for i in self.indices if self.columns[i].heading]
        if heads and len({_values(row, heads) for row in self.cells}) == len(self.cells):
            yield _Layout(self, [], self.indices, [])  # a heading of each row alone is a column, if there is room
        beside = [i for i in self.indices if i not in heads]
        below = [i for i in beside if self.columns[i].long]
        yield _Layout(self, heads, beside, [])
        beside = [i for i in beside if i not in below]
        for spare in (0, *sorted({self.columns[i].spare for i in beside} - {0}, reverse=True)):
            beside = [i for i in beside if not spare or self.columns[i].spare < spare]
            yield _Layout(self, heads, beside, below)

    def _records(self, width: int) -> Iterator[Text]:
        """Every row as a paragraph."""
        for row in self.cells:
            said = (f"{self.columns[i].name}{JOINED}{row[i].plain}" for i in self.indices if row[i].plain)
            yield from Paragraph(", ".join(said), hang=_GAP).lines(width)


def _values(row: list[Text], indices: list[int]) -> tuple[str, ...]:
    return tuple(row[i].plain for i in indices)


@dataclass
class _Layout:
    """Where the columns of a table are: above their rows, beside each other, or below their row."""

    table: Table
    heads: list[int]
    beside: list[int]
    below: list[int]

    @property
    def shown(self) -> list[int]:
        return [*self.heads, *self.beside, *self.below]

    @property
    def indent(self) -> int:
        return _GAP if self.heads else 0

    def fits(self, width: int) -> bool:
        return self._widths(width) is not None

    def _widths(self, width: int) -> dict[int, int] | None:
        """The width of each column; None if they do not fit."""
        columns = self.table.columns
        found = {
            i: max(len(printable(columns[i].name)), *(row[i].cell_len for row in self.table.cells)) for i in self.beside
        }
        free = width - self.indent - _GAP * (len(found) - 1) - sum(found.values())
        wrapping = sorted((i for i in found if columns[i].long), key=lambda i: found[i])
        if free >= 0:
            return found
        free += sum(found[i] for i in wrapping)
        for place, i in enumerate(wrapping):
            share = min(found[i], free // (len(wrapping) - place))
            if share < min(found[i], max(_LEAST, self._longest_word(i))):
                return None
            found[i], free = share, free - share
        return found if wrapping else None

    def _longest_word(self, i: int) -> int:
        return max(len(word) for row in self.table.cells for word in ("", *row[i].plain.split()))

    def lines(self, width: int) -> Iterator[Text]:
        widths = self._widths(width)
        assert widths is not None, "only a layout that fits is printed"
        yield from self._line([Text(printable(c.name), "bold") for c in self.table.columns], widths)
        groups: dict[tuple[str, ...], list[list[Text]]] = {}
        for row in self.table.cells:
            groups.setdefault(_values(row, self.heads), []).append(row)
        for head, rows in groups.items():
            if self.heads:
                yield from Paragraph(" ".join(filter(None, head)), hang=_GAP, style="bold").lines(width)
            for row in rows:
                yield from self._line(row, widths)
                for i in (i for i in self.below if row[i].plain):
                    yield from Paragraph(row[i].plain, indent=self.indent + _GAP, style="dim").lines(width)

    def _line(self, cells: list[Text], widths: dict[int, int]) -> Iterator[Text]:
        """A row, of several lines where a cell wraps."""
        wrapped = {i: [cells[i]] if cells[i].cell_len <= w else _wrap_text(cells[i], w) for i, w in widths.items()}
        for number in range(max(map(len, wrapped.values()), default=0)):
            line = Text(" " * self.indent, no_wrap=True, overflow="ignore")
            for place, (i, parts) in enumerate(wrapped.items()):
                cell = parts[number] if number < len(parts) else Text()
                pad = " " * (widths[i] - cell.cell_len)
                line.append(" " * _GAP if place else "")
                line.append_text(Text(pad).append_text(cell) if self.table.columns[i].right else cell.copy())
                line.append("" if self.table.columns[i].right else pad)
            line.rstrip()
            yield line


def _wrap_text(cell: Text, width: int) -> list[Text]:
    return [Text(line) for line in fill(cell.plain, width)]


@dataclass
class Paragraph:
    """Text that wraps at words. Prints itself as wide as the console is."""

    text: str
    indent: int = 0
    hang: int = 0  # of the lines after the first, besides
    style: str = ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self.lines(options.max_width)

    def lines(self, width: int) -> Iterator[Text]:
        for number, line in enumerate(fill(printable(self.text), width - self.indent, self.hang) or [""]):
            left = " " * (self.indent + (self.hang if number else 0))
            yield Text(left, no_wrap=True, overflow="ignore").append(line, self.style)


@dataclass
class Command:
    """A command for a shell; where it wraps, a backslash ends the line, so that it can be copied."""

    text: str
    indent: int = 0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        *lines, last = fill(self.text, options.max_width - self.indent - len(" \\"), _GAP)
        for number, line in enumerate((*(f"{line} \\" for line in lines), last)):
            yield Text(" " * (self.indent + (_GAP if number else 0)) + line, no_wrap=True, overflow="ignore")


def fill(text: str, width: int, hang: int = 0) -> list[str]:
    """Lines of at most `width`, `hang` fewer after the first; a word that is longer is cut behind a comma or slash."""
    lines: list[str] = []
    for paragraph in text.splitlines():
        fresh = True  # what begins a line of the text begins one here
        for word in re.findall(r"[^ \t]+", paragraph):
            if not fresh and len(lines[-1]) + 1 + len(word) <= (width if len(lines) == 1 else width - hang):
                lines[-1] += f" {word}"
            else:
                lines += _pieces(word, max(width - (hang if lines else 0), 1))
            fresh = False
    return [line.replace(JOINED, " ") for line in lines]


def _pieces(word: str, width: int) -> list[str]:
    """A word as it is or, if it is too long, cut behind commas and slashes, and anywhere if that is not enough."""
    parts = [part[i : i + width] for part in re.split(r"(?<=[,/])", word) for i in range(0, len(part), width)]
    made = [""]
    for part in parts:
        if len(made[-1]) + len(part) > width:
            made.append("")
        made[-1] += part
    return made


@dataclass(frozen=True)
class Reason:
    """Why a row is not as the others: `why` stands once, with all rows that have it."""

    status: str
    why: str
    kernel: str
    of: str = ""  # the op and the case


@dataclass
class Reasons:
    """Paragraphs below a table: each reason, then the rows it concerns."""

    reasons: Iterable[Reason]
    styles: dict[str, str] = field(default_factory=dict)  # by status

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        groups: dict[tuple[str, str], dict[str, list[str]]] = {}
        for one in self.reasons:
            groups.setdefault((one.status, one.why), {}).setdefault(one.kernel, []).append(one.of)
        for (status, why), kernels in groups.items():
            first, *others = Paragraph(f"{status}: {why}", hang=_GAP).lines(options.max_width)
            first.stylize(self.styles.get(status, ""), 0, len(status))
            yield from (first, *others)
            rows = {kernel: "; ".join(dict.fromkeys(filter(None, of))) for kernel, of in kernels.items()}
            alone = ", ".join(kernel for kernel, of in rows.items() if not of)
            for said in filter(None, (alone, *(f"{kernel}: {of}" for kernel, of in rows.items() if of))):
                yield from Paragraph(said, 2 * _GAP, _GAP).lines(options.max_width)

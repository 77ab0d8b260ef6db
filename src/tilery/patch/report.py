"""What a patch replaced, what it left in torch and why, and what a proof measured: data that prints as a table."""

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

WIDTH = 80


@dataclass(frozen=True)
class Replaced:
    piece: str  # norms, rope, mlp, qkv, experts, attention or loss
    module: str  # its class
    count: int
    ops: tuple[str, ...]  # that its forward calls


@dataclass(frozen=True)
class Left:
    piece: str
    module: str
    count: int
    why: str


@dataclass(frozen=True)
class Error:
    """Relative errors of a module's output, against the same module computed in float32."""

    module: str  # by its name in the model
    tokens: int
    patched: float
    unpatched: float
    allowed: float


@dataclass
class PatchReport:
    architecture: str
    replaced: list[Replaced] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)
    errors: list[Error] = field(default_factory=list)  # with verify=True

    def __str__(self) -> str:
        said = [f"{self.architecture}: patched"]
        said += table(
            ("piece", "module", "count", "ops"),
            [(r.piece, r.module, str(r.count), ", ".join(r.ops)) for r in self.replaced],
        )
        if self.left:
            said += ["", "in torch"]
            said += table(
                ("piece", "module", "count", "why"), [(e.piece, e.module, str(e.count), e.why) for e in self.left]
            )
        if self.errors:
            said += ["", "relative error against float32, on the same inputs"]
            said += table(
                ("module", "tokens", "patched", "in torch", "allowed"),
                [
                    (e.module, str(e.tokens), f"{e.patched:.1e}", f"{e.unpatched:.1e}", f"{e.allowed:.1e}")
                    for e in self.errors
                ],
            )
        return "\n".join(said)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], width: int = WIDTH) -> list[str]:
    """Lines of at most `width`: the last column wraps, and the first where that is not enough.

    A cell more than there are heads stands below its row.
    """
    rows = [tuple(row) for row in rows]
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]
    for i, least in ((-1, 24), (0, 12)):
        over = sum(widths) + 2 * (len(widths) - 1) - width
        widths[i] -= max(min(over, widths[i] - least), 0)
    lines: list[str] = []
    for row in (tuple(heads), *rows):
        cells = [_wrapped(text, size) for text, size in zip(row, widths)]
        for number in range(max(map(len, cells))):
            parts = [(cell[number] if number < len(cell) else "").ljust(size) for cell, size in zip(cells, widths)]
            lines.append("  ".join(parts).rstrip())
        lines += [f"    {line}" for text in row[len(heads) :] for line in _wrapped(text, width - 4)]
    return lines


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False) or [""]

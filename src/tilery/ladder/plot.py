"""The ladder as a picture: a panel per problem, a bar per rung, torch as a line. Needs matplotlib."""

import io
from typing import Any

from tilery.base.errors import BadInput
from tilery.ladder.rungs import RUNGS
from tilery.measure.result import BASE, Row
from tilery.pages import plot as pictures
from tilery.pages.summary import COLOURS, PEER_COLOUR


def picture(rows: list[Row], form: str) -> bytes:
    timed = [row for row in rows if row.tflops]
    if not any(row.kernel in RUNGS for row in timed):
        raise BadInput("a picture of the ladder shows rungs that were timed, and none was: it takes a GPU")
    matplotlib = pictures.library()
    problems = list(dict.fromkeys(row.case for row in timed))
    with matplotlib.rc_context(pictures.STYLE):
        heights = [len([r for r in timed if r.case == problem and r.kernel in RUNGS]) + 1.5 for problem in problems]
        figure, axes = pictures.drawing(8, 0.32 * sum(heights) + 0.6, heights)
        for axis, problem in zip(axes, problems):
            _panel(axis, [row for row in timed if row.case == problem])
        data = io.BytesIO()
        figure.savefig(data, format=form, dpi=160, metadata={"Date": None} if form == "svg" else None)
    return data.getvalue()


def _panel(axis: Any, rows: list[Row]) -> None:
    rungs = [row for row in rows if row.kernel in RUNGS]
    rates = [row.tflops or 0.0 for row in rungs]
    axis.barh(range(len(rungs)), rates, color=COLOURS["cuda"][0], height=0.7)
    for place, (row, rate) in enumerate(zip(rungs, rates)):
        words = f" {rate:.3g}" + (f"  ({row.ratio:.1%} of torch)" if row.ratio is not None else "")
        axis.annotate(words, (rate, place), va="center", color=pictures.MUTED, fontsize=8)
    base = next((row.tflops for row in rows if row.kernel == BASE), None)
    if base:
        axis.axvline(base, color=PEER_COLOUR[0], linewidth=1.2, linestyle="--")
    axis.set(xscale="log", xlabel="TFLOP/s; the line is torch", ylim=(len(rungs) - 0.4, -0.6))
    axis.set_xlim(min(rates) / 2, 8 * max([*rates, base or 0.0]))  # room for the words
    axis.set_yticks(range(len(rungs)), [row.kernel for row in rungs], color=pictures.INK)
    axis.set_title(f"{rows[0].device}: {rows[0].case}")
    axis.grid(visible=False, axis="y")
    pictures.log_ticks(axis.xaxis, pictures.plain)

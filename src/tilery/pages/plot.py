"""Runs as pictures: ratios, roofline, time against size, heat map, what a tuner tried. Needs matplotlib."""

import io
import math
from collections.abc import Callable
from typing import Any

from tilery.base.errors import BadInput, ToolMissing
from tilery.measure.result import is_ours
from tilery.pages import landscape, summary
from tilery.pages.summary import BASE, Collected, Found, Style

KINDS = ("ratio", "roofline", "time", "heat", "landscape")
FORMATS = ("png", "svg")
_MARKERS = "os^DvPhX"  # as the page draws them
INK, MUTED, _LINE = "#16191d", "#5c646f", "#e4e6e9"
_LOSS, _WIN = "#f2b277", "#7fb0f6"
STYLE = {
    "font.size": 9, "axes.edgecolor": _LINE, "axes.labelcolor": MUTED, "axes.titlecolor": INK, "axes.titlesize": 10,
    "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False,
    "axes.grid": True, "axes.axisbelow": True, "grid.color": _LINE, "grid.linewidth": 0.8, "xtick.color": MUTED,
    "ytick.color": MUTED, "xtick.major.size": 0, "ytick.major.size": 0, "xtick.minor.size": 0, "ytick.minor.size": 0,
    "legend.frameon": False, "svg.hashsalt": "tilery", "svg.fonttype": "none",
}  # fmt: skip


def picture(collected: Collected, kind: str, form: str, op: str | None = None) -> bytes:
    """One picture, a panel per device (for time, per problem)."""
    matplotlib = library()
    tried = kind == "landscape"
    found = collected.tunes if tried else [one for one in collected.found if one.timed and not one.is_control]
    ops = list(dict.fromkeys(one.row.op for one in found))
    if op is not None and op not in ops:
        raise BadInput(
            f"--op must be one that was {'tuned' if tried else 'timed'} ({', '.join(ops) or 'none was'}), got {op!r}"
        )
    found = [one for one in found if op in (None, one.row.op)]
    draw: Callable[..., Any] = {
        "ratio": _ratio, "roofline": _roofline, "time": _time, "heat": _heat, "landscape": _landscape,
    }[kind]  # fmt: skip
    with matplotlib.rc_context(STYLE):
        figure = draw(collected, found)
        if figure is None:
            names = ", ".join(run.id for run in collected.runs)
            rows = "candidates of a tune" if tried else "timed rows"
            raise BadInput(f"{names} must hold {rows} for a picture of kind {kind}, got none that it can show")
        data = io.BytesIO()
        # Without a date the same run gives the same file.
        figure.savefig(data, format=form, dpi=160, metadata={"Date": None} if form == "svg" else None)
    return data.getvalue()


def library() -> Any:
    try:
        import matplotlib
        import matplotlib.figure
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        raise ToolMissing("matplotlib is not installed: pip install 'tilery[plot]'") from None
    return matplotlib


def drawing(width: float, height: float, heights: list[float] | None = None, columns: int = 1) -> tuple[Any, list[Any]]:
    figure = library().figure.Figure(figsize=(width, height), layout="constrained")
    rows = len(heights or [1])
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
    axes = figure.subplots(rows, columns, squeeze=False, height_ratios=heights)
    return figure, [one for row in axes for one in row]


def _by_device(collected: Collected, found: list[Found]) -> dict[str, list[Found]]:
    groups = {name: [one for one in found if one.row.device == name] for name in collected.devices}
    return {name: group for name, group in groups.items() if group}


def _marked(style: Style, size: float = 6) -> dict[str, Any]:
    """Colour and form say the language, hollow says peer."""
    face = "white" if style.peer else style.light
    edge = style.light if style.peer else "white"
    return {
        "marker": _MARKERS[style.marker % len(_MARKERS)], "markersize": size, "markerfacecolor": face,
        "markeredgecolor": edge, "markeredgewidth": 1.2 if style.peer else 0.6, "color": style.light,
    }  # fmt: skip


def _legend(figure: Any, found: list[Found]) -> None:
    from matplotlib.lines import Line2D

    styles = summary.styles(found)
    handles = [Line2D([], [], linestyle="", label=s.name.partition(":")[2] or s.name, **_marked(s)) for s in styles]
    figure.legend(
        handles=handles, loc="outside upper left", ncols=len(handles), handletextpad=0, columnspacing=0.9, fontsize=8
    )


def log_ticks(axis: Any, words: Callable[[float], str]) -> None:
    """Plain numbers at decades, and at 2 and 5 where decades are few."""
    from matplotlib.ticker import LogLocator, NullLocator

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0,) if high / low > 300 else (1.0, 2.0, 5.0)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: words(value))


def plain(value: float) -> str:
    return f"{value / 1e3:g}k" if value >= 1e3 else f"{value:g}"


def _duration(ms: float) -> str:
    return f"{1e3 * ms:g} µs" if ms < 1 else f"{ms:g} ms"


def _case_words(one: Found) -> str:
    words = (str(v) if k == "dtype" else f"{k} {v}" for k, v in summary.params(one.row.case).items())
    return f"{one.row.op}  {' · '.join(words)}"


def _ratio(collected: Collected, found: list[Found]) -> Any:
    """A line per case, a mark per kernel with its interval; to the right of 1 is faster than torch."""
    found = [one for one in found if BASE in one.ratios and one.row.kernel != BASE]
    groups = _by_device(collected, found)
    if not groups:
        return None
    heights = [len({one.cell for one in group}) + 2.0 for group in groups.values()]
    figure, axes = drawing(9, 0.34 * sum(heights) + 0.8, heights)
    for axis, (name, group) in zip(axes, groups.items()):
        cells = {one.cell: _case_words(one) for one in group}
        places = {cell: i for i, cell in enumerate(cells)}
        for style in summary.styles(group):
            own = [one for one in group if summary.language(one.row.kernel) == style.name]
            ratios = [one.ratios[BASE] for one in own]
            middle = [r for r, _, _ in ratios]
            whiskers = [[max(r - low, 0) for r, low, _ in ratios], [max(high - r, 0) for r, _, high in ratios]]
            heights_of = [places[one.cell] for one in own]
            axis.errorbar(middle, heights_of, xerr=whiskers, linestyle="", elinewidth=1, capsize=2, **_marked(style))
        axis.axvline(1, color=INK, linewidth=1)
        axis.set(xscale="log", title=name, xlabel="times faster than torch", ylim=(len(cells) - 0.4, -0.6))
        axis.set_yticks(range(len(cells)), list(cells.values()), color=INK)
        log_ticks(axis.xaxis, lambda value: f"{value:g}×")
    _legend(figure, found)
    return figure


def _roofline(collected: Collected, found: list[Found]) -> Any:
    found = [one for one in found if summary.intensity(one.row) and summary.positive(one.row.tflops)]
    groups = _by_device(collected, found)
    if not groups:
        return None
    figure, axes = drawing(8, 4.8 * len(groups) + 0.5, [1.0] * len(groups))
    for axis, (name, group) in zip(axes, groups.items()):
        ceilings = collected.ceilings(name)
        for style in summary.styles(group):
            own = [one for one in group if summary.language(one.row.kernel) == style.name]
            xs, ys = [summary.intensity(one.row) for one in own], [one.row.tflops for one in own]
            axis.plot(xs, ys, linestyle="", zorder=2.5 if style.peer else 3, **_marked(style))
        axis.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="TFLOP/s")
        axis.set_title(name if ceilings else f"{name}: no measured ceilings were kept, no roof")
        if ceilings:
            _roofs(axis, ceilings)
        log_ticks(axis.xaxis, plain)
        log_ticks(axis.yaxis, plain)
    _legend(figure, found)
    return figure


def _roofs(axis: Any, ceilings: dict[str, Any]) -> None:
    rates: dict[str, float] = {}  # those within a tenth of each other share a line
    for name, rate in sorted(ceilings["flops"].items(), key=lambda pair: -pair[1]):
        near = next((names for names, held in rates.items() if rate / 1e12 > 0.9 * held), None)
        if near is None:
            rates[name] = rate / 1e12
        else:
            rates[f"{near}, {name}"] = rates.pop(near)
    top, slope = max(rates.values()), max(ceilings["read"], ceilings["copy"]) / 1e12
    left, right = axis.get_xlim()[0], max(axis.get_xlim()[1], 2 * top / slope)
    for name, line in (("read", "-"), ("copy", "--")):
        speed = ceilings[name] / 1e12
        label = f"{name} {speed:.2f} TB/s" if speed >= 1 else f"{name} {1e3 * speed:.0f} GB/s"
        axis.plot([left, top / speed], [left * speed, top], line, color=MUTED, linewidth=1.2, label=label)
    for name, rate in rates.items():
        axis.plot([rate / slope, right], [rate, rate], color=INK, linewidth=1.2)
        axis.annotate(
            f"{name} {plain(float(f'{rate:.3g}'))}",
            (right, rate),
            (-2, 3),
            textcoords="offset points",
            ha="right",
            color=MUTED,
        )
    axis.set_xlim(left, right)
    axis.legend(loc="lower right")


def _time(collected: Collected, found: list[Found]) -> Any:
    charts = summary.size_charts(found)
    if not charts:
        return None
    columns = min(3, len(charts))
    rows = math.ceil(len(charts) / columns)
    figure, axes = drawing(3.9 * columns, 3.2 * rows + 0.5, [1.0] * rows, columns)
    several = len(collected.devices) > 1
    for axis, chart in zip(axes, charts):
        lines: dict[tuple[str, str], list[Found]] = {}
        for one in chart.found:
            lines.setdefault((one.row.kernel, one.run.id), []).append(one)
        styles = {style.name: style for style in summary.styles(chart.found)}
        for (kernel, _), line in lines.items():
            points = sorted((summary.params(one.row.case)[chart.x], one.row.ms) for one in line)
            look = ":" if not is_ours(kernel) else "--" if "." in kernel else "-"
            style = styles[summary.language(kernel)]
            axis.plot([x for x, _ in points], [y for _, y in points], look, linewidth=1.3, **_marked(style, 4.5))
        axis.set(xscale="log", yscale="log", xlabel=chart.x)
        axis.set_xticks(
            sizes := sorted({summary.params(one.row.case)[chart.x] for one in chart.found}), map(str, sizes)
        )
        axis.minorticks_off()
        log_ticks(axis.yaxis, _duration)
        fixed = chart.fixed.replace("dtype=", "").replace("=", " ").replace(",", " ·")
        axis.set_title(f"{chart.op}  {fixed}" + (f"\n{chart.device}" if several else ""))
    for axis in axes[len(charts) :]:
        axis.set_visible(False)
    _legend(figure, [one for chart in charts for one in chart.found])
    return figure


def _heat(collected: Collected, found: list[Found]) -> Any:
    """The geometric mean ratio to torch over cases, in words and in colour."""
    groups = {name: (group, summary.heat(group)) for name, group in _by_device(collected, found).items()}
    groups = {name: pair for name, pair in groups.items() if pair[1]}
    if not groups:
        return None
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("ratio", [_LOSS, "white", _WIN])
    heights = [len({op for op, _ in cells}) + 1.2 for _, cells in groups.values()]
    most = max(len({language for _, language in cells}) for _, cells in groups.values())
    figure, axes = drawing(1.05 * most + 1.2, 0.5 * sum(heights) + 0.3, heights)
    for axis, (name, (group, cells)) in zip(axes, groups.items()):
        ops = list(dict.fromkeys(op for op, _ in cells))
        languages = [style.name for style in summary.styles(group) if any(style.name == one for _, one in cells)]
        grid = [[cells.get((op, one), (math.nan, 0))[0] for one in languages] for op in ops]
        axis.imshow([[math.log2(v) for v in row] for row in grid], cmap=colours, vmin=-2, vmax=2, aspect="auto")
        for y, row in enumerate(grid):
            for x, value in enumerate(row):
                words = "–" if math.isnan(value) else f"{value:.3f}×" if value < 0.1 else f"{value:.2f}×"
                axis.text(x, y, words, ha="center", va="center", color=INK)
        axis.set_xticks(range(len(languages)), languages)
        axis.set_yticks(range(len(ops)), ops, color=INK)
        axis.set_title(f"{name}: times torch, geometric mean over cases")
        axis.set_xlim(-0.5, most - 0.5)
        axis.grid(visible=False)
        axis.set_xticks([x + 0.5 for x in range(most)], minor=True)
        axis.set_yticks([y + 0.5 for y in range(len(ops))], minor=True)
        axis.grid(which="minor", color="white", linewidth=3)
        axis.spines[:].set_visible(False)
    return figure


def _landscape(collected: Collected, found: list[Found]) -> Any:
    """A panel per problem: candidates fastest first; those without a time are crosses at the upper edge."""
    problems = [one for one in landscape.landscapes(found) if one.timed]
    if not problems:
        return None
    columns = min(3, len(problems))
    rows = math.ceil(len(problems) / columns)
    figure, axes = drawing(4.2 * columns, 3.2 * rows + 0.5, [1.0] * rows, columns)
    styles = {style.name: style for style in summary.styles(found)}
    several = len({problem.device for problem in problems}) > 1
    for axis, problem in zip(axes, problems):
        times = [one.row.ms or math.nan for one in problem.timed]
        edge, width = 1.25 * max(times), len(times)
        for place, one in enumerate(problem.timed, 1):
            axis.plot(place, one.row.ms, linestyle="", **_marked(styles[summary.language(one.row.kernel)], 5))
            words = [word for word, is_so in (("winner", one.row.rank == 0), ("default", one.row.default)) if is_so]
            if words:
                axis.annotate(", ".join(words), (place, one.row.ms), (0, 6), textcoords="offset points", ha="center")
        untimed = problem.found[width:]
        for i, one in enumerate(untimed):
            colour = styles[summary.language(one.row.kernel)].light
            axis.plot(0.5 + (i + 0.5) / len(untimed) * width, edge, marker="x", markersize=5, color=colour)
        axis.set(yscale="log", xlabel="candidates, fastest first", xlim=(0.3, width + 0.7))
        axis.set_ylim(0.85 * min(times), 1.15 * edge)
        log_ticks(axis.yaxis, _duration)
        axis.set_title(_case_words(problem.found[0]) + (f"\n{problem.device}" if several else ""))
    for axis in axes[len(problems) :]:
        axis.set_visible(False)
    _legend(figure, found)
    return figure

"""What rows add up to: ratios to a peer, the best kernel of a case, geometric means. For report and plot."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tilery import languages
from tilery.base.errors import BadInput
from tilery.measure import timing
from tilery.measure.result import BASE, CONTROL, Row, is_control, is_ours, is_peer
from tilery.measure.store import Run, Store

TUNE = "tune"  # the stage of a row that is a candidate of the tuner
CONTROL_OFF = 0.01  # torch against itself: further from 1 than this, and the run's other ratios are worth less

# By language, (on white, on black): told apart by people who see fewer colours too, and each has its own marker.
COLOURS = {
    "triton": ("#1f8fe8", "#5279ef"),
    "gluon": ("#0b4e5a", "#62e2e8"),
    "tilelang": ("#cc8624", "#d16c0e"),
    "cutile": ("#a05ab0", "#bfacff"),
    "cuda": ("#2c8260", "#57cc55"),
    "cupy": ("#9e1080", "#a5559a"),
    "numba": ("#6b5a1a", "#ece09e"),
    "numba_cuda": ("#6b2b10", "#f5a0a8"),
}
PEER_COLOUR = ("#8a8f98", "#8b919c")

Interval = tuple[float, float, float]  # a ratio and its 95 % interval


@dataclass
class Found:
    """A row and what is known of it beside the others."""

    run: Run
    row: Row
    cell: int  # rows of a cell took turns on the same problem in one run: only they have ratios to each other
    ratios: dict[str, Interval] = field(default_factory=dict)  # times faster than each peer of its cell

    @property
    def timed(self) -> bool:
        """Right, and with a time: a wrong kernel has no speed."""
        return self.row.status == "pass" and positive(self.row.ms)

    @property
    def is_kernel(self) -> bool:
        return is_ours(self.row.kernel)

    @property
    def is_control(self) -> bool:
        return is_control(self.row.kernel)


@dataclass
class Collected:
    runs: list[Run]
    found: list[Found]
    unpaired: int  # ratios left out: the arms were not sampled alike
    tunes: list[Found] = field(default_factory=list)  # candidates of the tuner: no benchmark counts them

    @property
    def devices(self) -> list[str]:
        """Where something was timed, most rows first."""
        names = [f.row.device for f in self.found if f.timed]
        return sorted(dict.fromkeys(names), key=lambda name: -names.count(name))

    def ceilings(self, device: str) -> dict[str, Any] | None:
        """Ceilings as the latest of the runs measured them; None where none did."""
        measured = [(run.machine.get("ceilings") or {}).get(device) for run in self.runs]
        return next((one for one in reversed(measured) if one), None)


def positive(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value) and value > 0


def language(kernel: str) -> str:
    """triton for triton.split_k; a peer is its own."""
    return kernel.partition(".")[0] if is_ours(kernel) else kernel


@dataclass(frozen=True)
class Style:
    """How a language is drawn, on the page and in pictures."""

    name: str
    light: str
    dark: str
    marker: int
    peer: bool


def styles(found: Iterable[Found]) -> list[Style]:
    """Languages in the order of their table, others after them, peers last; the control is not one of them."""
    seen = {language(one.row.kernel) for one in found}
    others = sorted(name for name in seen if name not in languages.LANGUAGES and is_ours(name))
    spare = list(COLOURS.values())
    made = [
        Style(name, *COLOURS.get(name, spare[i % len(spare)]), marker=i, peer=False)
        for i, name in enumerate([*filter(is_ours, languages.LANGUAGES), *others])
    ]
    peers = in_order(name for name in seen if not is_ours(name) and name != CONTROL)
    made += [Style(name, *PEER_COLOUR, marker=i, peer=True) for i, name in enumerate(peers)]
    return [style for style in made if style.name in seen]


def in_order(peers: Iterable[str]) -> list[str]:
    """torch first, what only controls last."""
    return sorted(peers, key=lambda name: (name != BASE, not is_peer(name), name))


def params(case: str) -> dict[str, int | str]:
    pairs = (part.partition("=") for part in case.split(",") if part)
    return {name: int(value) if value.isdecimal() else value for name, _, value in pairs}


def collect(store: Store, names: list[str] | None) -> Collected:
    """The named runs, the last one if none is named; each run once."""
    if not store.runs():
        raise BadInput(
            "there must be a run to show, got none: `tilery bench` makes one, `tilery runs import` brings one"
        )
    runs = list({run.id: run for run in map(store.find, names or ["last"])}.values())
    found: list[Found] = []
    tunes: list[Found] = []
    cells: dict[tuple[str, ...], int] = {}
    for run in runs:
        for row in store.rows(run.id):
            key = (run.id, row.op, row.case, row.device, row.inputs, row.stage)
            one = Found(run, row, cells.setdefault(key, len(cells)))
            (tunes if row.stage == TUNE else found).append(one)
    return Collected(runs, found, _add_ratios(found), tunes)


def _add_ratios(found: list[Found]) -> int:
    """Fills in the ratios of what was timed; the number of those that could not be taken."""
    unpaired = 0
    by_cell: dict[int, list[Found]] = {}
    for one in found:
        if one.timed:
            by_cell.setdefault(one.cell, []).append(one)
    for arms in by_cell.values():
        peers = [arm for arm in arms if not arm.is_kernel and arm.row.kernel != CONTROL]
        for arm in arms:
            for peer in peers:
                found_ratio = ratio(arm.row, peer.row)
                if found_ratio is None:
                    unpaired += 1
                else:
                    arm.ratios[peer.row.kernel] = found_ratio
    return unpaired


def ratio(row: Row, peer: Row) -> Interval | None:
    """How many times faster than the peer, round by round; as the run itself said it where the peer is torch."""
    if row is peer:
        return 1.0, 1.0, 1.0
    if peer.kernel == BASE and positive(row.ratio) and positive(row.ratio_low) and positive(row.ratio_high):
        return row.ratio, row.ratio_low, row.ratio_high  # type: ignore[return-value]
    ours, theirs = row.samples, peer.samples
    if len(row.against) == len(ours) and len(peer.against) == len(theirs):
        # Where power is the limit, each arm stood beside torch: over torch, what the round gave to either falls out.
        ours, theirs = _over(ours, row.against), _over(theirs, peer.against)
    if not ours or len(ours) != len(theirs) or not all(map(positive, (*ours, *theirs))):
        return None
    return timing.Timing(samples=ours, against=theirs).ratio


def _over(samples: tuple[float, ...], base: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(a / b if positive(b) else math.nan for a, b in zip(samples, base))


def intensity(row: Row) -> float | None:
    """FLOP per byte: the least of each that the op needs. Runs that did not keep them kept the rates they gave."""
    if positive(row.flops) and positive(row.bytes):
        return row.flops / row.bytes  # type: ignore[operator]
    return 1e3 * row.tflops / row.gbps if positive(row.tflops) and positive(row.gbps) else None  # type: ignore[operator]


def geometric_mean(values: Iterable[float]) -> float | None:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def best_per_cell(found: Iterable[Found], peer: str = BASE) -> list[Found]:
    """The kernel that is fastest against the peer, for each case."""
    best: dict[int, Found] = {}
    for one in found:
        if one.is_kernel and peer in one.ratios:
            held = best.setdefault(one.cell, one)
            if one.ratios[peer][0] > held.ratios[peer][0]:
                best[one.cell] = one
    return list(best.values())


def of_one_kind(found: Iterable[Found]) -> list[Found]:
    """The cold ones, or all where none is cold: a mean of what was read from memory and from caches means nothing."""
    found = list(found)
    return [one for one in found if one.row.inputs != "warm"] or found


def summary(found: Iterable[Found], peer: str = BASE) -> dict[str, Any]:
    """What one device's rows come to. The mean, wins and losses are of the best kernel of each case, cold or warm."""
    found = list(found)
    timed = [one for one in found if one.timed and one.is_kernel]
    best = sorted(of_one_kind(best_per_cell(found, peer)), key=lambda one: one.ratios[peer][0])
    return {
        "kernels": len({(one.row.op, one.row.kernel) for one in timed}),
        "cases": len({one.cell for one in timed}),
        "mean": geometric_mean(one.ratios[peer][0] for one in best),
        "best": _named(best[-1], peer) if best else None,
        "worst": _named(best[0], peer) if best else None,
        "won": sum(one.ratios[peer][1] > 1 for one in best),
        "compared": len(best),
        "failures": sum(one.row.status == "fail" for one in found),
    }


def _named(one: Found, peer: str) -> dict[str, Any]:
    return {"op": one.row.op, "case": one.row.case, "kernel": one.row.kernel, "ratio": one.ratios[peer][0]}


def heat(found: Iterable[Found], peer: str = BASE) -> dict[tuple[str, str], tuple[float, int]]:
    """(op, language) -> geometric mean of the ratios over cases, and how many; of variants the best of each case."""
    groups: dict[tuple[str, str], list[Found]] = {}
    for one in found:
        groups.setdefault((one.row.op, language(one.row.kernel)), []).append(one)
    made = {}
    for key, group in groups.items():
        best = of_one_kind(best_per_cell(group, peer))
        mean = geometric_mean(one.ratios[peer][0] for one in best)
        if mean is not None:
            made[key] = (mean, len(best))
    return made


@dataclass(frozen=True)
class SizeChart:
    """Cases of an op that differ in one number only."""

    device: str
    op: str
    x: str  # that number's name
    fixed: str  # the rest of the case
    found: tuple[Found, ...]


def size_charts(found: Iterable[Found]) -> list[SizeChart]:
    """For each device and op the number that joins most rows into lines; cases that stand alone are in none."""
    groups: dict[tuple[str, str], list[Found]] = {}
    for one in found:
        if one.timed and not one.is_control:
            groups.setdefault((one.row.device, one.row.op), []).append(one)
    charts = []
    for (device, op), group in groups.items():
        names = dict.fromkeys(["m"] + [name for one in group for name in params(one.row.case)])
        options = [_families(group, name) for name in names]
        most = max(options, key=lambda families: sum(map(len, families.values())))  # of equals the first: m
        charts += [SizeChart(device, op, x, fixed, tuple(members)) for (x, fixed), members in most.items()]
    return charts


def _families(group: list[Found], x: str) -> dict[tuple[str, str], list[Found]]:
    """Rows with the same case but for x, where x is a number with at least two values."""
    families: dict[tuple[str, str], list[Found]] = {}
    for one in group:
        given = params(one.row.case)
        if positive(given.pop(x, None)):
            rest = ", ".join(f"{name}={value}" for name, value in given.items())
            families.setdefault((x, rest), []).append(one)
    return {key: rows for key, rows in families.items() if len({params(one.row.case)[x] for one in rows}) > 1}


def document(collected: Collected) -> dict[str, Any]:
    """What --json says of runs beside their rows."""
    found = collected.found
    by_device = {name: summary([one for one in found if one.row.device == name]) for name in collected.devices}
    return {"runs": [run.id for run in collected.runs], "summary": by_device}


def all_rows(collected: Collected) -> list[Row]:
    return [one.row for one in [*collected.found, *collected.tunes]]

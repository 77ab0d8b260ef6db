"""A bench as pairs: for every product and peer one line, ours beside theirs. For CSV."""

from collections.abc import Iterable, Sequence
from typing import Any

from tilery.measure.result import Row, controls, is_ours, is_peer, problem
from tilery.pages import summary

COLUMNS = (
    "M", "N", "K", "peer", "ours_ms", "peer_ms", "ours_tflops", "peer_tflops", "speedup", "speedup_low", "speedup_high",
    "kernel", "acc_pass", "max_diff", "config", "note", "op", "case", "device", "control", "source",
)  # fmt: skip


def lines(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Ours is the fastest of our kernels that are right; a peer that could not be timed has a note that says why."""
    problems: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if row.case and row.device and row.status in ("pass", "fail", "refused"):
            problems.setdefault(problem(row), []).append(row)
    noise = controls(rows)
    return [
        _line(arms, _found(peer, *of[:2], arms, rows)) | {"control": noise.get(of)}
        for of, arms in problems.items()
        for peer in _peers(of[0], rows) or [""]
        if any(is_ours(arm.kernel) for arm in arms)
    ]


def _peers(op: str, rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row.kernel for row in rows if row.op == op and is_peer(row.kernel)))


def _found(peer: str, op: str, case: str, arms: list[Row], rows: Sequence[Row]) -> Row | None:
    """Its row of this problem; of a peer that is not here, the one row that says so."""
    of_op = [row for row in rows if (row.op, row.kernel) == (op, peer) and row.case in (case, "")]
    return next((row for row in (*arms, *of_op) if row.kernel == peer), None)


def _line(arms: list[Row], peer: Row | None) -> dict[str, Any]:
    ours = min(
        (arm for arm in arms if is_ours(arm.kernel)),
        key=lambda arm: (arm.status != "pass", arm.ms is None, arm.ms or 0.0),
    )
    params, right = summary.params(ours.case), ours.status == "pass"
    line: dict[str, Any] = {letter: params.get(letter.lower()) for letter in ("M", "N", "K")}
    line |= {"op": ours.op, "case": ours.case, "device": ours.device, "kernel": ours.kernel, "config": ours.config}
    line |= {"acc_pass": right, "max_diff": ours.max_diff, "source": ours.source, "note": "" if right else ours.reason}
    if right:
        line |= {"ours_ms": ours.ms, "ours_tflops": ours.tflops}
    if peer is None:
        return line
    line["peer"] = peer.kernel.removeprefix("baseline:")
    if peer.status != "pass":
        return line | {"note": "; ".join(filter(None, (line["note"], f"{line['peer']}: {peer.reason}")))}
    line |= {"peer_ms": peer.ms, "peer_tflops": peer.tflops}
    if right and (found := summary.ratio(ours, peer)) is not None:
        line["speedup"], line["speedup_low"], line["speedup_high"] = found
    return line

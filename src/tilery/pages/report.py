"""Runs as one html page that needs nothing else: no network, no server, no fonts."""

import base64
import json
import math
import zlib
from dataclasses import asdict
from datetime import UTC, datetime
from html import escape
from importlib import resources
from typing import Any

import tilery
from tilery.base.errors import BadStore
from tilery.measure.store import Store
from tilery.pages import landscape, summary
from tilery.pages.summary import BASE, CONTROL, CONTROL_OFF, Collected, Found

# In this order: each may use what those before it define.
_SCRIPTS = (
    "dom.js", "format.js", "state.js", "charts.js", "tiles.js", "roofline.js", "bars.js", "sizes.js", "heat.js",
    "landscape.js", "candidates.js", "details.js", "table.js", "head.js", "filters.js", "main.js",
)  # fmt: skip
_NO_NUMBER = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}  # as JavaScript reads them
_NOT_SHOWN = ("samples", "against", "ratio", "ratio_low", "ratio_high")  # ratios stand by peer


def render(store: Store, collected: Collected, title: str | None = None) -> str:
    """The page, whole."""
    data = page_data(store, collected, title)
    page = _file("page.html")
    parts = {
        "title": escape(data["title"]),
        "style": _file("page.css"),
        "data": _inert(json.dumps(data, allow_nan=False, separators=(",", ":"))),
        "script": "\n".join(map(_file, _SCRIPTS)),
    }
    pieces = page.split("%%")  # text, name, text, name, … text
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def page_data(store: Store, collected: Collected, title: str | None = None) -> dict[str, Any]:
    """All that the page shows, as plain data."""
    found = collected.found
    numbers = {run.id: i for i, run in enumerate(collected.runs)}
    rows = [_row(one, numbers[one.run.id]) for one in found]
    positions = {id(one): i for i, one in enumerate(found)}
    sizes = [
        {"device": c.device, "op": c.op, "x": c.x, "fixed": c.fixed, "rows": [positions[id(one)] for one in c.found]}
        for c in summary.size_charts(found)
    ]
    tunes = landscape.landscapes(collected.tunes)
    tuned_on = dict.fromkeys(one.device for one in tunes)
    return {
        "title": title or f"Tilery on {next(iter([*collected.devices, *tuned_on]), 'no device')}",
        "made": {"tilery": tilery.__version__, "at": datetime.now(UTC).isoformat(timespec="minutes")},
        "runs": [_plain(asdict(run)) for run in collected.runs],
        "devices": [{"name": name, "ceilings": _plain(collected.ceilings(name))} for name in collected.devices],
        "languages": [asdict(style) for style in summary.styles([*found, *collected.tunes])],
        "peers": summary.in_order({peer for one in found for peer in one.ratios}),
        "notices": _notices(collected),
        "sizes": sizes,
        "rows": rows,
        "tunes": [_tune(one, numbers[one.run.id]) for one in tunes],
        "code": _code(store, {one.row.code for one in found if one.row.code}),
    }


def _file(name: str) -> str:
    return (resources.files("tilery.pages") / "report_page" / name).read_text(encoding="utf-8")


def _inert(text: str) -> str:
    """JSON that no html parser takes for markup, whatever a compiler's message holds."""
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _row(one: Found, run: int) -> dict[str, Any]:
    """What is empty is left out, which halves the page."""
    shown = {k: v for k, v in asdict(one.row).items() if k not in _NOT_SHOWN and v not in (None, "")}
    more = {
        "run": run,
        "cell": one.cell,
        "language": summary.language(one.row.kernel),
        "params": summary.params(one.row.case),
        "timed": one.timed,
        "intensity": summary.intensity(one.row),
        "ratios": one.ratios,
        "samples": one.row.samples,
    }
    return dict(_plain(shown | more))


def _tune(of: landscape.Landscape, run: int) -> dict[str, Any]:
    """Candidates as rows, each with the fields of its config and, in `gain`, its ratio to the reference of its job."""
    rows = [
        _row(one, run) | {"fields": landscape.config(one.row), "gain": _plain(landscape.gain(one)), "samples": []}
        for one in of.found
    ]
    return {"run": run, "device": of.device, "op": of.op, "case": of.case, "fields": of.fields, "rows": rows}


def _plain(value: Any) -> Any:
    """A value as JSON can say it: seven digits are more than a clock gives, and what is no number is a word."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else _NO_NUMBER[str(value)]
    return value


def _code(store: Store, keys: set[str]) -> dict[str, dict[str, str]]:
    """Compressed stage by stage: the browser inflates what is opened."""
    made = {}
    for key in sorted(keys):
        try:
            stages = store.code(key)
        except (zlib.error, ValueError) as error:
            raise BadStore(f"{store.path}: code {key} cannot be read: {error}; it was left as it is") from None
        made[key] = {stage: _packed(text) for stage, text in stages.items()}
    return made


def _packed(text: str) -> str:
    return base64.b64encode(zlib.compress(text.encode(errors="replace"), 9)).decode()


def _notices(collected: Collected) -> list[dict[str, Any]]:
    """What a reader must know before believing a figure."""
    makers = (_no_times, _devices, _stopped, _failures, _control, _warm, _no_ceilings, _unpaired)
    return [notice for maker in makers if (notice := maker(collected)) is not None]


def _notice(text: str, items: list[str] | None = None, status: str = "", grave: bool = True) -> dict[str, Any]:
    return {"text": text, "items": items or [], "status": status, "grave": grave}


def _no_times(collected: Collected) -> dict[str, Any] | None:
    if collected.devices or any(one.timed for one in collected.tunes):
        return None
    return _notice("Nothing was timed: there are no charts, only the table of what was compiled, refused or skipped.")


def _devices(collected: Collected) -> dict[str, Any] | None:
    if len(collected.devices) < 2:
        return None
    devices = _count(len(collected.devices), "device")
    text = f"{devices}: each is shown by itself, and no ratio, roofline or mean is taken across them."
    return _notice(text, collected.devices, grave=False)


def _stopped(collected: Collected) -> dict[str, Any] | None:
    stopped = [run for run in collected.runs if run.finished is None]
    if not stopped:
        return None
    text = f"{_count(len(stopped), 'run')} stopped in the middle: what was measured until then is here."
    return _notice(text, [run.id for run in stopped])


def _failures(collected: Collected) -> dict[str, Any] | None:
    failed = [one.row for one in collected.found if one.row.status == "fail"]
    if not failed:
        return None
    items = [f"{row.op} {row.kernel} {row.case}: {row.reason}" for row in failed]
    text = f"{_count(len(failed), 'row')} failed. What is wrong has no speed: it is in no chart."
    return _notice(text, items, "fail")


def _control(collected: Collected) -> dict[str, Any] | None:
    off = [
        f"{one.row.op} {one.row.case} on {one.row.device}: {one.ratios[BASE][0]:.3f}×"
        for one in collected.found
        if one.row.kernel == CONTROL and BASE in one.ratios and abs(one.ratios[BASE][0] - 1) > CONTROL_OFF
    ]
    if not off:
        return None
    cases = _count(len(off), "case")
    text = f"torch timed against itself is off by more than {CONTROL_OFF:.0%} in {cases}: ratios there are worth less."
    return _notice(text, off)


def _warm(collected: Collected) -> dict[str, Any] | None:
    timed = {one.cell: one.row for one in collected.found if one.timed and one.is_kernel}
    warm = [f"{row.op} {row.case}" for row in timed.values() if row.inputs == "warm"]
    if not warm or len(warm) == len(timed):
        return None
    text = f"{_count(len(warm), 'case')} read from caches (warm): they are in the table and the charts, but in no mean."
    return _notice(text, warm, grave=False)


def _no_ceilings(collected: Collected) -> dict[str, Any] | None:
    missing = [name for name in collected.devices if collected.ceilings(name) is None]
    if not missing:
        return None
    text = "These runs kept no measured ceilings: no roof is drawn. `tilery bench` keeps them now."
    return _notice(text, missing, grave=False)


def _unpaired(collected: Collected) -> dict[str, Any] | None:
    if not collected.unpaired:
        return None
    ratios = _count(collected.unpaired, "ratio")
    return _notice(f"{ratios} left out: kernel and peer were not sampled in the same rounds.", grave=False)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"

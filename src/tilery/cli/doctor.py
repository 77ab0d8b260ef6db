"""`tilery doctor`: this machine, its languages, what is missing and the command that adds it."""

import platform
import shutil
import sysconfig
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tilery.cli import common
from tilery.cli.tables import Reason, Reasons, Table, figure, key, long


def doctor(
    measure: Annotated[bool, typer.Option("--measure", help="Measure this machine's ceilings again.")] = False,
    json: common.Json = False,
) -> None:
    """Say what this machine is, which languages it has, what is missing and how fast it can be."""
    from tilery import languages
    from tilery.hardware import device
    from tilery.measure.ceilings import ceilings
    from tilery.measure.result import machine

    here = machine()
    where = device.default()
    known = [
        {"language": lang.name, "version": languages.version(lang) or "", "missing": languages.missing(lang.name) or ""}
        for lang in languages.LANGUAGES.values()
    ]
    tools = _tools()
    others = _peers()
    with common.progress() as (say, _):
        roof = ceilings(where, measure, say)
    if json:
        found = {**asdict(roof), "device": device.name(where)}
        common.print_json([], languages=known, tools=tools, peers=others, ceilings=found)
        return
    rates = [(what, f"{getattr(roof, what) / 1e9:.1f} GB/s") for what in ("read", "copy", "write")]
    rates += [(f"matrix product, {name}", f"{rate / 1e12:.2f} TFLOP/s") for name, rate in roof.flops.items()]
    rates += [("launch", f"{roof.launch_us:.2f} µs")]
    facts = [(k, common.literal(str(v))) for k, v in here.items() if k != "languages"]
    common.say(
        Table("This machine", (key("what"), long("is")), facts),
        "",
        Table("Languages", (key("language"), key("version"), key("here")),
              [(x["language"], x["version"], _good(not x["missing"])) for x in known]),
        Reasons(Reason("missing", x["missing"], x["language"]) for x in known if x["missing"]),
        "",
        Table("Tools", (key("tool"), key("here"), key("needed for"), long("path, or what adds it")),
              [(t["tool"], _good(bool(t["path"])), t["needed_for"], common.literal(t["path"] or t["missing"]))
               for t in tools]),
        "",
        Table("Peers, that bench holds kernels against", (key("peer"), key("here")),
              [(p["peer"], _good(not p["missing"])) for p in others]),
        Reasons(Reason("missing", p["missing"], p["peer"]) for p in others if p["missing"]),
        "",
        Table(f"Ceilings measured on {device.name(where)}", (key("what"), figure("rate")), rates),
    )  # fmt: skip


def _good(ok: bool) -> str:
    return "[green]yes[/]" if ok else "[yellow]no[/]"


def _peers() -> list[dict[str, str]]:
    from tilery.core import peers

    return [{"peer": name, "missing": peers.missing(name) or ""} for name in peers.PEERS]


def _tools() -> list[dict[str, str]]:
    from tilery.base.errors import ToolMissing
    from tilery.hardware import toolkit

    def found(tool: str) -> str:
        try:
            return str(toolkit.find(tool))
        except ToolMissing:
            return ""

    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    python = ".".join(platform.python_version_tuple()[:2])
    return [
        _tool("C compiler", compiler or "", "Triton's launcher on a GPU", "apt-get install gcc"),
        _tool("Python headers", str(header) if header.exists() else "", "Triton's launcher on a GPU",
              f"apt-get install python{python}-dev"),
        _tool("cuobjdump", found("cuobjdump"), "registers, spills, SASS", "pip install 'tilery[nvcc]'"),
        _tool("nvcc", found("nvcc"), "TileLang on a GPU", "pip install 'tilery[nvcc]'"),
    ]  # fmt: skip


def _tool(tool: str, path: str, needed_for: str, install: str) -> dict[str, str]:
    return {"tool": tool, "path": path, "needed_for": needed_for, "missing": "" if path else install}

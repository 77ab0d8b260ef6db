"""`tilery cache`: what is kept, where, and how to be rid of it."""

import os
import shutil
from pathlib import Path
from typing import Annotated

import typer

from tilery.cli import common
from tilery.cli.tables import Table, figure, key, long

_OURS = ("cuda", "numba")  # what the languages keep in the cache folder; the folder may be shared


def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Delete compiled kernels; data is kept.")] = False,
    json: common.Json = False,
) -> None:
    """Show where state lives and how large it is; --clear deletes compiled kernels."""
    from tilery.base import files, settings

    kept, home = settings.get(), Path(os.path.expanduser("~"))  # unlike Path.home(), no error where there is none
    folders = {
        "cache": (kept.cache_dir, "compiled kernels; --clear deletes them"),
        "data": (kept.data_dir, "measured ceilings, your tuned configs; kept"),
        "triton": (home / ".triton", "Triton's own cache; not ours to delete"),
        "tilelang": (home / ".tilelang", "TileLang's own cache; not ours to delete"),
    }
    freed = 0
    for folder in [kept.cache_dir / name for name in _OURS] if clear else []:
        size = _size(folder)
        with files.writing(folder, "what was not yet deleted is as it was", "make it writable"):
            shutil.rmtree(folder, ignore_errors=not folder.exists())
        freed += size
    sizes = {name: _size(path) for name, (path, _) in folders.items()}
    if json:
        found = {
            name: {"path": str(path), "bytes": sizes[name], "what": what} for name, (path, what) in folders.items()
        }
        common.print_json([], folders=found, freed_bytes=freed)
        return
    lines = [(n, f"{sizes[n] / 2**20:.1f} MiB", common.literal(str(path)), what) for n, (path, what) in folders.items()]
    common.say(Table("State", (key("folder"), figure("size"), long("path"), long("what")), lines))
    if clear:
        print(f"freed {freed / 2**20:.1f} MiB")


def _size(path: Path) -> int:
    return sum(f.stat().st_size for f in path.rglob("*") if f.is_file()) if path.exists() else 0

"""Makes the tables of results/ anew, by the commands that results/README.md prints.

    python benchmarks/tables.py --list
    python benchmarks/tables.py matmul-h200.csv fp8-h200.csv [--into made] [--minutes 9]
    python benchmarks/tables.py --into made                     every table, in the order of that page

A bench adds to its file the cases that are not in it yet. So the same call goes on where --minutes ended it, and a
table that is to be made from nothing goes into an empty folder. `made.md` there says how long each command took.
"""

import argparse
import re
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "results" / "README.md"


@dataclass(frozen=True)
class Table:
    """A command, and the file in results/ that it writes."""

    file: str
    words: tuple[str, ...]

    @property
    def continues(self) -> bool:
        return self.words[:2] == ("tilery", "bench")

    def command(self, into: Path, minutes: float | None) -> list[str]:
        words = [str(into / self.file) if word == f"results/{self.file}" else word for word in self.words]
        if self.continues:
            words += ["--add", *([] if minutes is None else ["--minutes", f"{max(minutes, 0):.2f}"])]
        program = {"tilery": [sys.executable, "-m", "tilery"], "python": [sys.executable]}
        return program[words[0]] + words[1:]


def tables(page: str) -> list[Table]:
    """Every command of the page that writes a file of results/, in order."""
    found = []
    for fence in re.finditer(r"^```\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        for line in fence[1].splitlines():
            words = tuple(shlex.split(line, comments=True))
            if "--csv" in words:
                found.append(Table(words[words.index("--csv") + 1].removeprefix("results/"), words))
    return found


def make(chosen: list[Table], into: Path, minutes: float | None) -> int:
    """Run the commands one after another; the number of those that failed."""
    into.mkdir(parents=True, exist_ok=True)
    start, failed = time.monotonic(), 0
    for table in chosen:
        left = None if minutes is None else minutes - (time.monotonic() - start) / 60
        done = not table.continues and (into / table.file).exists()
        if done or (left is not None and left <= 0):
            print(f"{'is there' if done else 'no time is left for'}: {shlex.join(table.words)}", flush=True)
            continue
        began = time.monotonic()
        code = subprocess.run(table.command(into, left), cwd=ROOT, check=False).returncode
        failed += code != 0
        took = f"{(time.monotonic() - began) / 60:.1f} minutes, exit code {code}"
        with (into / "made.md").open("a", encoding="utf-8") as log:
            log.write(f"- {table.file}, {_commit()}: {took}: `{shlex.join(table.words)}`\n")
        print(f"{table.file}: {took}", flush=True)
    return failed


def _commit() -> str:
    found = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return found.stdout.strip() or "a copy without git"


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", metavar="FILE.csv", help="tables to make; every one if none is named")
    parser.add_argument("--into", type=Path, default=Path("made"), help="the folder to write to; made/ if not given")
    parser.add_argument("--minutes", type=float, help="begin nothing after so many minutes")
    parser.add_argument("--list", action="store_true", help="print the commands, and run none")
    return parser


def main() -> int:
    args = parser().parse_args()
    known = tables(PAGE.read_text(encoding="utf-8"))
    names = list(dict.fromkeys(table.file for table in known))
    if unknown := set(args.files) - set(names):
        raise SystemExit(f"FILE.csv must be one of {', '.join(names)}, got {unknown.pop()}")
    chosen = [table for table in known if not args.files or table.file in args.files]
    if args.list:
        print("\n".join(f"{table.file}: {shlex.join(table.words)}" for table in chosen))
        return 0
    return 1 if make(chosen, args.into.resolve(), args.minutes) else 0


if __name__ == "__main__":
    sys.exit(main())

"""What compute-sanitizer's log says: findings with their source lines, and which of them are the tool's own."""

import functools
import re
from dataclasses import dataclass
from pathlib import Path

import tilery

_PREFIX = "========="
_DETAIL = re.compile(
    r"\s{2,}|\s*(at |by thread|and |Address |Access |Write Thread|Read Thread|Current Value|Barrier is located"
    r"|Device Frame|Host Frame|Saved host backtrace)"
)
_PLACE = re.compile(r"\bin (?P<file>[^\s:]+):(?P<line>\d+)")
_FUNCTION = re.compile(r"\bat (?:0x[0-9a-f]+ in (?:\S+?:\d+:)?)?(?P<name>.*?)(?:[+:]0x[0-9a-f]+)?(?: in \S+:\d+.*)?$")
_RACE = re.compile(r"(?:(?P<level>\w+): )?Race reported between (?P<access>\w+) access at ")
_OTHER = re.compile(r"and (?P<access>\w+) access at .*?(?:\[(?P<hazards>[\d,]+) hazards?\])?$")
_SUMMARY = re.compile(r"(ERROR|RACECHECK) SUMMARY: (?P<count>[\d,]+) (error|hazard)s?(?! were not printed)")
# Not errors of a kernel: who speaks, sums, and that the program under test ended badly, which is seen without it.
_NOTES = (
    "COMPUTE-SANITIZER",
    "ERROR SUMMARY",
    "RACECHECK SUMMARY",
    "LEAK SUMMARY",
    "Target application returned an error",
    "Error: process didn't terminate successfully",
)
_NOT_ATTACHED = (
    "Device not supported",
    "Unable to find injection library",
    "No attachable process",
    "Tracking kernels launched by child processes",
    "terminated before first instrumented API call",
)


@dataclass(frozen=True)
class Finding:
    """One kind of error at one place, and how often it was printed."""

    what: str  # in a sentence, with what the tool knows of the address
    function: str = ""  # the kernel's name on the device
    where: str = ""  # file:line, where the code has line information
    count: int = 1


@dataclass(frozen=True)
class Report:
    """A whole log."""

    findings: tuple[Finding, ...]
    errors: int | None  # as the summary counts them; None without a summary: it did not come to its end
    not_attached: str = ""  # the tool's own words, where it could not look at any kernel


@dataclass(frozen=True)
class Known:
    """Findings that say something of the tool and not of a kernel; the patterns must all be found."""

    reason: str
    tool: str = ""
    what: str = ""
    kernel: str = ""  # "op kernel"
    function: str = ""

    def covers(self, tool: str, op: str, kernel: str, finding: Finding) -> bool:
        given = {"tool": tool, "what": finding.what, "kernel": f"{op} {kernel}", "function": finding.function}
        return all(re.search(getattr(self, name), text) for name, text in given.items())


# Kernels whose tiles come and go by TMA: written as such, or by compilers that use it.
_BY_TMA = r" cuda\.hopper$|^fp8_matmul cuda$| (gluon|tilelang|cutile)$"

KNOWN = (
    Known("torch's own kernel, which draws the inputs", function=r"\bat::|at_cuda_detail|\bcub::|\bthrust::"),
    Known(
        "cp.async reads as many bytes as it is told and fills the rest of its 16 with zeros; the tool counts all 16",
        tool="memcheck", what="read of size 16 bytes: is out of bounds and is inside", kernel=r"^matmul cuda$",
    ),
    Known(
        "racecheck does not follow lane 0 of a warp that arrives at a barrier for all lanes, after __syncwarp",
        tool="racecheck", what="race between", kernel=r"^fp8_matmul cuda$",
    ),
    Known(
        "racecheck does not follow what TMA writes to shared memory, nor the mbarrier that announces it",
        tool="racecheck", what="race between", kernel=_BY_TMA,
    ),
    Known(
        "initcheck does not see what TMA writes (cp.async.bulk.tensor)",
        tool="initcheck", what="Uninitialized __(global|shared)__", kernel=_BY_TMA,
    ),
    Known(
        "the tool follows fewer barriers than the kernel has, and says so",
        what="Detected overflow of tracked cuda::barrier",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Unfit:
    """A kernel that a tool cannot run to a verdict; the patterns must both be found."""

    reason: str
    tool: str
    kernel: str  # "op kernel"


UNFIT = (
    Unfit(
        "its slices are of sizes that the device alone knows, so cuTile's compiler makes their TMA descriptors on the "
        "device, in memory that the driver keeps. memcheck does not know that memory, reports the writes and drops "
        "them: what the kernel stores then goes anywhere, or it never ends",
        tool="memcheck", kernel=r"^grouped_matmul cutile$",
    ),
)  # fmt: skip


def unfit_reason(tool: str, op: str, kernel: str) -> str | None:
    """Why the tool cannot examine this kernel; None if it can."""
    found = (u.reason for u in UNFIT if u.tool == tool and re.search(u.kernel, f"{op} {kernel}"))
    return next(found, None)


def known_reason(tool: str, op: str, kernel: str, finding: Finding) -> str | None:
    """Why a finding is the tool's own; None if it is the kernel's."""
    return next((known.reason for known in KNOWN if known.covers(tool, op, kernel, finding)), None)


def expects_findings(tool: str, op: str, kernel: str) -> bool:
    """Whether the table of known findings names this kernel for this tool."""
    named = (known for known in KNOWN if known.kernel and re.search(known.tool, tool))
    return any(re.search(known.kernel, f"{op} {kernel}") for known in named)


def parse(log: str) -> Report:
    """Findings in the order in which they were first printed, equal ones counted."""
    blocks, errors, not_attached = _blocks(log), None, ""
    counts: dict[Finding, int] = {}
    for block in blocks:
        if summary := _SUMMARY.match(block[0]):
            errors = int(summary["count"].replace(",", ""))
        elif words := next((text for text in block if any(known in text for known in _NOT_ATTACHED)), ""):
            not_attached = not_attached or words.removeprefix("Error: ")
        elif not block[0].startswith(_NOTES):
            found = _finding(block)
            counts[found] = counts.get(found, 0) + 1
    findings = [Finding(f.what, f.function, f.where, count) for f, count in counts.items()]
    if errors and not findings:
        findings.append(Finding(f"{errors} errors were counted and none was printed"))
    return Report(tuple(findings), errors, not_attached)


def _blocks(log: str) -> list[list[str]]:
    """Each error with the lines that belong to it; the first line says what it is."""
    blocks: list[list[str]] = []
    inside = False
    for line in log.splitlines():
        if not line.startswith(_PREFIX):
            continue
        text = line.removeprefix(_PREFIX)
        if not text.strip():
            inside = False
        elif inside and _DETAIL.match(text):
            blocks[-1].append(text.strip())
        else:
            blocks.append([text.strip()])
            inside = True
    return blocks


def _finding(block: list[str]) -> Finding:
    if race := _RACE.match(block[0]):
        return _race(block, race["level"] or "", race["access"])
    at = next((line for line in block[1:] if line.startswith("at ")), "")
    what = block[0]
    # "Address 0x7f… is out of bounds and is 1 bytes after the nearest allocation at 0x7f… of size 508 bytes": numbers
    # that differ from thread to thread and run to run are left out, so that equal errors are counted as one.
    address = " ".join(line for line in block[1:] if line.startswith(("Address", "Access to", "and is")))
    if "nearest allocation" in address or "out of bounds" in address or "misaligned" in address:
        address = re.sub(r"(Address|Access to) 0x[0-9a-f]+ ", "", address)
        address = re.sub(r" and is ([\d,]+) bytes (after|before) the nearest", r", \2 the nearest", address)
        what += f": {re.sub(r' at 0x[0-9a-f]+', '', address)}"
    if not at and len(block) > 1 and _PLACE.search(block[1]) is None:
        what = "; ".join([what, *(line for line in block[1:] if "Frame" not in line)][:4])
    return Finding(what, _function(at), _where(at) or _where(" ".join(block[1:])))


def _race(block: list[str], level: str, access: str) -> Finding:
    others = []
    for line in block[1:]:
        if other := _OTHER.match(line):
            hazards = f", {other['hazards']} hazards" if other["hazards"] else ""
            others.append(f"a {other['access'].lower()} at {_where(line) or _function(line)}{hazards}")
    where, function = _where(block[0]), _function(block[0])
    what = f"race between a {access.lower()} at {where or function} and {'; '.join(others) or 'itself'}"
    return Finding(f"{level}: {what}" if level else what, function, where)


def _function(line: str) -> str:
    found = _FUNCTION.search(line)
    return found["name"].strip() if found else ""


def _where(line: str) -> str:
    """The first file:line of a line; a path in this package is cut to begin with it."""
    found = _PLACE.search(line)
    return f"{_shown(found['file'])}:{found['line']}" if found else ""


@functools.cache
def _shown(file: str) -> str:
    """Cut to tilery/ops/softmax/softmax.cu if it is ours; NVRTC puts the working folder before the name it is told."""
    root = Path(tilery.__file__).parent
    path = Path(file)
    if not path.is_file():
        path = next(iter(sorted(root.rglob(path.name))), path)
    return str(path.relative_to(root.parent)) if path.is_relative_to(root.parent) else str(path)

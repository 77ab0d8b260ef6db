"""Uniform registers that machine code reads and nothing set: ptxas 12.8, which Triton brings, makes such code."""

import re
from typing import NamedTuple

from tilery.hardware import toolkit

_LINE = re.compile(
    r"\s*/\*(?P<address>[0-9a-f]{4,})\*/\s+(?P<predicate>@!?U?P\w+\s+)?(?P<name>[A-Z]\S*)\s*(?P<rest>.*?)\s*;"
)
_PREDICATE = re.compile(r"!?U?P[T\d]$")
_UNIFORM = re.compile(r"(?P<kind>g?desc\[)?\bUR(?P<number>\d+)\b")
_ALL = frozenset(range(63))
_UPPER_HALF = "0x7632"  # UPRMT's selector: the upper 16 bits of a become the lower ones; above them come those of c


class Instruction(NamedTuple):
    text: str
    reads: frozenset[int]
    writes: frozenset[int]
    next: tuple[int, ...]  # addresses of what may run after it


def unset_registers(cubin: bytes) -> dict[int, str]:
    """Uniform registers that some path reads before it writes them, with the first such instruction."""
    return unset_in(toolkit.sass(cubin))


def unset_in(sass: str) -> dict[int, str]:
    found: dict[int, str] = {}
    for function in sass.split("Function : ")[1:]:
        found |= _unset(_instructions(function))
    return found


def _unset(code: dict[int, Instruction]) -> dict[int, str]:
    unset: dict[int, frozenset[int]] = {}  # address -> registers that may hold nothing when control comes there
    waiting = [(min(code), _ALL)]
    while waiting:
        address, arriving = waiting.pop()
        if address not in code or (address in unset and arriving <= unset[address]):
            continue
        unset[address] = unset.get(address, frozenset()) | arriving
        waiting += [(after, unset[address] - code[address].writes) for after in code[address].next]
    return {n: code[at].text for at in sorted(unset, reverse=True) for n in code[at].reads & unset[at]}


def _instructions(function: str) -> dict[int, Instruction]:
    lines = [match for line in function.splitlines() if (match := _LINE.match(line))]
    addresses = [int(line["address"], 16) for line in lines]
    return {at: _instruction(line, after) for line, at, after in zip(lines, addresses, [*addresses[1:], -1])}


def _instruction(line: re.Match[str], after: int) -> Instruction:
    name, operands = line["name"], [x.strip() for x in re.split(r",(?![^\[]*\])", line["rest"])]
    conditions = [x for x in operands if _PREDICATE.match(x)]
    operands = [x for x in operands if x not in conditions]
    writes: set[int] = set()
    if operands and (first := re.fullmatch(r"UR(\d+)", operands[0])):
        writes = _pair(int(first[1]), ".64" in name or ".WIDE" in name)
        operands = operands[1:]
        if name == "UPRMT" and operands[1] == _UPPER_HALF and operands[2] == f"UR{first[1]}":
            operands = operands[:1]  # c is the destination: ptxas writes so where nobody asks what lies above
    reads = {n for i, operand in enumerate(operands) for n in _read(name, i, operand, operands)}
    return Instruction(line[0].strip(), frozenset(reads), frozenset(writes), _next(line, name, conditions, after))


def _read(name: str, place: int, operand: str, operands: list[str]) -> set[int]:
    found: set[int] = set()
    for match in _UNIFORM.finditer(operand):
        number = int(match["number"])
        if match["kind"] == "gdesc[":  # of a and b; of b alone where a comes in registers
            first = 2 if any(re.match(r"R\d", x) for x in operands[1 : operands.index(operand)]) else 0
            found |= {number + i for i in range(first, 4)}
        else:  # of UIMAD.WIDE the addend alone is a pair
            pair = match["kind"] == "desc[" or (name[0] == "U" and name.endswith(".64"))
            found |= _pair(number, pair or (name.startswith("UIMAD.WIDE") and place == 2))
    return found


def _pair(number: int, both: bool) -> set[int]:
    return {number, number + 1} if both else {number}


def _next(line: re.Match[str], name: str, conditions: list[str], after: int) -> tuple[int, ...]:
    always = line["predicate"] is None and not conditions
    if name.startswith(("EXIT", "RET")):
        return () if always else (after,)
    if name.startswith("BRA") and (target := re.search(r"0x([0-9a-f]+)", line["rest"])):
        return (int(target[1], 16), *(() if always and name == "BRA" else (after,)))
    return (after,)

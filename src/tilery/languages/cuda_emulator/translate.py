"""CUDA C++ after the preprocessor, made into C++: asm statements, and variables in shared memory."""

import re
from collections.abc import Iterator

_ASM = re.compile(r"\basm\b(?:\s+volatile\b|\s+__volatile__\b)?\s*\(")
_LITERALS = re.compile(r'(?:\s*"(?:[^"\\]|\\.)*")+')
_OPERAND = re.compile(r'\s*"([^"]*)"\s*\(')
_DYNAMIC = re.compile(r"\bextern\s+__shared__\b([^;\[]*?)(\w+)\s*\[\s*\]\s*;")
_STATIC = re.compile(r"\b__shared__\b([^;]*?)\b(\w+)\s*((?:\[[^;]*\])*)\s*;")
_ATTRIBUTE = re.compile(r"__attribute__\s*\(\((?:[^()]|\([^()]*\))*\)\)|alignas\s*\([^)]*\)")


def translated(text: str) -> str:
    """The same program for a C++ compiler, with calls of the emulator."""
    text = _DYNAMIC.sub(_dynamic, text)
    text = _STATIC.sub(_static, text)
    made, at = [], 0
    for begin, end in _asm_statements(text):
        made += [text[at:begin], _call(text[begin:end])]
        at = end
    return "".join([*made, text[at:]])


def _dynamic(found: re.Match[str]) -> str:
    kind = _ATTRIBUTE.sub("", found[1]).strip()
    return f"{kind}* const {found[2]} = reinterpret_cast<{kind}*>(::emulator::dynamic_shared());"


def _static(found: re.Match[str]) -> str:
    kind, sizes = _ATTRIBUTE.sub("", found[1]).strip(), found[3]
    return f"auto& {found[2]} = ::emulator::shared_variable<{kind}{sizes}>([]{{}});"


def _asm_statements(text: str) -> Iterator[tuple[int, int]]:
    """Where each begins and ends, without its semicolon."""
    for found in _ASM.finditer(text):
        yield found.start(), _closing(text, found.end() - 1) + 1


def _closing(text: str, opening: int) -> int:
    """The parenthesis that closes the one at `opening`; those in strings do not count."""
    depth, at = 0, opening
    while True:
        if text[at] == '"':
            at = text.index('"', at + 1)
            while text[at - 1] == "\\":
                at = text.index('"', at + 1)
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        if depth == 0:
            return at
        at += 1


def _call(statement: str) -> str:
    """asm("ptx" : outputs : inputs : clobbers) as a call of the emulator, which is an expression too."""
    inside = statement[statement.index("(") + 1 : -1]
    literals = _LITERALS.match(inside)
    assert literals, f"an asm statement without a text: {statement}"
    if not literals[0].replace('"', "").strip():  # it only keeps the compiler from moving code
        return "((void)0)"
    outputs, inputs, *_ = [*_sections(inside[literals.end() :]), "", ""]
    operands = [f"::emulator::out({each})" for _, each in _operands(outputs)]
    operands += [f"::emulator::in({each})" for _, each in _operands(inputs)]
    listed = ", ".join(operands) or "::emulator::Operand{}"
    return (
        f"[&] {{ static const ::emulator::Program* const program_ = ::emulator::parse({literals[0]}); "
        f"::emulator::Operand operands_[] = {{{listed}}}; ::emulator::execute(program_, operands_); }}()"
    )


def _sections(text: str) -> list[str]:
    """What lies between the colons outside of parentheses, behind the first; `::` is two of them."""
    found, depth, begin = [], 0, None
    for at, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if character == ":" and depth == 0:
            if begin is not None:
                found.append(text[begin:at])
            begin = at + 1
    return found if begin is None else [*found, text[begin:]]


def _operands(text: str) -> Iterator[tuple[str, str]]:
    """Constraint and expression of each."""
    at = 0
    while found := _OPERAND.search(text, at):
        at = _closing(text, found.end() - 1)
        yield found[1], text[found.end() : at]

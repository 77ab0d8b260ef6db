"""The signature of a kernel in CUDA C++, read from its source: a launch names its arguments, and types stand once.

Read are `template <…> __global__ void … name(…)` and the plain structs that kernels take by value. Types: pointers,
int, i64 or long long, float, bool, TensorMap, and structs of those.
"""

import ctypes
import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tilery.base.launch import argument_mismatch

TENSOR_MAP = "TensorMap"
_NUMBERS: dict[str, Any] = {
    "int": ctypes.c_int, "unsigned": ctypes.c_uint, "i64": ctypes.c_longlong, "long long": ctypes.c_longlong,
    "float": ctypes.c_float, "double": ctypes.c_double, "bool": ctypes.c_bool,
}  # fmt: skip


@dataclass(frozen=True)
class Parameter:
    """A parameter of a kernel, or a field of a struct."""

    name: str
    type: Any  # of ctypes; TENSOR_MAP; or a Struct


@dataclass(frozen=True)
class Struct:
    """A struct that a kernel takes by value."""

    name: str
    fields: tuple[Parameter, ...]

    @functools.cached_property
    def layout(self) -> type[ctypes.Structure]:
        """As C lays it out."""
        return type(self.name, (ctypes.Structure,), {"_fields_": [(f.name, f.type) for f in self.fields]})


@dataclass(frozen=True)
class Signature:
    """A kernel's template parameters and its own."""

    kernel: str
    template: tuple[str, ...]
    parameters: tuple[Parameter, ...]

    def instance(self, constants: Mapping[str, Any]) -> str:
        """The instance of the template for these constants: softmax<float, 4, 256>."""
        assert set(constants) == set(self.template), (
            f"{self.kernel} has the template parameters {', '.join(self.template)}, got {', '.join(constants)}"
        )
        if not self.template:
            return self.kernel
        return f"{self.kernel}<{', '.join(_spelled(constants[name]) for name in self.template)}>"

    def ordered(self, args: Mapping[str, Any]) -> tuple[Any, ...]:
        """The arguments in the kernel's order; those of a struct are a tuple, in its order."""
        wanted = [n for p in self.parameters for n in ([f.name for f in p.type.fields] if _is_struct(p) else [p.name])]
        assert not (wrong := argument_mismatch(self.kernel, wanted, args)), wrong
        return tuple(
            tuple(args[f.name] for f in p.type.fields) if _is_struct(p) else args[p.name] for p in self.parameters
        )


def _is_struct(parameter: Parameter) -> bool:
    return isinstance(parameter.type, Struct)


def _spelled(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@functools.lru_cache(maxsize=256)
def find(source: str, kernel: str, headers: str = "") -> Signature:
    """The signature of `kernel` in `source`; structs may stand in `headers`."""
    text = _without_comments(source)
    begin = re.search(rf"__global__\s+void\b[^;{{}}]*?\b{kernel}\s*\(", text)
    assert begin, f"no kernel {kernel} in the source"
    inside, _ = _balanced(text, begin.end() - 1, "()")
    template = _template(text[: begin.start()])
    structs = text + _without_comments(headers)
    return Signature(kernel, template, tuple(_parameter(each, structs) for each in _split(inside)))


def _without_comments(text: str) -> str:
    return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)


def _template(before: str) -> tuple[str, ...]:
    """The names of the template's parameters, if the text ends with a template's head."""
    end = before.rstrip()
    if not end.endswith(">"):
        return ()
    inside = end[end.rindex("template") :].partition("<")[2][:-1]
    return tuple(each.partition("=")[0].split()[-1] for each in _split(inside))


def _parameter(text: str, structs: str) -> Parameter:
    words = text.partition("=")[0].replace("*", " * ").split()
    name = words[-1]
    kind = " ".join(word for word in words[:-1] if word not in ("const", "__grid_constant__", "__restrict__"))
    if "*" in words:
        return Parameter(name, ctypes.c_void_p)
    if kind == TENSOR_MAP:
        return Parameter(name, TENSOR_MAP)
    return Parameter(name, _NUMBERS[kind] if kind in _NUMBERS else _struct(kind, structs))


def _struct(kind: str, text: str) -> Struct:
    name = kind.partition("<")[0]
    begin = re.search(rf"\bstruct\s+{name}\s*\{{", text)
    assert begin, f"the type {kind} is neither known nor a struct of the source"
    inside, _ = _balanced(text, begin.end() - 1, "{}")
    fields = []
    for line in filter(None, (line.strip() for line in inside.split(";"))):
        first, *more = _split(line)
        head = _parameter(first, text)
        fields += [head, *(Parameter(name.strip(" *"), head.type) for name in more)]
    return Struct(name, tuple(fields))


def _balanced(text: str, start: int, pair: str) -> tuple[str, int]:
    """What stands between the bracket at `start` and the one that closes it, and where that is."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == pair[0]) - (text[i] == pair[1])
        if depth == 0:
            return text[start + 1 : i], i
    raise AssertionError("brackets do not close")


def _split(text: str) -> list[str]:
    """At commas that are in no brackets."""
    found, depth = [""], 0
    for c in text:
        depth += (c in "<([{") - (c in ">)]}")
        if c == "," and depth == 0:
            found.append("")
        else:
            found[-1] += c
    return [each.strip() for each in found if each.strip()]

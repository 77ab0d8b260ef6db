"""For test_triton_glue, in a process where Triton does not interpret: what a compile and a launch would look up.

Prints for every op with a Triton kernel what is wrong, if the launch's sources are not among those compiled ahead, and
what is said of one that is launched as a dependent and does not wait.
"""

import json
import sys
from types import SimpleNamespace

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.runtime import jit

import tilery.ops  # noqa: F401  fills the registry
from tilery.base.errors import CompileFailed
from tilery.core import policy
from tilery.core.cases import call_for
from tilery.core.op import REGISTRY
from tilery.hardware import device, toolkit
from tilery.languages import triton_glue

BACKEND = make_backend(GPUTarget("cuda", 90, 32))
compiled, launched = set(), set()


class Nothing:
    """Stands for a compiled kernel."""

    metadata = type("Metadata", (), {"shared": 0})
    run = function = packed_metadata = None

    def __init__(self, waits):
        self.asm = {"cubin": b"", "ttgir": "", "ptx": "griddepcontrol.wait" if waits else ""}


def key(source, options):
    return source.fn.fn.__name__, source.hash(), str(sorted(vars(options).items(), key=str))


def compile_nothing(source, target, options):
    compiled.add(key(source, BACKEND.parse_options(dict(options))))
    return Nothing(waits=options["launch_pdl"])


def launch_nothing(self, *args, grid, warmup=False, **kwargs):
    """As JITFunction.run does until it looks into its cache."""
    kwargs["debug"] = kwargs.get("debug", self.debug) or jit.knobs.runtime.debug
    kwargs["instrumentation_mode"] = jit.knobs.compilation.instrumentation_mode
    bind = jit.create_function_from_signature(self.signature, self.params, BACKEND)
    bound, specialization, options = bind(*args, **kwargs)
    options, *made = self._pack_args(BACKEND, kwargs, bound, specialization, options)
    launched.add(key(triton_glue.ASTSource(self, *made), options))
    return Nothing(waits=True)


def on_cpu(spec):
    return torch.empty_strided(spec.shape, spec.strides, dtype=spec.dtype)


def default(op, call):
    return op.kernel("triton").default(call)


def found(op):
    """Whether all that a launch would look up is there; launches that `compile` does not cover have other names."""
    cases = [c for c in op.cases["test"] if "triton" not in c.refused_by]
    case = next((c for c in cases if "bf16" in (c.params.get("dtype"), c.params.get("out"))), cases[0])
    compiled.clear()
    launched.clear()
    call = call_for(op, case)
    config = default(op, call)
    policy.compiled(op, "triton", call, config, "sm_90")
    args = op.complete((), op.inputs(**case.params, device="cpu", seed=0))
    plan = policy.decide(op, call, "triton", config)
    plan.run((*args, *map(on_cpu, plan.outs), *map(on_cpu, plan.workspace)))
    names = {name for name, *_ in compiled}
    return bool(launched) and {k for k in launched if k[0] in names} <= compiled


def wrong(op):
    """What is wrong with an op's kernel, in words; nothing if all is well."""
    try:
        return "" if found(op) else "a launch looks up what was not compiled ahead"
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def said_of_one_that_does_not_wait(op):
    triton.compile = lambda source, target, options: Nothing(waits=False)
    call = call_for(op, op.cases["test"][0])
    try:
        policy.compiled(op, "triton", call, default(op, call), "sm_90")
    except CompileFailed as error:
        return str(error)


def main():
    triton.compile = compile_nothing
    toolkit.resources = lambda code: SimpleNamespace(registers=0, spills=0, shared=0)
    jit.JITFunction.run = launch_nothing
    torch._C._cuda_getDevice, torch._C._cuda_getCurrentRawStream = lambda: 0, lambda index: 0
    ops = [op for op in REGISTRY.values() if "triton" in op.kernels]
    with device.pretend("sm_90"):
        made = {op.name: wrong(op) for op in ops}
        json.dump([made, said_of_one_that_does_not_wait(REGISTRY["softmax"])], sys.stdout)


if __name__ == "__main__":
    main()

"""An integer that changes from call to call (a seed, the index to ignore) compiles no Triton kernel anew.

This file is also a script, for a process in which Triton does not interpret: it prints which kernels look at a value.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tilery import languages

VALUES = (0, 1, 16, -100, 2**31, -(2**31) - 1, 2**40, 2**63 - 1, -(2**63))


def test_one_compiled_code_serves_every_value():
    if why := languages.missing("triton"):
        pytest.skip(why)
    paths = os.pathsep.join((str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")))
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": paths}
    made = subprocess.run([sys.executable, __file__], env=env, capture_output=True, text=True, timeout=300)
    assert made.returncode == 0, made.stderr
    found = json.loads(made.stdout)
    assert {"cross_entropy ignore_index", "sample seed_low", "sample seed_high", "sample top_k"} <= set(found)
    assert {what: kinds for what, kinds in found.items() if len(kinds) != 1} == {}


def main():
    """Print for every such argument what Triton makes of its values: type, and what is known of them."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    import tilery.ops  # noqa: F401  fills the registry
    from cases import plain_case
    from tilery.base.launch import Launch, Scalar
    from tilery.core import policy
    from tilery.core.cases import call_for
    from tilery.core.op import REGISTRY
    from tilery.hardware import gpu
    from tilery.languages import triton_glue

    backend, found = make_backend(GPUTarget("cuda", 90, 32)), {}
    for op in REGISTRY.values():
        if "triton" not in op.kernels or not any(
            kind.types == (int,) and not kind.decides for kind in op.signature.kinds
        ):
            continue
        with gpu.pretend("sm_90"):
            call, kernel = call_for(op, plain_case(op, "fp16", "triton")), op.kernel("triton")
            config = kernel.default(call)
            launches = kernel.launches(policy.with_workspace(op, kernel, call, config)[1], config)
        for launch in launches:
            for name, scalar in launch.args.items() if isinstance(launch, Launch) else ():
                if isinstance(scalar, Scalar) and scalar.kind is int:
                    bind = create_function_from_signature(launch.kernel.signature, launch.kernel.params, backend)
                    place = launch.kernel.arg_names.index(name)
                    given = [0] * len(launch.kernel.arg_names)
                    kinds = set()
                    for value in VALUES:
                        given[place] = scalar.function(value) if scalar.function else value
                        kinds.add(str(bind(*given)[1][place]))
                    kinds |= set() if triton_glue._one_code(launch) else {"looked at in every launch"}
                    found[f"{op.name} {name}"] = sorted(kinds)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()

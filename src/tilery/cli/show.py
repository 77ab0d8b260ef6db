"""`tilery show`: what the compiler made of a kernel."""

from typing import Annotated

import typer

from tilery.cli import common


def show(
    op: Annotated[str, typer.Argument(help="The op.")],
    backend: Annotated[str, typer.Option("--backend", "-b", help="The kernel.")],
    stage: Annotated[
        str | None, typer.Option(help="source, ir, cuda, ptx, sass or asm; the stages there are if none.")
    ] = None,
    arch: Annotated[str | None, typer.Option(help="sm_90, say; the kernel's own first choice if not given.")] = None,
    case: common.CaseText = None,
    json: common.Json = False,
) -> None:
    """Show source, IR, CUDA, PTX or SASS of a kernel, with registers, spills and shared memory. Needs no GPU."""
    from tilery import languages
    from tilery.base.errors import BadInput, ToolMissing
    from tilery.core import policy
    from tilery.core.cases import specs_for
    from tilery.hardware import device
    from tilery.measure import inspect
    from tilery.measure.compile import Compiler
    from tilery.measure.place import COMPILE_ARCH
    from tilery.measure.result import Row

    (contract,) = common.chosen_ops([op])
    if backend not in contract.kernels:
        raise BadInput(f"--backend must be one of {', '.join(contract.kernels)}, got {backend!r}")
    if stage is not None and stage not in inspect.STAGES:
        raise BadInput(f"--stage must be one of {', '.join(inspect.STAGES)}, got {stage!r}")
    if why := languages.missing(backend):
        raise ToolMissing(why)
    archs = contract.kernel(backend).archs
    arch = arch or (COMPILE_ARCH if COMPILE_ARCH in archs else archs[0])
    if arch not in archs:
        raise BadInput(f"--arch: {op} {backend} builds for {', '.join(archs)}, got {arch!r}")
    own = contract.cases["bench_cpu" if arch == "cpu" else "bench"][-1]
    chosen = common.parsed_case(contract, case) if case is not None else own
    if stage == "source" and not json:
        print(inspect.source(contract, backend))
        return
    specs = specs_for(contract, chosen, "cpu" if arch == "cpu" else "cuda:0")
    with device.pretend(arch):
        if why := policy.problem_refusal(contract, backend, contract.call(specs)):
            raise BadInput(f"{op} {backend} refuses {chosen}: {why}")
    with Compiler() as compiler:
        artifact = compiler.compile(op, backend, specs, arch)
    row = Row(
        op, backend, str(chosen), "compiled", arch=arch,
        registers=artifact.registers, spills=artifact.spills, shared=artifact.shared,
    )  # fmt: skip
    text = None
    if stage is not None:
        text = inspect.source(contract, backend) if stage == "source" else inspect.stage(artifact, stage)
    if json:
        common.print_json([row], stages=inspect.stages(artifact), stage=stage, text=text)
        return
    if text is not None:
        print(text)
    console = common.console()
    used = f"{row.registers} registers, {row.spills} bytes spilled, {row.shared} bytes of shared memory"
    console.print(
        f"{op} {backend} {chosen} for {arch}: {used if row.registers is not None else 'host code'}", highlight=False
    )
    if stage is None:
        console.print(f"stages: {', '.join(inspect.stages(artifact))} (--stage NAME prints one)", highlight=False)

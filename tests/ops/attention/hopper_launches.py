"""What attention's CUDA kernels hand to the driver, by the names of their arguments: the fixture `launches` has it."""

from typing import Any, NamedTuple

from tilery.base.launch import Launch
from tilery.core import policy
from tilery.core.op import Op


class Handed(NamedTuple):
    """One launch."""

    kernel: Any  # cuda_glue.Kernel
    grid: int
    args: dict[str, Any]  # by name, those of a params struct among them; maps are numbers, in the order they were made


class Run(NamedTuple):
    launches: list[Handed]
    outs: tuple[Any, ...]
    workspace: dict[str, Any]


def run(op: Op, config: Any, args: tuple[Any, ...], launches: Any) -> Run:
    """Run what the kernel launches for these arguments, with outputs and workspace of its own."""
    from tilery.languages import cuda_glue

    kernel, call, found = op.kernel("cuda.hopper"), op.call(op.specs(args)), []
    specs, complete = policy.with_workspace(op, kernel, call, config)
    outs = tuple(spec.empty().fill_(float("nan")) for spec in op.output_specs(call))
    workspace = tuple(spec.empty() for spec in specs)
    values = (*args, *outs, *workspace)
    for launch in kernel.launches(complete, config):
        if isinstance(launch, Launch):
            cuda_glue.bind(launch, args[0].device)(values)
            made, (grid, *given) = launches[0][-1]
            names = [name for p in cuda_glue.signature_of(launch.kernel).parameters for name in _names(p)]
            found.append(Handed(made, grid, dict(zip(names, given, strict=True))))
        else:
            launch.run(values)
    return Run(found, outs, dict(zip(kernel.workspace(call, config), workspace)))


def _names(parameter: Any) -> list[str]:
    return [field.name for field in getattr(parameter.type, "fields", ())] or [parameter.name]

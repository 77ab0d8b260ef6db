"""A kernel module of functions of a problem: what an op's arguments come to, of specs for a plan or of tensors."""

from collections.abc import Callable
from typing import Any

Functions = tuple[Callable[..., Any], ...]


def functions(
    of: Callable[..., Any], of_run: Callable[..., Any], refusal: Callable[..., str | None],
    default: Callable[..., Any], configs: Callable[..., list[Any]], estimate: Callable[..., Any],
    compile: Callable[..., Any], run: Callable[..., None],
) -> Functions:  # fmt: skip
    """refusal, default, configs, estimate, compile and run, as dispatch calls them.

    The problem is of(specs) or of_run(outs, args); a config comes after it, then an arch, or a workspace.
    """
    return (
        lambda *specs, config=None: refusal(of(specs), config),
        lambda *specs: default(of(specs)),
        lambda *specs: configs(of(specs)),
        lambda *specs, config: estimate(of(specs), config),
        lambda specs, config, arch: compile(of(specs), config, arch),
        lambda outs, args, config, *kept: run(of_run(outs, args), config, *kept),
    )

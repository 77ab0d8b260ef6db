"""A core takes a block of queries and walks over the keys they see."""

from tilery.parts.attention import outputs, problem, problem_of_run
from tilery.parts.numba_attention import Config, archs, kernel
from tilery.parts.numba_attention_tasks import of_attention

__all__ = ["Config", "archs", "compile", "configs", "default", "refusal", "run", "workspace"]

refusal, default, configs, workspace, compile, run = kernel(
    lambda outs, specs: of_attention(problem(outs, specs)),
    lambda outs, args: of_attention(problem_of_run(outs, args)),
    outputs,
)

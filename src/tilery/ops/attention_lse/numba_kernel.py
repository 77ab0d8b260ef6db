"""As attention, and the lse is written too."""

from tilery.parts.attention import outputs_lse, problem, problem_of_run
from tilery.parts.numba_attention import Config, archs, kernel
from tilery.parts.numba_attention_tasks import of_attention

__all__ = ["Config", "archs", "compile", "configs", "default", "refusal", "run", "workspace"]

refusal, default, configs, workspace, compile, run = kernel(
    lambda outs, specs: of_attention(problem(outs, specs)),
    lambda outs, args: of_attention(problem_of_run(outs, args)),
    outputs_lse,
)

"""attention_cascade in every language: attention_chunked's kernel over prefixes, attention_decode's, and a merge."""

from typing import Any

from tilery.base.launch import Host, Launch
from tilery.base.spec import TensorSpec
from tilery.core.kernel import Kernel
from tilery.ops.attention.cascade_call import CascadeCall, merge_call, pass_of, results


class Cascade(Kernel):
    """A language says which kernels the three are; its Config has `passes`, the configs of the first two."""

    passes: tuple[Kernel, Kernel]
    merge: Kernel

    def refusal(self, call: CascadeCall, config: Any = None) -> str | None:
        configs = (None, None) if config is None else config.passes
        found = (kernel.refusal(pass_of(call, i), configs[i]) for i, kernel in enumerate(self.passes))
        return next((why for why in found if why is not None), None)

    def defaults(self, call: CascadeCall) -> tuple[Any, Any]:
        """Of the two passes."""
        prefix, own = (kernel.default(pass_of(call, i)) for i, kernel in enumerate(self.passes))
        return prefix, own

    def tried(self, call: CascadeCall) -> tuple[Any, Any]:
        """What a tuner tries for each of the two."""
        prefix, own = (kernel.configs(pass_of(call, i)) for i, kernel in enumerate(self.passes))
        return prefix, own

    def workspace(self, call: CascadeCall, config: Any) -> dict[str, TensorSpec]:
        merging = merge_call(call)
        found = results(call) | _named("merge", self.merge.workspace(merging, self.merge.default(merging)))
        for i, kernel in enumerate(self.passes):
            found |= _named(f"pass_{i}", kernel.workspace(pass_of(call, i), config.passes[i]))
        return found

    def launches(self, call: CascadeCall, config: Any) -> list[Launch | Host]:
        found: list[Launch | Host] = []
        for i, kernel in enumerate(self.passes):
            found += _launches(call, f"pass_{i}", kernel, pass_of(call, i), config.passes[i])
        merging = merge_call(call)
        return found + _launches(call, "merge", self.merge, merging, self.merge.default(merging))


def _named(which: str, workspace: dict[str, TensorSpec]) -> dict[str, TensorSpec]:
    return {f"{which}_{name}": spec for name, spec in workspace.items()}


def _launches(call: CascadeCall, which: str, kernel: Kernel, each: Any, config: Any) -> list[Launch | Host]:
    own = {name: getattr(call, f"{which}_{name}") for name in kernel.workspace(each, config)}
    return kernel.launches(each.extended(own), config)

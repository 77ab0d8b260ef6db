"""What every kernel is: an object that says what it takes, how it may be configured and what it launches."""

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch

from tilery.base.launch import Host, Launch
from tilery.base.spec import TensorSpec, Work
from tilery.core.call import Call

_WARPS = (1, 2, 4, 8, 16, 32)


class Kernel:
    """One kernel of one op. All methods see specs, never data, and may ask `hardware` about the specs' device."""

    archs: tuple[str, ...]  # what it builds for: "cpu", or "sm_90" …
    Config: type  # a frozen dataclass of plain values

    def refusal(self, call: Call, config: Any = None) -> str | None:
        """Why it cannot take this call, or this config for it, in a sentence; None if it can."""
        return None

    def default(self, call: Call) -> Any:
        """The config for a call that nobody has tuned."""
        raise NotImplementedError(f"{type(self).__name__} must say its default config")

    def configs(self, call: Call) -> Sequence[Any]:
        """What a tuner tries for this call; none of them is refused."""
        return [self.default(call)]

    def workspace(self, call: Call, config: Any) -> dict[str, TensorSpec]:
        """Memory that a call needs besides its outputs, by the names under which `launches` finds it."""
        return {}

    def launches(self, call: Call, config: Any) -> list[Launch | Host]:
        """What runs, in order. `call` has the outputs and the workspace too."""
        raise NotImplementedError(f"{type(self).__name__} must say what it launches")

    def library(self, where: torch.device) -> str:
        """Whose code runs on this device, if it is not ours: "cuBLAS through torch"; dispatch says so."""
        return ""

    def expected_us(self, call: Call, config: Any) -> float | None:
        """The time that a call should take, by a cost model fitted to measurements; None where there is no model."""
        return None

    def estimate(self, call: Call, config: Any) -> Work | None:
        """The work of one block, for the tuner to leave out configs that it models at more than twice the best."""
        return None


def config_refusal(kernel: Kernel, config: Any) -> str | None:
    """Why no kernel takes such a config, so that none has to say it: sizes below 1, warps that are no power of two.

    0 stands for something where it is a field's default, and in tiles of empty tensors on a CPU.
    """
    for field in fields(config):
        value = getattr(config, field.name)
        if type(value) is not int:
            continue
        least = 0 if field.default == 0 or kernel.archs == ("cpu",) else 1
        if value < least:
            return f"{field.name} must be {least} or more, got {value}"
        if field.name == "num_warps" and value not in _WARPS:
            return f"num_warps must be one of {', '.join(map(str, _WARPS))}, got {value}"
    return None

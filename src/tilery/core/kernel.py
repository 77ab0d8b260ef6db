"""What every kernel is: an object that says what it takes, how it may be configured and what it launches."""

from collections.abc import Sequence
from typing import Any

from tilery.base.launch import Host, Launch
from tilery.base.spec import TensorSpec, Work
from tilery.core.call import Call


class Kernel:
    """One kernel of one op. All methods see specs, never data, and may ask `hardware` about the specs' device."""

    archs: tuple[str, ...]  # what it builds for: "cpu", or "sm_90" …
    Config: type  # a frozen dataclass of plain values

    def refusal(self, call: Call, config: Any = None) -> str | None:
        """Why it cannot take this call, or this config for it, in a sentence; None if it can."""
        return None

    def default(self, call: Call) -> Any:
        """The config for a call that nobody has tuned."""
        raise NotImplementedError

    def configs(self, call: Call) -> Sequence[Any]:
        """What a tuner tries for this call; none of them is refused."""
        return [self.default(call)]

    def workspace(self, call: Call, config: Any) -> dict[str, TensorSpec]:
        """Memory that a call needs besides its outputs, by the names under which `launches` finds it."""
        return {}

    def launches(self, call: Call, config: Any) -> list[Launch | Host]:
        """What runs, in order. `call` has the outputs and the workspace too."""
        raise NotImplementedError

    def estimate(self, call: Call, config: Any) -> Work | None:
        """The work of one block, for the tuner to leave out configs that it models at more than twice the best."""
        return None

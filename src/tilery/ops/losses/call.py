"""What kernels ask of a call of a cross entropy."""

from tilery.base.rows import rows as rows_of
from tilery.core.call import Call

READ_IGNORED_UP_TO = 1024  # rows: so few are all read at once, ignored or not, so that none waits for its target


class LossCall(Call):
    """A call with logits [..., N] and a target for each row."""

    @property
    def n(self) -> int:
        """Number of classes."""
        found: int = self.logits.shape[-1]
        return found


class LinearLossCall(LossCall):
    """A call with x [..., K] and weight [N, K], whose product the logits are."""

    @property
    def m(self) -> int:
        return rows_of(self.x).m

    @property
    def n(self) -> int:
        found: int = self.weight.shape[0]
        return found

    @property
    def k(self) -> int:
        found: int = self.x.shape[-1]
        return found

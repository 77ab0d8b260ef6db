"""What kernels ask of a call of dropout."""

from tilery.base.launch import Scalar
from tilery.core.call import Call


def factor(p: float) -> float:
    """What is kept is multiplied by this."""
    return 1 / (1 - p) if p < 1 else 0.0


class DropoutCall(Call):
    @property
    def scale(self) -> Scalar:
        """What elements that are kept are multiplied by."""
        found: Scalar = self.p.then(factor)
        return found

"""softmax in CUDA C++: a row waits in registers, or passes through shared memory, so that x is read once."""

from pathlib import Path
from typing import Any

from tilery.base.rows import rows
from tilery.base.spec import TensorSpec
from tilery.core.call import Call
from tilery.ops.rows.cuda_rows import CudaRows


class Softmax(CudaRows):
    source = Path(__file__).with_name("softmax.cu")

    def inputs(self, call: Call) -> tuple[TensorSpec, ...]:
        return (call.x,)

    def args(self, call: Call) -> dict[str, Any]:
        m, n, stride = rows(call.x)
        return {"x": call.x, "y": call.y, "x_stride": stride, "m": m, "n": n}


softmax = Softmax()

"""cross_entropy in CUDA C++: a warp, a block or a cluster reads a row once.

Every thread keeps a maximum and sums of its own until the row's end.
"""

from dataclasses import dataclass
from pathlib import Path

from tilery.base.launch import Launch
from tilery.base.rows import rows
from tilery.core.kernel import Kernel
from tilery.hardware.gpu import ARCHS, gpu
from tilery.languages.cuda_source import Source, vector_width
from tilery.ops.losses.call import READ_IGNORED_UP_TO, LossCall
from tilery.ops.rows.cuda_rows import THREADS, Clusters, cluster_configs, cluster_refusal, spread

_SOURCE = Path(__file__).with_name("cross_entropy.cu")
_ONE_BLOCK = 8192  # columns up to which one block takes a row; longer ones are for clusters where there are few
_ROWS = (1, 2, 4, 8)
_WARP = THREADS[0]


@dataclass(frozen=True)
class Config(Clusters):
    rows: int = 1  # of a block, a warp for each


class CrossEntropy(Kernel):
    archs = ARCHS
    Config = Config

    def refusal(self, call: LossCall, config: Config | None = None) -> str | None:
        if config and config.rows not in _ROWS:
            return f"rows must be one of {', '.join(map(str, _ROWS))}, got {config.rows}"
        if config and config.rows > 1 and (config.threads, config.cluster) != (_WARP, 1):
            return f"several rows in a block have {_WARP} threads each and no cluster, got {config}"
        return cluster_refusal(call.logits, config)

    def default(self, call: LossCall) -> Config:
        m, n, _ = rows(call.logits)
        sms = gpu(call.logits.device).sms
        cluster = spread(call.logits, busy=sms) if n > _ONE_BLOCK else 1
        if cluster > 1:
            return Config(512, cluster)
        least = _WARP if n <= 16384 else 128  # 8192 × 8192 on an H200: 37.4 µs with a warp for a row, 40.9 with four
        most = min(sms * 1024 // max(m, 1), n // 8)  # threads where rows are few: 8 values for each
        threads = max([t for t in THREADS if t <= min(most, 512)] + [least])
        return Config(threads, rows=4 if threads == _WARP and m > sms else 1)

    def configs(self, call: LossCall) -> list[Config]:
        several = [Config(_WARP, rows=count) for count in _ROWS[1:]]
        return [Config(c.threads, c.cluster) for c in cluster_configs(call.logits)] + several

    def launches(self, call: LossCall, config: Config) -> list[Launch]:
        m, n, stride = rows(call.logits)
        args = {"logits": call.logits, "targets": call.targets, "losses": call.loss, "lses": call.lse}
        args |= {"logits_stride": stride, "m": m, "n": n, "ignore_index": call.ignore_index}
        args |= {"label_smoothing": call.label_smoothing, "z_loss": call.z_loss}
        args |= {"read_ignored": m <= READ_IGNORED_UP_TO}
        constants = {"T": call.logits.dtype, "VEC": vector_width((call.logits,), n, stride)}
        constants |= {"THREADS": config.threads, "CLUSTER": config.cluster, "ROWS_PER_BLOCK": config.rows}
        blocks, options = -(-m // config.rows) * config.cluster, {"threads": config.threads * config.rows}
        source = Source(_SOURCE, "cross_entropy")
        return [Launch(source, blocks, args, constants, options, cluster=config.cluster, pdl=True)]


cross_entropy = CrossEntropy()

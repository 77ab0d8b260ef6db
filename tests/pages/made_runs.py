"""Runs as `tilery bench` would keep them, made by hand: their sums are known."""

import statistics

from tilery.measure.result import Row
from tilery.measure.store import Run

GPU, CPU = "NVIDIA H200", "CPU Imagined x4"
CEILINGS = {
    GPU: {"read": 4.4e12, "copy": 4.2e12, "write": 4.0e12, "flops": {"fp32": 5e13, "bf16": 8e14}, "launch_us": 1.5}
}
NASTY = "</script ></script><img src=x onerror='throw 1'> \"quoted\" & <!-- %% \u2028 end"
SASS = "/*0000*/ LDG.E.128 R4, [R2] ;\n/*0010*/ EXIT ;\n"
MACHINE = {
    "tilery": "0.1.0", "python": "3.12.3", "system": "Linux x86_64", "cpu": CPU, "gpu": GPU, "arch": "sm_90",
    "torch": "2.11.0", "cuda": "13.0", "languages": {"triton": "3.6.0"},
}  # fmt: skip
WOBBLE = (0.99, 1.0, 1.01, 1.0, 0.995, 1.005)  # of a round, the same for every arm: ratios are exact


def timed(op, kernel, case, ms, torch_ms, device=GPU, **more):
    """A row whose ratio to torch is torch_ms / ms in every round."""
    ratio = torch_ms / ms
    m = int(case.split(",")[0].removeprefix("m="))
    given = {
        "samples": tuple(ms * w for w in WOBBLE), "ms": ms, "ms_low": 0.99 * ms, "ms_high": 1.01 * ms, "inputs": "cold",
        "ratio": ratio, "ratio_low": 0.99 * ratio, "ratio_high": 1.01 * ratio, "timed_by": "graph", "error": 1e-3,
        "flops": 5 * m * 4096, "bytes": 4 * m * 4096, "dtype": "bf16", "roof": 0.5,
    }  # fmt: skip
    given |= {"gbps": given["bytes"] / ms / 1e6, "tflops": given["flops"] / ms / 1e9}
    return Row(op, kernel, case, "pass", device=device, **(given | more))


def cell(op, case, torch_ms, kernels, device=GPU):
    """torch, its control and the others, by their ratio to torch."""
    arms = {"baseline:torch": 1.0, "control:torch": 1.0} | kernels
    return [timed(op, name, case, torch_ms / ratio, torch_ms, device) for name, ratio in arms.items()]


def gpu_rows(code=""):
    """softmax at three sizes with a peer that matmul does not have; what failed and was refused."""
    rows = []
    for m, torch_ms in ((16, 0.004), (1024, 0.02), (8192, 0.1)):
        case = f"m={m},n=4096,dtype=bf16"
        arms = {"triton": 2.0, "cuda.wide": 0.5, "cuda.narrow": 1.25, "baseline:liger": 1.6, "control:copy": 3.0}
        rows += cell("softmax", case, torch_ms, arms)
    rows += cell("matmul", "m=64,n=4096,k=4096,dtype=bf16", 0.05, {"triton": 0.8, "cuda.wide": 0.02})
    for row in rows:
        if row.kernel == "triton":
            row.code, row.registers, row.spills, row.shared, row.config = code, 32, 0, 1024, "Config(warps=4)"
            row.clock, row.power, row.temperature, row.arch = 1980.0, 512.5, 55.0, "sm_90"
    rows += [
        Row("softmax", "cupy", "m=16,n=4096,dtype=bf16", "fail", NASTY, device=GPU),
        Row("softmax", "gluon", "m=16,n=4096,dtype=bf16", "refused", "wgmma takes bf16, got fp32", device=GPU),
        Row("softmax", "baseline:quack", "", "skipped", "quack-kernels is not installed"),
    ]
    return rows


def put(store, rows, name="20260101-120000-aaaaaa", finished="2026-01-01T12:30:00+00:00", **machine):
    git = {"commit": "0123456789abcdef0123456789abcdef01234567", "changed": False}
    run = Run(name, f"{name}", finished, "tilery bench", MACHINE | machine, git)
    store.put(run, rows)
    return run


def put_gpu(store, name="20260101-120000-aaaaaa", **more):
    code = store.add_code({"ptx": ".target sm_90\n", "sass": SASS})
    return put(store, gpu_rows(code), name, ceilings=CEILINGS, **more)


def put_cpu(store, name="20260102-120000-bbbbbb"):
    """An older run: no ceilings."""
    rows = cell("softmax", "m=16,n=4096,dtype=bf16", 1.0, {"numba": 4.0}, CPU)
    return put(store, rows, name, gpu=None, arch="cpu")


def candidate(kernel, config, ms=None, case="m=64,n=4096,k=4096,dtype=bf16", reference_ms=0.06, **more):
    """A row of a tune: with a time, or with the status and the reason that it has none."""
    if ms is None:
        return Row("matmul", kernel, case, config=config, device=GPU, stage="tune", **more)
    row = timed("matmul", kernel, case, ms, reference_ms, config=config, stage="tune", inputs="", **more)
    row.ratio, row.ratio_low, row.ratio_high = None, None, None  # there is no torch beside it
    row.against = tuple(reference_ms * w for w in WOBBLE)
    return row


def tune_rows():
    """Nine candidates of one matmul: five right, one wrong, one that does not build, one pruned, one refused."""
    return [
        candidate("triton", "Config(block_m=64, warps=4)", 0.06, default=True),
        candidate("triton", "Config(block_m=128, warps=4)", 0.05),
        candidate("triton", "Config(block_m=128, warps=8)", 0.04, rank=0),
        candidate("triton", "Config(block_m=256, warps=8)", status="fail", reason=f"wrong: {NASTY}"),
        candidate("triton", "Config(block_m=256, warps=4)", status="fail", reason="spills: 64 bytes"),
        candidate("cuda.wide", "Config(stages=2)", 0.055, default=True, rank=1),
        candidate("cuda.wide", "Config(stages=3)", 0.08),
        candidate("cuda.wide", "Config(stages=9)", status="skipped", reason="pruned: modelled 3.1 × the best"),
        candidate("gluon", "", status="refused", reason="wgmma takes bf16, got fp32"),
    ]


def put_tune(store, name="20260103-120000-cccccc", rows=None):
    return put(store, rows if rows is not None else tune_rows(), name)


def median_ratio(ours, theirs):
    return statistics.median(b / a for a, b in zip(ours, theirs))

"""Epilogues of products by TMA and wgmma: what they refuse, what is launched, that they cost no spills."""

import pytest
import torch

from tilery import languages
from tilery.base.spec import case
from tilery.core import policy
from tilery.core.cases import call_for
from tilery.core.op import REGISTRY
from tilery.hardware import device

if why := languages.missing("cuda"):
    pytest.skip(why, allow_module_level=True)

from tilery.hardware import toolkit
from tilery.languages import cuda_glue
from tilery.ops import linear, linear_silu_mul, matmul_add
from tilery.ops.matmul.cuda.hopper import Config, GatedConfig

pytestmark = pytest.mark.usefixtures("hopper")


def call_of(op, m=64, n=256, k=1024, dtype="bf16", **more):
    return call_for(REGISTRY[op], case(m=m, n=n, k=k, dtype=dtype, **more))


def refusal(op, call, config=None):
    return REGISTRY[op].kernel("cuda.hopper").refusal(call, config)


@pytest.mark.parametrize(
    ("op", "more", "vectors"),
    [
        ("linear", {"n": 255, "bias": True}, False),
        ("linear", {"n": 254, "bias": True}, True),
        ("linear", {"n": 255, "activation": "gelu"}, True),
        ("linear", {"n": 252, "residual": True}, False),  # rows of 504 bytes
        ("linear", {"layout": "padded", "batch": 3, "residual": True, "bias": True, "activation": "silu"}, True),
        ("matmul_add", {"layout_c": "transposed"}, False),
        ("matmul_add", {"layout_c": "misaligned"}, False),
        ("matmul_add", {"m": 1, "layout_c": "padded"}, True),
        ("linear_silu_mul", {"n": 33}, True),
    ],
    ids=str,
)
def test_reads_what_it_adds_by_vectors_where_it_can(op, more, vectors):
    call = call_of(op, **more)
    *_, launch = REGISTRY[op].kernel("cuda.hopper").launches(*planned(op, call))
    assert launch.constants["VECTORS"] == vectors


def planned(op, call):
    """The call with its workspace, and the default config."""
    kernel = REGISTRY[op].kernel("cuda.hopper")
    config = kernel.default(call)
    return policy.with_workspace(REGISTRY[op], kernel, call, config)[1], config


@pytest.mark.parametrize(
    ("op", "more", "said"),
    [
        ("linear", {"k": 0, "bias": True}, "K must be at least 1"),
        ("linear", {"k": 0, "activation": "gelu"}, None),
        ("linear", {"n": 0, "residual": True, "bias": True}, None),
        ("linear_silu_mul", {"dtype": "fp32"}, "would round fp32 to tf32"),
    ],
)
def test_says_what_it_cannot_multiply(op, more, said):
    why = refusal(op, call_of(op, **more))
    assert why is None if said is None else said in why


@pytest.mark.parametrize(
    ("n", "name", "how"),
    [
        (256, "bias", {"aligned": False}),
        (256, "residual", {"aligned": False}),
        (256, "residual", {"strides": (260, 1)}),
        (252, "residual", {"strides": (256, 1)}),  # its last vector would end behind the row
    ],
)
def test_what_is_added_off_16_bytes_is_read_element_by_element(n, name, how):
    call = call_of("linear", n=n, **{name: True})
    specs = dict(zip(linear.signature.decisive, linear.specs_in(call)))
    off = linear.call(tuple((specs | {name: specs[name]._replace(**how)}).values()))
    *_, launch = REGISTRY["linear"].kernel("cuda.hopper").launches(*planned("linear", off))
    assert launch.constants["VECTORS"] is False


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            GatedConfig("large_m", 128, 256, 4, tma_store=True, multicast_b=2),
            None,
        ),  # stores 128 columns of c
        (GatedConfig("large_m", 128, 192, 4, tma_store=True), "tma_store takes 64 columns of c at a time"),
        (GatedConfig("large_m", 128, 128, 4, 2), "split_k of the large_m kernel must be one of 1, got 2"),
        (GatedConfig("small_m", 16, 64, 4, 2), "split_k of the small_m kernel must be one of 1, got 2"),
        (
            GatedConfig("small_m", 16, 56, 4),
            "block_n of the small_m kernel must be one of 32, 48, 64, 80, 96, 112, 128, 160, 192, 256, got 56",
        ),
        (GatedConfig("small_m", 16, 112, 4), None),
    ],
    ids=str,
)
def test_gate_and_up_are_in_one_block(config, said):
    why = refusal("linear_silu_mul", call_of("linear_silu_mul"), config)
    assert why is None if said is None else said in why


@pytest.mark.parametrize("m", [1, 64, 65, 512, 4096])
@pytest.mark.parametrize(("n", "k"), [(14336, 4096), (9, 72)])
@pytest.mark.parametrize("op", ["linear", "linear_silu_mul"])
def test_the_default_and_all_configs_are_taken(op, m, n, k):
    kernel, problem = REGISTRY[op].kernel("cuda.hopper"), call_of(op, m, n, k)
    found = kernel.configs(problem)
    assert kernel.default(problem) in found and len(found) == len(set(found)) <= 48
    assert all(type(c) is kernel.Config and kernel.refusal(problem, c) is None for c in found)
    assert all(kernel.estimate(problem, c).blocks > 0 for c in found)


@pytest.mark.parametrize("op", ["linear", "matmul_add", "linear_silu_mul"])
def test_is_asked_before_triton(op, monkeypatch):
    if why := languages.missing("triton"):
        pytest.skip(why)
    monkeypatch.setattr(device, "name", lambda where: "a GPU that nothing is tuned for")
    assert policy.decide(REGISTRY[op], call_of(op), None, None).kernel == "cuda.hopper"
    assert policy.decide(REGISTRY[op], call_of(op), "triton", None).kernel == "triton"


WHOLE = {"bias": True, "residual": True}
BUILT = [
    ("linear", Config("large_m", 128, 256, 4), {**WHOLE, "activation": "gelu"}),
    ("linear", Config("large_m", 128, 256, 3, tma_store=True, multicast_b=2), {**WHOLE, "activation": "silu"}),
    ("linear", Config("large_m", 128, 224, 4, 3), {**WHOLE, "activation": "gelu_tanh"}),
    ("linear", Config("large_m", 128, 256, 4), {"bias": True, "activation": "silu"}),
    ("linear", Config("small_m", 128, 128, 3), {**WHOLE, "activation": "gelu"}),
    ("linear", Config("small_m", 64, 48, 4, 8), {**WHOLE, "activation": "relu", "dtype": "fp16"}),
    ("matmul_add", Config("large_m", 128, 256, 4), {}),
    ("matmul_add", Config("small_m", 16, 48, 4), {"dtype": "fp16"}),
    ("linear_silu_mul", GatedConfig("large_m", 128, 256, 4), {}),
    ("linear_silu_mul", GatedConfig("large_m", 128, 256, 4, tma_store=True, multicast_b=2), {}),
    ("linear_silu_mul", GatedConfig("small_m", 128, 256, 2), {}),
]


@pytest.mark.parametrize(("op", "config", "more"), BUILT, ids=str)
def test_an_epilogue_neither_spills_nor_keeps_products_waiting(op, config, more):
    made = policy.compiled(REGISTRY[op], "cuda.hopper", call_of(op, **more), config, "sm_90")
    sass = toolkit.sass(made.cubin)
    assert made.spills == 0 and "HGMMA" in sass
    assert "DEPBAR.LE gsb0, 0x1" in sass and sass.count("DEPBAR.LE gsb0, 0x0") == 1  # only where a tile ends


def launched(op, out, args, config, launches):
    """The kernel that is handed to the driver, its arguments and the maps among them."""
    (launch,) = op.kernel("cuda.hopper").launches(op.call(op.specs(args)), config)
    assert list(launch.args)[-14:] == [
        "c", "m", "n", "k", "batch", "a_batch", "b_batch", "a_rows",
        "bias", "addend", "addend_row_stride", "addend_col_stride", "alpha", "beta",
    ]  # fmt: skip
    cuda_glue.bind(launch, torch.device("cuda:0"))((*args, out))
    (((made, given),), maps) = launches
    return made, given, maps


@pytest.mark.parametrize(
    "config", [Config("large_m", 128, 128, 4, tma_store=True), Config("small_m", 16, 48, 4)], ids=str
)
@pytest.mark.parametrize(("bias", "residual"), [(True, True), (True, False), (False, True)])
def test_linear_is_given_its_epilogue(config, bias, residual, launches):
    args = linear.complete((), linear.inputs(
        m=5, n=264, k=256, batch=3, layout="padded", bias=bias, residual=residual, activation="gelu", device="cpu"
    ))  # fmt: skip
    y = torch.empty(3, 5, 264, dtype=torch.bfloat16)
    made, given, maps = launched(linear, y, args, config, launches)
    x, weight, b, r = args[:4]
    pointer, *sizes, bias_at, residual_at, stride, step, alpha, beta = given[-14:]
    rows = config.block_m if config.large_m else 15  # of a tile that are loaded
    assert maps[0] == (x.data_ptr(), (256, 15, 1), (x.stride(-2), 256), (rows,), 2)
    assert maps[1] == (weight.data_ptr(), (256, 264, 1), (256, 256), (config.block_n,), 2)
    assert (pointer, sizes, alpha, beta) == (y.data_ptr(), [15, 264, 256, 1, 0, 0, rows], 1.0, 1.0)
    assert bias_at == (b.data_ptr() if bias else 0)
    assert (residual_at, stride, step) == ((r.data_ptr(), r.stride(-2), 1) if residual else (0, 0, 1))
    flags = f"gelu, {bias}, {residual}, False, True".lower()
    assert made.name.endswith(f"{flags}>") and made.name.startswith("hopper_gemm")


def test_linear_without_an_epilogue_is_the_plain_kernel(launches):
    args = linear.complete((), linear.inputs(m=5, n=64, k=256, device="cpu"))
    y = torch.empty(5, 64, dtype=torch.bfloat16)
    made, _, _ = launched(linear, y, args, Config("small_m", 8, 64, 4), launches)
    majors, sizes, epilogue = "false, false", "8, 1, 64, 4, 2, 1, 1, 1, 1", "none, false, false, false, true"
    assert made.name == f"hopper_gemm_small_m<__nv_bfloat16, {majors}, {sizes}, {epilogue}>"


def test_matmul_add_is_given_its_factors(launches):
    args = matmul_add.complete((), matmul_add.inputs(
        m=300, n=264, k=256, layout_c="padded", alpha=0.5, beta=-2.0, device="cpu"
    ))  # fmt: skip
    y = torch.empty(300, 264, dtype=torch.bfloat16)
    made, given, _ = launched(matmul_add, y, args, Config("large_m", 128, 128, 4, 3), launches)
    bias_at, c_at, stride, step, alpha, beta = given[-6:]
    assert (bias_at, c_at, stride, step, alpha, beta) == (0, args[2].data_ptr(), args[2].stride(0), 1, 0.5, -2.0)
    assert stride > 264 and made.name.endswith("none, false, true, true, true>")


@pytest.mark.parametrize(
    ("config", "grid", "boxes"),
    [
        (GatedConfig("large_m", 128, 128, 4, tma_store=True, multicast_b=2), 2 * 2 * 5, [128, 32, 64]),
        (GatedConfig("large_m", 128, 96, 4), 3 * 6, [128, 48]),
        (GatedConfig("small_m", 64, 112, 3), 5 * 5, [64, 56]),
    ],
    ids=str,
)
def test_gate_and_up_are_loaded_apart(config, grid, boxes, launches):
    args = linear_silu_mul.complete((), linear_silu_mul.inputs(m=300, n=264, k=256, device="cpu"))
    y = torch.empty(300, 264, dtype=torch.bfloat16)
    made, (blocks, *given), maps = launched(linear_silu_mul, y, args, config, launches)
    pointer, m, n, k = given[-14:-10]
    assert (blocks, pointer, m, n, k) == (grid, y.data_ptr(), 300, 264, 256)
    assert [box for *_, (box,), _ in maps[: len(boxes)]] == boxes
    assert maps[1][:3] == (args[1].data_ptr(), (256, 2 * 264, 1), (256, 256))
    assert made.name.startswith("hopper_gemm") and made.shared == config.shared

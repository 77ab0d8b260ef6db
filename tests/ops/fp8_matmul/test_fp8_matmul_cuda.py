"""fp8_matmul in CUDA C++: what it refuses and chooses, what it launches, that both kernels build."""

import ctypes

import pytest
import torch

from tilery import languages
from tilery.base.launch import Argument
from tilery.base.spec import TensorSpec, case
from tilery.core import policy
from tilery.core.cases import call_for
from tilery.ops import fp8_matmul

if why := languages.missing("cuda"):
    pytest.skip(why, allow_module_level=True)

from tilery.hardware import toolkit
from tilery.languages import cuda_glue, tensor_maps
from tilery.ops.fp8_matmul.cuda_kernels import Config
from tilery.ops.fp8_matmul.cuda_kernels import fp8_matmul as kernel

pytestmark = pytest.mark.usefixtures("hopper")


def call_of(m=64, n=256, k=1024, **more):
    return call_for(fp8_matmul, case(m=m, n=n, k=k, **more))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (Config("narrow", 128, 128, 4), "kernel must be one of large_m, small_m, got 'narrow'"),
        (Config("large_m", 64, 128, 4), "block_m of the large_m kernel must be one of 128, got 64"),
        (
            Config("large_m", 128, 160, 4),
            "block_n of the large_m kernel must be one of 32, 48, 64, 96, 128, 176, 192, 256, got 160",
        ),
        (Config("large_m", 128, 128, 4, split_k=2), "split_k of the large_m kernel must be one of 1, got 2"),
        (Config("small_m", 20, 128, 4), "block_m of the small_m kernel must be one of 8, 16, 24, 32"),
        (
            Config("small_m", 16, 72, 4),
            "block_n of the small_m kernel must be one of 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160, 192, 256",
        ),
        (Config("small_m", 128, 256, 4), "sums of 128 × 256 do not fit the registers of a block"),
        (Config("small_m", 16, 128, 4, split_k=16), "split_k of the small_m kernel must be one of 1, 2, 4, 8, got 16"),
        (Config("small_m", 128, 128, 2, 2), "partial sums of c must fit the memory of 2 stages"),
        (
            Config("small_m", 16, 128, 4, tma_store=True),
            "tma_store takes 64 columns of c at a time, in the large_m kernel alone",
        ),
        (Config("large_m", 128, 176, 4, tma_store=True), "tma_store takes 64 columns of c at a time"),
        (Config("small_m", 16, 128, 1), "stages must be at least 2"),
        (Config("large_m", 128, 256, 5), "pipeline of 5 stages takes 249504 bytes of shared memory, 231424 are there"),
    ],
)
def test_says_why_it_refuses_a_config(config, said):
    assert said in kernel.refusal(call_of(), config)


def test_there_are_as_many_parts_as_blocks_of_k_at_most():
    config = Config("small_m", 16, 128, 4, split_k=4)
    assert "split_k must be at most 2, the blocks of 128 in K, got 4" in kernel.refusal(call_of(k=256), config)
    assert kernel.refusal(call_of(k=512), config) is None


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"layout": "misaligned"}, "a must start at a multiple of 16 bytes"),
        ({"layout_b": "misaligned"}, "b must start at a multiple of 16 bytes"),
        ({"layout": "padded", "layout_b": "padded"}, None),
        ({"layout": "far"}, None),
        ({"m": 1, "layout": "padded"}, None),
        ({"k": 0}, None),
    ],
)
def test_takes_what_tma_can_load(more, said):
    why = kernel.refusal(call_of(**more))
    assert why is None if said is None else said in why


@pytest.mark.parametrize(
    ("stride", "said"), [(1032, "rows of a must start at multiples of 16 bytes"), (0, "rows of a must not overlap")]
)
def test_rows_must_lie_as_tma_wants_them(stride, said):
    call = call_of()
    moved = type(call)(call._values | {"a": call.a._replace(strides=(stride, 1))})
    assert said in kernel.refusal(moved)
    one = TensorSpec((1, 1024), (stride, 1), call.a.dtype, call.a.device, True)
    assert tensor_maps.refusal("a", one) is None  # one row has no stride


@pytest.mark.parametrize("m", [0, 1, 8, 17, 64, 65, 128, 512, 4096, 8192])
@pytest.mark.parametrize(("n", "k"), [(1, 128), (576, 7168), (4096, 8192), (28672, 4096), (24, 0)])
def test_the_default_and_all_configs_are_taken(m, n, k):
    problem = call_of(m, n, k)
    found = kernel.configs(problem)
    assert kernel.default(problem) in found and len(found) == len(set(found)) <= 48
    assert all(kernel.refusal(problem, c) is None for c in found)
    assert all(kernel.estimate(problem, c).blocks == c.blocks(m, n) for c in found)


def test_few_rows_are_spread_over_the_sms_and_many_get_large_tiles():
    def chosen(m, n, k):
        return kernel.default(call_of(m, n, k))

    assert (chosen(1, 4096, 8192).kernel, chosen(1, 4096, 8192).block_m) == ("small_m", 8)
    assert chosen(24, 4096, 8192).block_m == 24 and chosen(100, 576, 8192).split_k > 1
    assert chosen(16, 512, 8192).split_k >= 4 and chosen(16, 512, 256).split_k == 1
    assert (chosen(4096, 4096, 8192).kernel, chosen(4096, 4096, 8192).block_n) == ("large_m", 256)
    for m, n, k in ((1, 4096, 8192), (64, 7168, 2048), (128, 4096, 8192), (300, 5120, 5120)):
        config = chosen(m, n, k)
        waves = -(-config.blocks(m, n) // 132)
        assert config.blocks(m, n) / (132 * waves) > 0.6, config


BUILT = [
    (Config("large_m", 128, 48, 8), "e4m3", "e4m3", "bf16"),
    (Config("large_m", 128, 128, 6), "e4m3", "e4m3", "bf16"),
    (Config("large_m", 128, 176, 5), "e4m3", "e4m3", "bf16"),
    (Config("large_m", 128, 192, 4, tma_store=True), "e4m3", "e4m3", "fp16"),
    (Config("large_m", 128, 256, 3, tma_store=True), "e4m3", "e4m3", "bf16"),
    (Config("large_m", 128, 256, 4), "e5m2", "e4m3", "fp32"),
    *((Config("small_m", tokens, 128, 5, 4), "e4m3", "e5m2", "fp16") for tokens in (8, 16, 32, 64)),
    (Config("small_m", 16, 64, 8, 1), "e5m2", "e5m2", "bf16"),
    (Config("small_m", 64, 64, 4, 8), "e4m3", "e4m3", "fp32"),
    (Config("small_m", 64, 256, 3, 4), "e4m3", "e4m3", "bf16"),
    (Config("small_m", 128, 128, 4, 2), "e4m3", "e4m3", "bf16"),
]


@pytest.mark.parametrize(("config", "a", "b", "out"), BUILT, ids=lambda v: str(v))
def test_both_kernels_build_and_multiply_fp8_without_spills(config, a, b, out):
    made = policy.compiled(fp8_matmul, "cuda", call_of(dtype=a, dtype_b=b, out=out), config, "sm_90")
    assert made.spills == 0 and made.registers * config.threads <= 65536
    sass = toolkit.sass(made.cubin)
    part = config.block_n if config.block_n <= 128 else config.block_n // 2
    first, second, columns = (a, b, part) if config.large_m else (b, a, config.block_m)
    assert ("UTMASTG.2D" in sass) == config.tma_store
    assert f"QGMMA.64x{columns}x32.F32.{first}.{second}".upper() in sass.upper()
    assert "UTMALDG.2D" in sass and "LDL" not in sass and "STL" not in sass
    if not config.large_m or config.block_n == 256:  # which does not fit without it
        assert ("USETMAXREG" in sass) == config.large_m


# What is handed to the driver, without one.


@pytest.fixture
def encoded(monkeypatch):
    """Stands for cuTensorMapEncodeTiled: what it was asked."""
    asked = []

    def encode(to, kind, rank, address, sizes, strides, box, steps, *how):
        assert to % 64 == 0
        ctypes.memset(to, 1, 128)
        asked.append((kind, rank, address, list(sizes), list(strides), list(box), list(steps), how))
        return 0

    monkeypatch.setattr(tensor_maps, "_encode", lambda: encode)
    tensor_maps._made.cache_clear()
    yield asked
    tensor_maps._made.cache_clear()


def map_of(x, box_rows):
    return tensor_maps.of_matrix(Argument.at_slot(TensorSpec.of(x), 0), box_rows).bound((x,))


def test_a_map_says_how_a_matrix_lies_and_is_made_once(encoded):
    x = torch.zeros(40, 512, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, :384]
    first = map_of(x, 16)
    assert map_of(x, 16) is first and len(encoded) == 1
    assert map_of(x, 32) is not first and map_of(x[8:], 16) is not first
    kind, rank, address, sizes, strides, box, steps, how = encoded[0]
    assert (kind, rank, address, sizes, strides) == (0, 2, x.data_ptr(), [384, 40], [512])
    assert (box, steps) == ([128, 16], [1, 1])
    assert how == (0, 3, 2, 0)  # as it lies, swizzled over 128 bytes, 128 bytes into the L2, zeros outside
    half = map_of(torch.zeros(8, 128, dtype=torch.bfloat16), 8)
    assert half.getPtr() % 64 == 0 and encoded[-1][4:6] == ([256], [64, 8])


def test_a_map_that_the_driver_does_not_take_is_named(monkeypatch):
    monkeypatch.setattr(tensor_maps, "_encode", lambda: lambda *_: 1)
    with pytest.raises(RuntimeError, match=r"tensor map of \[24, 128\] of 1 bytes .* CUDA_ERROR_INVALID_VALUE"):
        map_of(torch.zeros(24, 128, dtype=torch.uint8), 8)


@pytest.mark.parametrize(
    ("m", "config", "blocks", "boxes"),
    [
        (40, Config("small_m", 16, 128, 4, 2), 3 * 3 * 2, [16, 128]),
        (300, Config("large_m", 128, 256, 4), 3 * 2, [128, 256]),
        (30_000, Config("large_m", 128, 256, 3, tma_store=True), 132, [128, 256, 64]),
    ],
)
def test_launches_as_planned(m, config, blocks, boxes, encoded, monkeypatch):
    launched = []
    monkeypatch.setattr(cuda_glue.Kernel, "launch", lambda self, *given: launched.append((self, given)))
    monkeypatch.setattr(cuda_glue.Kernel, "resident", lambda self: 132)
    n, k = 264, 256
    args = fp8_matmul.complete((), fp8_matmul.inputs(m=m, n=n, k=k, device="cpu", scales="column"))
    a, a_scale, b, b_scale, _ = args
    c = torch.empty(m, n, dtype=torch.bfloat16)
    (launch,) = kernel.launches(fp8_matmul.call(fp8_matmul.specs(args)), config)
    cuda_glue.bind(launch, torch.device("cuda:0"))((*args, c))
    ((made, (grid, a_map, b_map, *rest)),) = launched
    assert grid == blocks and made.threads == config.threads and made.shared == config.shared
    assert [asked[5] for asked in encoded] == [[128 // size, box] for size, box in zip((1, 1, 2), boxes)]
    assert [asked[2] for asked in encoded] == [x.data_ptr() for x in (a, b, c)[: len(boxes)]]
    if config.large_m:
        c_map, *rest = rest
        assert (c_map is a_map) == (not config.tma_store)
    assert a_map.getPtr() != b_map.getPtr()
    (parameters,) = rest
    given = [getattr(parameters._made, name) for name, _ in parameters._made._fields_]
    rows = -(-m // 4) * 4
    assert given == [a_scale.data_ptr(), 1, rows, b_scale.data_ptr(), 2, 1, c.data_ptr(), m, n, k]


def test_a_sum_of_nothing_is_zero_and_needs_no_map(encoded):
    args = fp8_matmul.complete((), fp8_matmul.inputs(m=5, n=8, k=0, device="cpu", out="fp32"))
    c = torch.full((5, 8), float("nan"))
    (launch,) = kernel.launches(fp8_matmul.call(fp8_matmul.specs(args)), Config("small_m", 16, 128, 8))
    launch.run((*args, c))
    assert (c == 0).all() and not encoded

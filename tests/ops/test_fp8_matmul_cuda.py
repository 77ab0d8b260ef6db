"""fp8_matmul in CUDA C++: what it refuses and chooses, what it hands to the driver, that every form builds."""

import ctypes

import pytest
import torch
from hopper_checks import flat

from tilery import languages
from tilery.base.spec import TensorSpec, case
from tilery.core.cases import specs_for
from tilery.ops import fp8_matmul

if why := languages.missing("cuda"):
    pytest.skip(why, allow_module_level=True)

from tilery.languages import cuda_glue, tensor_maps, toolkit
from tilery.ops.fp8_matmul import cuda_kernel
from tilery.ops.fp8_matmul.cuda_kernel import Config

pytestmark = pytest.mark.usefixtures("hopper")


def specs(m=64, n=256, k=1024, **more):
    return specs_for(fp8_matmul, case(m=m, n=n, k=k, **more), "cuda:0")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (Config("narrow", 128, 128, 4), "form must be one of wide, few, got 'narrow'"),
        (Config("wide", 64, 128, 4), "block_m of the wide form must be one of 128, got 64"),
        (
            Config("wide", 128, 160, 4),
            "block_n of the wide form must be one of 32, 48, 64, 96, 128, 176, 192, 256, got 160",
        ),
        (Config("wide", 128, 128, 4, splits=2), "splits of the wide form must be one of 1, got 2"),
        (Config("few", 24, 128, 4), "block_m of the few form must be one of 8, 16, 32, 48, 64, 96, 128, got 24"),
        (
            Config("few", 16, 72, 4),
            "block_n of the few form must be one of 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 256",
        ),
        (Config("few", 128, 256, 4), "sums of 128 × 256 do not fit the registers of a block"),
        (Config("few", 16, 128, 4, splits=16), "splits of the few form must be one of 1, 2, 4, 8, got 16"),
        (Config("few", 128, 128, 2, 2), "parts of c must fit the ring of 2 stages"),
        (Config("few", 16, 128, 4, staged=True), "tiles of c are staged 64 columns at a time, in the wide form alone"),
        (Config("wide", 128, 176, 4, staged=True), "tiles of c are staged 64 columns at a time"),
        (Config("few", 16, 128, 1), "stages must be at least 2"),
        (Config("wide", 128, 256, 5), "ring of 5 stages takes 249504 bytes of shared memory, 231424 are there"),
    ],
)
def test_says_why_it_refuses_a_config(config, said):
    assert said in cuda_kernel.refusal(*specs(), config=config)


def test_there_are_as_many_parts_as_blocks_of_k_at_most():
    config = Config("few", 16, 128, 4, splits=4)
    assert "splits must be at most 2, the blocks of 128 in K, got 4" in cuda_kernel.refusal(
        *specs(k=256), config=config
    )
    assert cuda_kernel.refusal(*specs(k=512), config=config) is None


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
def test_takes_what_tma_can_fetch(more, said):
    why = cuda_kernel.refusal(*specs(**more))
    assert why is None if said is None else said in why


@pytest.mark.parametrize(
    ("stride", "said"), [(1032, "rows of a must start at multiples of 16 bytes"), (0, "rows of a must not overlap")]
)
def test_rows_must_lie_as_tma_wants_them(stride, said):
    a, *others = specs()
    assert said in cuda_kernel.refusal(a._replace(strides=(stride, 1)), *others)
    one = TensorSpec((1, 1024), (stride, 1), a.dtype, a.device, True)
    assert tensor_maps.refusal("a", one) is None  # one row has no stride


@pytest.mark.parametrize("m", [0, 1, 8, 17, 64, 65, 128, 512, 4096, 8192])
@pytest.mark.parametrize(("n", "k"), [(1, 128), (576, 7168), (4096, 8192), (28672, 4096), (24, 0)])
def test_the_default_and_all_configs_are_taken(m, n, k):
    problem = specs(m, n, k)
    found = cuda_kernel.configs(*problem)
    assert cuda_kernel.default(*problem) in found and len(found) == len(set(found)) <= 48
    assert all(cuda_kernel.refusal(*problem, config=c) is None for c in found)
    assert all(cuda_kernel.estimate(*problem, config=c).blocks >= 0 for c in found)


def test_few_rows_are_spread_over_the_processors_and_many_get_wide_tiles():
    def chosen(m, n, k):
        return cuda_kernel.default(*specs(m, n, k))

    assert (chosen(1, 4096, 8192).form, chosen(1, 4096, 8192).block_m) == ("few", 8)
    assert chosen(24, 4096, 8192).block_m == 32 and chosen(100, 576, 8192).block_m == 128
    assert (chosen(128, 4096, 8192).form, chosen(128, 28672, 8192).form) == ("wide", "wide")
    assert (chosen(128, 4096, 8192).block_n, chosen(64, 7168, 2048).block_n) == (32, 56)  # 128 tiles
    assert chosen(4096, 2112, 7168).block_n == 176
    assert chosen(16, 512, 8192).splits >= 4 and [chosen(16, n, 8192).splits for n in (4096, 28672)] == [2, 1]
    assert chosen(16, 512, 256).splits == 1
    assert (chosen(64, 576, 7168).block_n, chosen(64, 576, 7168).splits) == (40, 8)
    assert (chosen(4096, 4096, 8192).form, chosen(4096, 4096, 8192).block_n) == ("wide", 256)
    assert (chosen(512, 4096, 8192).form, chosen(512, 4096, 8192).block_n) == ("wide", 128)


FORMS = [
    (Config("wide", 128, 48, 8), "e4m3", "e4m3", "bf16"),
    (Config("wide", 128, 128, 6), "e4m3", "e4m3", "bf16"),
    (Config("wide", 128, 176, 5), "e4m3", "e4m3", "bf16"),
    (Config("wide", 128, 192, 4, staged=True), "e4m3", "e4m3", "fp16"),
    (Config("wide", 128, 256, 3, staged=True), "e4m3", "e4m3", "bf16"),
    (Config("wide", 128, 256, 4), "e5m2", "e4m3", "fp32"),
    *((Config("few", tokens, 128, 5, 4), "e4m3", "e5m2", "fp16") for tokens in (8, 16, 32, 64)),
    (Config("few", 16, 64, 8, 1), "e5m2", "e5m2", "bf16"),
    (Config("few", 64, 64, 4, 8), "e4m3", "e4m3", "fp32"),
    (Config("few", 64, 256, 3, 4), "e4m3", "e4m3", "bf16"),
    (Config("few", 128, 128, 4, 2), "e4m3", "e4m3", "bf16"),
]


@pytest.mark.parametrize(("config", "a", "b", "out"), FORMS, ids=lambda v: str(v))
def test_every_form_builds_and_multiplies_fp8_without_spills(config, a, b, out):
    made = cuda_kernel.compile(specs(dtype=a, dtype_b=b, out=out), config, "sm_90")
    assert made.spills == 0 and made.registers * config.threads <= 65536
    sass = toolkit.sass(made.cubin)
    part = config.block_n if config.block_n <= 128 else config.block_n // 2
    first, second, columns = (a, b, part) if config.form == "wide" else (b, a, config.block_m)
    assert ("UTMASTG.2D" in sass) == config.staged
    assert f"QGMMA.64x{columns}x32.F32.{first}.{second}".upper() in sass.upper()
    assert "UTMALDG.2D" in sass and "LDL" not in sass and "STL" not in sass
    if config.form == "few" or config.block_n == 256:  # which does not fit without it
        assert ("USETMAXREG" in sass) == (config.form == "wide")


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


def test_a_map_says_how_a_matrix_lies_and_is_made_once(encoded):
    x = torch.zeros(40, 512, dtype=torch.uint8).view(torch.float8_e4m3fn)[:, :384]
    first = tensor_maps.of(x, 16)
    assert tensor_maps.of(x, 16) is first and len(encoded) == 1
    assert tensor_maps.of(x, 32) is not first and tensor_maps.of(x[8:], 16) is not first
    kind, rank, address, sizes, strides, box, steps, how = encoded[0]
    assert (kind, rank, address, sizes, strides) == (0, 2, x.data_ptr(), [384, 40], [512])
    assert (box, steps) == ([128, 16], [1, 1])
    assert how == (0, 3, 2, 0)  # as it lies, swizzled over 128 bytes, 128 bytes into the L2, zeros outside
    half = tensor_maps.of(torch.zeros(8, 128, dtype=torch.bfloat16), 8)
    assert half.getPtr() % 64 == 0 and encoded[-1][4:6] == ([256], [64, 8])


def test_a_map_that_the_driver_does_not_take_is_named(monkeypatch):
    monkeypatch.setattr(tensor_maps, "_encode", lambda: lambda *_: 1)
    with pytest.raises(RuntimeError, match=r"tensor map of \[24, 128\] of 1 bytes .* CUDA_ERROR_INVALID_VALUE"):
        tensor_maps.of(torch.zeros(24, 128, dtype=torch.uint8), 8)


@pytest.mark.parametrize(
    ("m", "config", "blocks", "boxes"),
    [
        (40, Config("few", 16, 128, 4, 2), 3 * 3 * 2, [16, 128]),
        (300, Config("wide", 128, 256, 4), 3 * 2, [128, 256]),
        (30_000, Config("wide", 128, 256, 3, staged=True), 132, [128, 256, 64]),
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
    cuda_kernel.run((c,), args, config)
    ((kernel, given),) = launched
    grid, a_map, b_map, *rest = flat(given)
    assert grid == blocks and kernel.threads == config.threads and kernel.shared == config.shared
    assert [asked[5] for asked in encoded] == [[128 // size, box] for size, box in zip((1, 1, 2), boxes)]
    assert [asked[2] for asked in encoded] == [x.data_ptr() for x in (a, b, c)[: len(boxes)]]
    if config.form == "wide":
        c_map, *rest = rest
        assert (c_map is a_map) == (not config.staged)
    assert a_map.getPtr() != b_map.getPtr()
    rows = -(-m // 4) * 4
    assert rest == [a_scale.data_ptr(), 1, rows, b_scale.data_ptr(), 2, 1, c.data_ptr(), m, n, k]


def test_a_sum_of_nothing_is_zero_and_needs_no_map(encoded):
    args = fp8_matmul.complete((), fp8_matmul.inputs(m=5, n=8, k=0, device="cpu", out="fp32"))
    c = torch.full((5, 8), float("nan"))
    cuda_kernel.run((c,), args, Config("few", 16, 128, 8))
    assert (c == 0).all() and not encoded

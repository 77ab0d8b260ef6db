"""matmul by TMA and wgmma: what it refuses and chooses, what it launches, that both kernels build."""

import re

import pytest
import torch

from tilery import languages
from tilery.base import settings
from tilery.base.launch import Argument
from tilery.base.spec import TensorSpec, case
from tilery.core import policy, tuned
from tilery.core.cases import call_for
from tilery.hardware import device
from tilery.hardware.gpu import gpu
from tilery.ops import matmul

if why := languages.missing("cuda"):
    pytest.skip(why, allow_module_level=True)

from tilery.hardware import toolkit
from tilery.languages import cuda_glue, tensor_maps
from tilery.ops.matmul.cuda.hopper import Config
from tilery.ops.matmul.cuda.hopper import gemm as kernel
from tilery.ops.matmul.cuda.hopper_tiles import blocks_at_once
from tilery.ops.matmul.cuda.operands import operands

pytestmark = pytest.mark.usefixtures("hopper")


def call_of(m=64, n=256, k=1024, dtype="bf16", **more):
    return call_for(matmul, case(m=m, n=n, k=k, dtype=dtype, **more))


def test_would_round_fp32():
    assert "wgmma takes fp16 and bf16, and would round fp32 to tf32" in kernel.refusal(call_of(dtype="fp32"))


@pytest.mark.parametrize(
    ("more", "a", "b"),  # of each operand: what is contiguous, and whether it is copied
    [
        ({}, "K", "K"),
        ({"layout_b": "contiguous"}, "K", "N"),
        ({"layout": "transposed", "layout_b": "contiguous"}, "M", "N"),
        ({"layout": "padded", "layout_b": "padded"}, "K", "N"),
        ({"k": 1020}, "K copied", "K copied"),  # lines of 2040 bytes
        ({"n": 255, "layout_b": "contiguous"}, "K", "N copied"),
        ({"m": 300, "layout": "misaligned"}, "K copied", "K"),
        ({"m": 100, "layout": "transposed"}, "M copied", "K"),  # lines of 200 bytes
        ({"m": 20, "layout": "transposed"}, "K copied", "K"),  # so few rows fill no MN-major tile
        ({"m": 1, "n": 9, "k": 72}, "K", "K"),
    ],
    ids=str,
)
def test_takes_every_layout(more, a, b):
    """TMA loads either order; what it cannot address is copied first."""
    call = call_of(**more)
    config = kernel.default(call)
    said = []
    for each, rows in zip(operands(call), "MN"):
        said.append((rows if each.mn_major else "K") + (" copied" if each.copied_from is not None else ""))
    assert said == [a, b] and kernel.refusal(call) is None and kernel.refusal(call, config) is None
    specs, complete = policy.with_workspace(matmul, kernel, call, config)
    assert len(specs) == sum("copied" in each for each in said)
    assert all(spec.shape[-1] % 8 == 0 for spec in specs)  # lines of 16 bytes
    launches = kernel.launches(complete, config)
    assert [launch.kernel.name for launch in launches[:-1]] == ["copy_rows"] * len(specs)


@pytest.mark.parametrize(
    "how", [{"strides": (0, 1)}, {"strides": (1016, 1)}, {"strides": (1028, 1)}, {"aligned": False}], ids=str
)
def test_rows_that_overlap_or_lie_off_16_bytes_are_copied(how):
    call = call_of()
    a, b = operands(type(call)(call._values | {"a": call.a._replace(**how)}))
    assert a.copied_from is not None and b.copied_from is None


@pytest.mark.parametrize(
    ("more", "config", "said"),
    [
        ({"layout": "transposed"}, Config("small_m", 40, 64, 4), "block_m must be a multiple of 64 where a is contig"),
        ({"layout_b": "contiguous"}, Config("small_m", 40, 48, 4), "a tile must have a multiple of 64 columns and as"),
        ({"layout_b": "contiguous"}, Config("small_m", 40, 128, 4), None),
        (
            {"layout_b": "contiguous"},
            Config("large_m", 128, 96, 4),
            "a tile must have a multiple of 64 columns where b",
        ),
    ],
    ids=str,
)
def test_tiles_of_mn_major_operands_come_in_chunks_of_64(more, config, said):
    why = kernel.refusal(call_of(**more), config)
    assert why is None if said is None else said in why


@pytest.mark.parametrize(
    ("arch", "more", "refused"),
    [
        ("sm_90", {}, None),
        ("sm_90", {"m": 3}, None),
        ("sm_90", {"dtype": "fp32"}, "would round fp32 to tf32"),
        ("sm_90", {"dtype": "fp32", "precision": "tf32"}, "wgmma takes fp16 and bf16"),
        ("sm_90", {"layout_b": "contiguous"}, None),
        ("sm_90", {"k": 1020}, None),
        ("sm_80", {}, "builds for sm_90, and cuda:0 is sm_80"),
    ],
)
def test_is_the_first_that_a_gpu_is_asked_and_the_others_take_what_it_refuses(arch, more, refused, monkeypatch):
    monkeypatch.setattr(device, "name", lambda where: "a GPU that nothing is tuned for")
    if refused is not None and (why := languages.missing("triton")):
        pytest.skip(why)
    with device.pretend(arch):
        plan = policy.decide(matmul, call_of(**more), None, None)
    if refused is None:
        assert (plan.kernel, plan.source, list(plan.refusals)) == ("cuda.hopper", "default", ["numba"])
    else:
        assert plan.kernel == "triton" and refused in plan.refusals["cuda.hopper"]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            Config("large_m", 128, 144, 4),
            "block_n of the large_m kernel must be one of 32, 48, 64, 96, 128, 160, 192, 224, 256, got",
        ),
        (Config("large_m", 128, 128, 4, 8), "split_k of the large_m kernel must be one of 1, 2, 3, 4, got 8"),
        (Config("large_m", 128, 256, 2, 4), None),
        (Config("large_m", 128, 256, 2, 3), None),
        (Config("large_m", 128, 128, 4, 2, multicast_b=2), "split_k goes with neither multicast nor tma_store"),
        (Config("large_m", 128, 128, 4, 2, tma_store=True), "split_k goes with neither multicast nor tma_store"),
        (Config("small_m", 128, 128, 2, 2), "partial sums of c must fit the memory of 2 stages"),
        (Config("small_m", 128, 128, 3, 2), None),
        (Config("small_m", 128, 24, 2, 2), None),
        (
            Config("large_m", 128, 128, 4, multicast_a=3),
            "multicast_a of the large_m kernel must be one of 1, 2, 4, got",
        ),
        (Config("large_m", 128, 128, 4, multicast_a=2, multicast_b=2), None),
        (Config("small_m", 16, 128, 4, multicast_b=8), "multicast_b of the small_m kernel must be one of 1, 2, 4, got"),
        (
            Config("small_m", 24, 128, 4, multicast_a=2),
            "block_m must be a multiple of 16 in each half of b, to be loaded",
        ),
        (
            Config("small_m", 48, 56, 4, multicast_b=2),
            "block_n must be a multiple of 16 in each half of b, to be loaded",
        ),
        (Config("small_m", 48, 128, 4, multicast_a=2, multicast_b=4), None),
        (Config("small_m", 128, 256, 4), "sums of 128 × 256 do not fit the registers of a block"),
        (Config("small_m", 240, 128, 2), None),
        (Config("small_m", 12, 128, 4), "block_m of the small_m kernel must be one of 8, 16, 24"),
        (Config("large_m", 128, 256, 5), "pipeline of 5 stages takes 246864 bytes of shared memory, 231424 are there"),
    ],
)
def test_says_why_it_refuses_a_config(config, said):
    why = kernel.refusal(call_of(), config)
    assert why is None if said is None else said in why


def test_a_k_that_is_long_enough_is_split():
    assert "K must be at least 256 for split_k of 2, got 192" in kernel.refusal(
        call_of(k=192), Config("large_m", 128, 128, 4, 2)
    )


@pytest.mark.parametrize("m", [1, 16, 64, 65, 128, 512, 4096])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (28672, 4096), (9, 72)])
def test_the_default_and_all_configs_are_taken(m, n, k):
    problem = call_of(m, n, k)
    found = kernel.configs(problem)
    assert kernel.default(problem) in found and len(found) == len(set(found)) <= 48
    assert all(kernel.refusal(problem, c) is None for c in found)
    assert all(kernel.estimate(problem, c).blocks > 0 for c in found)


@pytest.mark.parametrize("layout_b", ["transposed", "contiguous", "padded"])
@pytest.mark.parametrize(("m", "n", "k"), [(0, 0, 128), (64, 0, 128), (300, 0, 128), (0, 256, 128), (64, 256, 0)])
def test_a_product_of_nothing_has_a_default_too(m, n, k, layout_b):
    problem = call_of(m, n, k, layout_b=layout_b)
    assert kernel.default(problem) in kernel.configs(problem)
    assert kernel.expected_us(problem, kernel.default(problem)) > 0


@pytest.mark.parametrize("card", ["h200", "h100-pcie"])
@pytest.mark.parametrize("m", [1, 16, 100, 192, 300, 512, 768])
def test_tiles_are_spread_over_the_sms(m, card):
    """No default leaves more than a third of the SMs idle where there is work for all."""
    with device.pretend(card):
        config, sms = kernel.default(call_of(m, 6144, 4096)), gpu(torch.device("cuda")).sms
        blocks = config.blocks(m, 6144)
        at_once = blocks_at_once(config.cluster, sms)
        assert blocks / (-(-blocks // at_once) * sms) > 2 / 3, config


def test_the_kernel_for_few_rows_and_that_for_many():
    assert kernel.default(call_of(16, 6144, 4096)).block_m == 16
    assert [kernel.default(call_of(m, 4096, 4096)).kernel for m in (16, 4096)] == ["small_m", "large_m"]
    assert kernel.default(call_of(16, 1280, 8192)).split_k > 1


def test_explaining_a_choice_names_the_time_it_expects(capsys, monkeypatch):
    monkeypatch.setattr(device, "name", lambda where: "a GPU that nothing is tuned for")
    with settings.override(explain=True):
        policy.decide(matmul, call_of(16, 4096, 4096), None, None)
    said = capsys.readouterr().err
    assert re.search(r"runs cuda.hopper with Config\(.*\), default, expected to take \d+\.\d µs on an H200", said)


def test_large_products_get_the_tiles_that_need_the_least_power():
    config = kernel.default(call_of(8192, 8192, 8192))
    assert (config.block_n, config.multicast_b, config.tma_store) == (128, 2, True)
    assert kernel.default(call_of(256, 131072, 8192)).block_n == 256  # as large, but b comes from memory


def test_expected_times_grow_with_the_work():
    times = [
        kernel.expected_us(call, kernel.default(call)) for call in (call_of(m, 4096, 4096) for m in (16, 256, 4096))
    ]
    assert times == sorted(times) and times[0] > 5


def test_what_an_h200_runs_at_once_in_clusters():
    assert [blocks_at_once(cluster, 132) for cluster in (1, 2, 3, 4, 8)] == [132, 132, 117, 120, 120]


BUILT = [
    (Config("large_m", 128, 32, 8), "bf16"),
    (Config("large_m", 128, 192, 4, tma_store=True), "fp16"),
    (Config("large_m", 128, 256, 3, tma_store=True, multicast_b=2), "bf16"),
    (Config("small_m", 96, 128, 5, multicast_a=2, multicast_b=2), "bf16"),
    (Config("small_m", 152, 64, 5), "fp16"),
    (Config("large_m", 128, 256, 4), "bf16"),
    (Config("large_m", 128, 160, 6, 2), "bf16"),
    (Config("large_m", 128, 256, 4, 3), "bf16"),  # blocks reduce 10, 11 and 11 eights of the columns
    (Config("large_m", 128, 224, 4, 4), "fp16"),
    (Config("small_m", 8, 112, 4, 1), "bf16"),
    (Config("small_m", 64, 48, 4, 8), "fp16"),
    (Config("small_m", 128, 128, 3, 2), "bf16"),
]


@pytest.mark.parametrize(("config", "dtype"), BUILT, ids=lambda v: str(v))
def test_both_kernels_build_and_keep_products_in_flight(config, dtype):
    made = policy.compiled(matmul, "cuda.hopper", call_of(dtype=dtype), config, "sm_90")
    sass = toolkit.sass(made.cubin)
    columns = config.block_n if config.large_m else config.block_m
    assert made.spills == 0 and f"HGMMA.64x{columns}x16.F32" in sass and "UTMALDG.3D" in sass
    assert "DEPBAR.LE gsb0, 0x1" in sass  # one k-block is multiplied while the next is waited for
    assert ("MULTICAST" in sass) == (config.multicast_a * config.multicast_b > 1) and (
        "UTMASTG.2D" in sass
    ) == config.tma_store


@pytest.mark.parametrize(
    ("m", "config", "blocks", "boxes"),
    [
        (40, Config("small_m", 16, 128, 4, 2), 3 * 3 * 2, [16, 128]),
        (40, Config("small_m", 16, 56, 4), 3 * 5, [16, 56]),
        (3000, Config("small_m", 16, 56, 4), 132, [16, 56]),
        (5, Config("small_m", 8, 56, 4), 5, [5, 56]),  # rows that are not there are not loaded
        (5, Config("small_m", 8, 56, 4, multicast_b=2), 5 * 2, [5, 28]),
        (300, Config("large_m", 128, 256, 4, 2), 3 * 2 * 2, [128, 256]),
        (300, Config("large_m", 128, 128, 4, 3), 3 * 3 * 3, [128, 128]),
        (300, Config("large_m", 128, 256, 4), 3 * 2, [128, 256]),
        (300, Config("large_m", 128, 256, 3, tma_store=True, multicast_b=2), 4 * 2, [128, 128, 64]),
        (30_000, Config("large_m", 128, 256, 4, multicast_b=2), 132, [128, 128]),
    ],
)
def test_launches_as_planned(m, config, blocks, boxes, launches):
    made, maps = launches
    n, k = 264, 256
    args = matmul.complete((), matmul.inputs(m=m, n=n, k=k, device="cpu"))
    a, b, _ = args
    c = torch.empty(m, n, dtype=torch.bfloat16)
    (launch,) = kernel.launches(matmul.call(matmul.specs(args)), config)
    cuda_glue.bind(launch, torch.device("cuda:0"))((*args, c))
    ((built, (grid, *given)),) = made
    pointer, *sizes = given[-14:-6]  # GemmParams, but for the epilogue's
    assert (grid, pointer, sizes) == (blocks, c.data_ptr(), [m, n, k, 1, 0, 0, boxes[0]])
    assert (built.threads, built.shared, built.cluster) == (config.threads, config.shared, config.cluster)
    whats = (a.data_ptr(), (k, m, 1), (k, k)), (b.data_ptr(), (k, n, 1), (k, k)), (c.data_ptr(), (n, m), (n,))
    given_maps = [*maps[:2], maps[2]] if config.tma_store else maps[:2]
    assert given_maps == [(*what, (box,), 2) for what, box in zip(whats, boxes)]
    assert len(given) == (3 if config.large_m else 2) + 14
    if config.large_m and not config.tma_store:  # it takes a map that it does not use
        assert maps[2] == maps[0]


def test_a_sum_of_nothing_is_zero_and_needs_no_map(launches):
    c = torch.full((3, 4), float("nan"), dtype=torch.bfloat16)
    args = torch.empty(3, 0, dtype=torch.bfloat16), torch.empty(4, 0, dtype=torch.bfloat16).t(), "ieee"
    (launch,) = kernel.launches(matmul.call(matmul.specs(args)), Config("small_m", 8, 64, 4))
    launch.run((*args, c))
    assert not c.any() and launches == ([], [])


@pytest.mark.parametrize("k", [1, 3, 72])
def test_a_single_row_of_any_length_has_a_map(k, monkeypatch):
    """No step is taken along one row, but the driver wants it to be a multiple of 16 bytes."""
    made = []
    monkeypatch.setattr(tensor_maps, "_made", lambda *how: made.append(how))
    x = Argument.at_slot(TensorSpec.contiguous((1, k), torch.bfloat16, "cuda:0"), 0)
    tensor_maps.of_matrix(x, 64).bound((torch.empty(1, k, dtype=torch.bfloat16),))
    ((_, sizes, (step,), *_),) = made
    assert sizes == (k, 1) and step >= k and step * 2 % 16 == 0


def test_files_with_the_old_names_are_read():
    old = {
        "form": "few",
        "block_m": 8,
        "block_n": 64,
        "stages": 6,
        "splits": 4,
        "group": 8,
        "staged": False,
        "share": 1,
    }
    assert Config(**tuned.present_fields(Config, old)) == Config("small_m", 8, 64, 6, 4)
    wide = old | {"form": "wide", "block_m": 128, "splits": 1, "staged": True, "share": 2, "group": 4}
    expected = Config("large_m", 128, 64, 6, group_m=4, tma_store=True, multicast_b=2)
    assert Config(**tuned.present_fields(Config, wide)) == expected

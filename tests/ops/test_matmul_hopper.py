"""matmul by TMA and wgmma: what it refuses and chooses, what it hands to the driver, that every form builds."""

import pytest
import torch

from tilery import languages
from tilery.base.spec import case
from tilery.core.cases import specs_for
from tilery.hardware import device
from tilery.ops import matmul

if why := languages.missing("cuda"):
    pytest.skip(why, allow_module_level=True)

from tilery.languages import cuda_glue, tensor_maps, toolkit
from tilery.ops.matmul import cuda_hopper_kernel as kernel
from tilery.ops.matmul.cuda_hopper_kernel import Config

pytestmark = pytest.mark.usefixtures("hopper")


def specs(m=64, n=256, k=1024, dtype="bf16", **more):
    return specs_for(matmul, case(m=m, n=n, k=k, dtype=dtype, **more), "cuda:0")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"dtype": "fp32"}, "wgmma takes fp16 and bf16, and would round fp32 to tf32"),
        ({"layout_b": "contiguous"}, "b must have K contiguous"),
        ({"layout": "transposed"}, "a must have K contiguous"),
        ({"k": 1020}, "rows of a must start at multiples of 16 bytes"),
        ({"layout": "misaligned"}, "a must start at a multiple of 16 bytes"),
        ({"layout": "padded"}, None),
        ({"m": 1, "n": 9, "k": 72}, None),
    ],
)
def test_takes_what_tma_can_fetch(more, said):
    why = kernel.refusal(*specs(**more))
    assert why is None if said is None else said in why


@pytest.mark.parametrize(
    ("arch", "more", "refused"),
    [
        ("sm_90", {}, None),
        ("sm_90", {"m": 1}, None),
        ("sm_90", {"dtype": "fp32"}, "would round fp32 to tf32"),
        ("sm_90", {"dtype": "fp32", "precision": "tf32"}, "wgmma takes fp16 and bf16"),
        ("sm_90", {"layout_b": "contiguous"}, "K contiguous"),
        ("sm_90", {"k": 1020}, "16 bytes"),
        ("sm_80", {}, "builds for sm_90, and cuda:0 is sm_80"),
    ],
)
def test_is_the_first_that_a_gpu_is_asked_and_the_others_take_what_it_refuses(arch, more, refused, monkeypatch):
    monkeypatch.setattr(device, "name", lambda where: "a GPU that nothing is tuned for")
    if refused is not None and (why := languages.missing("triton")):
        pytest.skip(why)
    with device.pretend(arch):
        plan = matmul.plan(specs(**more))
    if refused is None:
        assert (plan.kernel, plan.source, list(plan.refusals)) == ("cuda.hopper", "default", ["numba"])
    else:
        assert plan.kernel == "triton" and refused in plan.refusals["cuda.hopper"]


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (
            Config("wide", 128, 144, 4),
            "block_n of the wide form must be one of 32, 48, 64, 96, 128, 160, 192, 224, 256, got",
        ),
        (Config("wide", 128, 128, 4, 8), "splits of the wide form must be one of 1, 2, 3, 4, got 8"),
        (Config("wide", 128, 256, 2, 4), None),
        (Config("wide", 128, 256, 2, 3), None),
        (Config("wide", 128, 128, 4, 2, share=2), "blocks that share K do not fetch for each other and stage nothing"),
        (
            Config("wide", 128, 128, 4, 2, staged=True),
            "blocks that share K do not fetch for each other and stage nothing",
        ),
        (Config("few", 128, 128, 2, 2), None),
        (Config("few", 128, 24, 2, 2), None),
        (Config("wide", 128, 128, 4, share=4), "share of the wide form must be one of 1, 2, got 4"),
        (Config("few", 16, 128, 4, share=2), "share of the few form must be one of 1, got 2"),
        (Config("few", 128, 256, 4), "sums of 128 × 256 do not fit the registers of a block"),
        (Config("wide", 128, 256, 5), "ring of 5 stages takes 246864 bytes of shared memory, 231424 are there"),
    ],
)
def test_says_why_it_refuses_a_config(config, said):
    why = kernel.refusal(*specs(), config=config)
    assert why is None if said is None else said in why


def test_blocks_share_a_k_that_is_long_enough():
    assert "K must be at least 256 for 2 blocks to share it, got 192" in kernel.refusal(
        *specs(k=192), config=Config("wide", 128, 128, 4, 2)
    )


@pytest.mark.parametrize("m", [1, 16, 64, 65, 128, 512, 4096])
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (28672, 4096), (9, 72)])
def test_the_default_and_all_configs_are_taken(m, n, k):
    problem = specs(m, n, k)
    found = kernel.configs(*problem)
    assert kernel.default(*problem) in found and len(found) == len(set(found)) <= 48
    assert all(kernel.refusal(*problem, config=c) is None for c in found)
    assert all(kernel.estimate(*problem, config=c).blocks > 0 for c in found)


def test_few_rows_are_spread_over_the_processors_and_many_get_wide_tiles():
    def chosen(m, n, k=4096):
        c = kernel.default(*specs(m, n, k))
        return c.form, c.block_m, c.block_n, c.splits, c.share

    assert chosen(1, 4096) == ("few", 8, 64, 2, 1)
    assert chosen(16, 6144) == ("few", 16, 48, 1, 1)  # 128 tiles
    assert chosen(24, 28672) == ("few", 32, 112, 1, 1)  # 256 tiles, two each
    assert chosen(16, 1280, 8192)[3] == 4
    assert chosen(128, 4096) == ("wide", 128, 32, 1, 1)
    assert chosen(512, 7168) == ("wide", 128, 224, 1, 1)
    assert chosen(4096, 4096) == ("wide", 128, 128, 1, 2)
    assert chosen(1024, 1280, 8192) == ("wide", 128, 160, 2, 1)  # 64 tiles, two blocks each


@pytest.mark.parametrize(("m", "cut", "blocks"), [(512, (128, 3), 120), (512, (192, 4), 112), (1024, (256, 3), 120)])
def test_three_or_four_blocks_that_share_k_are_tried_where_tiles_are_few(m, cut, blocks):
    found = [c for c in kernel.configs(*specs(m, 1280, 8192)) if (c.block_n, c.splits) == cut]
    assert found and {c.blocks(m, 1280) for c in found} == {blocks}


FORMS = [
    (Config("wide", 128, 32, 8), "bf16"),
    (Config("wide", 128, 192, 4, staged=True), "fp16"),
    (Config("wide", 128, 256, 3, staged=True, share=2), "bf16"),
    (Config("wide", 128, 256, 4), "bf16"),
    (Config("wide", 128, 160, 6, 2), "bf16"),
    (Config("wide", 128, 256, 4, 3), "bf16"),  # shares of 10, 11 and 11 eights of columns
    (Config("wide", 128, 224, 4, 4), "fp16"),
    (Config("few", 8, 112, 4, 1), "bf16"),
    (Config("few", 64, 48, 4, 8), "fp16"),
    (Config("few", 128, 128, 3, 2), "bf16"),
]


@pytest.mark.parametrize(("config", "dtype"), FORMS, ids=lambda v: str(v))
def test_every_form_builds_and_keeps_products_under_way(config, dtype):
    made = kernel.compile(specs(dtype=dtype), config, "sm_90")
    sass = toolkit.sass(made.cubin)
    columns = config.block_n if config.form == "wide" else config.block_m
    assert made.spills == 0 and f"HGMMA.64x{columns}x16.F32" in sass and "UTMALDG.2D" in sass
    assert "DEPBAR.LE gsb0, 0x1" in sass  # one block of K is multiplied while the next is waited for
    assert ("MULTICAST" in sass) == (config.share > 1) and ("UTMASTG.2D" in sass) == config.staged


@pytest.mark.parametrize(
    ("m", "config", "blocks", "boxes"),
    [
        (40, Config("few", 16, 128, 4, 2), 3 * 3 * 2, [16, 128]),
        (40, Config("few", 16, 56, 4), 3 * 5, [16, 56]),
        (3000, Config("few", 16, 56, 4), 132, [16, 56]),
        (300, Config("wide", 128, 256, 4, 2), 3 * 2 * 2, [128, 256]),
        (300, Config("wide", 128, 128, 4, 3), 3 * 3 * 3, [128, 128]),
        (300, Config("wide", 128, 256, 4), 3 * 2, [128, 256]),
        (300, Config("wide", 128, 256, 3, staged=True, share=2), 4 * 2, [128, 128, 64]),
        (30_000, Config("wide", 128, 256, 4, share=2), 132, [128, 128]),
    ],
)
def test_launches_as_planned(m, config, blocks, boxes, monkeypatch):
    launched, asked = [], []
    monkeypatch.setattr(cuda_glue.Kernel, "launch", lambda self, *given: launched.append((self, given)))
    monkeypatch.setattr(cuda_glue.Kernel, "resident", lambda self: 132)
    monkeypatch.setattr(tensor_maps, "at", lambda *given: asked.append(given) or given)
    n, k = 264, 256
    args = matmul.complete((), matmul.inputs(m=m, n=n, k=k, device="cpu"))
    c = torch.empty(m, n, dtype=torch.bfloat16)
    kernel.run((c,), args, config)
    ((made, (grid, *maps, pointer, rows, columns, depth)),) = launched
    assert (grid, pointer, rows, columns, depth) == (blocks, c.data_ptr(), m, n, k)
    assert (made.threads, made.shared, made.cluster) == (config.threads, config.shared, config.splits * config.share)
    whats = (args[0].data_ptr(), m, k, k), (args[1].data_ptr(), n, k, k), (c.data_ptr(), m, n, n)
    assert asked == [(*what, box, 2) for what, box in zip(whats, boxes)]
    assert len(maps) == (3 if config.form == "wide" else 2)


def test_a_sum_of_nothing_is_zero_and_needs_no_map():
    c = torch.full((3, 4), float("nan"), dtype=torch.bfloat16)
    a, b = torch.empty(3, 0, dtype=torch.bfloat16), torch.empty(4, 0, dtype=torch.bfloat16).t()
    kernel.run((c,), matmul.complete((a, b), {}), Config("few", 8, 64, 4))
    assert not c.any()


@pytest.mark.parametrize("k", [1, 3, 72])
def test_a_single_row_of_any_length_has_a_map(k, monkeypatch):
    """No step is taken along one row, but the driver wants it to be a multiple of 16 bytes."""
    made = []
    monkeypatch.setattr(tensor_maps, "_made", lambda *how: made.append(how))
    tensor_maps.at(1024, 1, k, k, 64, 2)
    ((_, sizes, (step,), *_),) = made
    assert sizes == (k, 1) and step >= k and step * 2 % 16 == 0

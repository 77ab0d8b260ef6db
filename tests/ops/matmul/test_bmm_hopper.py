"""bmm by TMA and wgmma: every product has its own place in the maps, and what one store of all cannot do is refused."""

import pytest
import torch

from tilery import languages
from tilery.base.spec import case
from tilery.core import policy
from tilery.core.cases import call_for
from tilery.ops import bmm

if why := languages.missing("cuda"):
    pytest.skip(why, allow_module_level=True)

from tilery.languages import cuda_glue
from tilery.ops.matmul.cuda.hopper import Config
from tilery.ops.matmul.cuda.hopper import gemm as kernel

pytestmark = pytest.mark.usefixtures("hopper")
SIZES = {"batch": 3, "m": 40, "n": 264, "k": 256}


def launched(a, b, config, launches):
    """What the driver is handed: the grid, the arguments from c on, and the maps of a and b."""
    (launch,) = kernel.launches(bmm.call(bmm.specs((a, b))), config)
    c = torch.empty(a.shape[0], a.shape[1], b.shape[2], dtype=a.dtype)
    cuda_glue.bind(launch, torch.device("cuda:0"))((a, b, c))
    (((_, (grid, *given)),), maps) = launches
    assert given[-14] == c.data_ptr()
    return grid, given[-13:-7], maps


@pytest.mark.parametrize(
    ("config", "blocks"),
    [(Config("large_m", 128, 128, 4), 3 * 3), (Config("small_m", 40, 128, 4, 2), 3 * 3 * 2)],
    ids=str,
)
def test_every_product_is_launched_and_has_its_own_operands(config, blocks, launches):
    a, b = bmm.inputs(**SIZES, layout_b="transposed", device="cpu").values()
    grid, given, maps = launched(a, b, config, launches)
    assert (grid, given) == (blocks, [40, 264, 256, 3, 1, 1])  # m, n, k, batch, and that each has an a and a b
    assert [made[:3] for made in maps[:2]] == [
        (a.data_ptr(), (256, 40, 3), (256, 40 * 256)), (b.data_ptr(), (256, 264, 3), (256, 264 * 256))
    ]  # fmt: skip


def test_products_may_lie_between_the_rows_of_others(launches):
    """As heads lie in [tokens, heads, K]."""
    a = torch.randn(40, 3, 256).bfloat16().transpose(0, 1)
    b = torch.randn(3, 264, 256).bfloat16().transpose(1, 2)
    _, _, maps = launched(a, b, Config("large_m", 128, 128, 4), launches)
    assert maps[0][:3] == (a.data_ptr(), (256, 40, 3), (3 * 256, 256))


def test_products_that_are_no_16_bytes_apart_are_copied():
    a, b = bmm.specs_in(call_for(bmm, case(**SIZES, dtype="bf16")))
    call = bmm.call((a._replace(strides=(40 * 256 + 4, 256, 1)), b))
    specs, complete = policy.with_workspace(bmm, kernel, call, kernel.default(call))
    copy, _ = kernel.launches(complete, kernel.default(call))
    assert [spec.shape for spec in specs] == [(3, 40, 256)]
    assert (copy.grid, copy.args["batch_stride"], copy.args["line_stride"]) == (3 * 40, 40 * 256 + 4, 256)


def test_a_store_of_all_products_takes_whole_tiles():
    """c is one matrix to its map: rows of a tile behind a product would be the next one's, and so would a tile."""
    config = Config("large_m", 128, 128, 4, tma_store=True)
    refusals = [kernel.refusal(call_for(bmm, case(**SIZES | {"m": m}, dtype="bf16")), config) for m in (256, 200)]
    assert refusals == [None, "tma_store of several products takes M a multiple of 128, got 200"]
    above = Config("large_m", 128, 128, 4, tma_store=True, multicast_b=2)
    refusals = [kernel.refusal(call_for(bmm, case(**SIZES | {"m": m}, dtype="bf16")), above) for m in (768, 640)]
    assert refusals == [None, "tma_store of several products takes M a multiple of 256, got 640"]
    alone = case(**SIZES | {"m": 200, "batch": 1}, dtype="bf16")
    assert kernel.refusal(call_for(bmm, alone), config) is None


@pytest.mark.parametrize("m", [1, 20, 100, 300, 640, 1000, 1152])
def test_defaults_and_configs_are_taken(m):
    for layout_b in ("contiguous", "transposed"):
        call = call_for(bmm, case(**SIZES | {"m": m}, dtype="bf16", layout_b=layout_b))
        found = kernel.configs(call)
        assert kernel.default(call) in found and all(kernel.refusal(call, config) is None for config in found)

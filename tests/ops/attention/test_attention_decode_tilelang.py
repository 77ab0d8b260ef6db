"""attention_decode in TileLang: what it builds, what it refuses, and that a batch decides no bits."""

import dataclasses
import re

import pytest
import torch

import tilery
from tilery import languages
from tilery.base.spec import case
from tilery.core.cases import call_for, specs_for
from tilery.core.op import REGISTRY
from tilery.hardware import device, toolkit
from tilery.measure.check import check
from tilery.measure.place import place

if why := languages.missing("tilelang"):
    pytest.skip(why, allow_module_level=True)
DECODE = REGISTRY["attention_decode"]
kernel = DECODE.kernel("tilelang")
LLAMA = {"keys": 8192, "heads": 32, "kv_heads": 8, "n": 128, "dtype": "bf16"}


@pytest.fixture
def sm_90():
    with device.pretend("sm_90"):
        yield


for_sm_90 = pytest.mark.usefixtures("sm_90")


def specs(m=1, **more):
    return specs_for(DECODE, case(m=m, **LLAMA | more), "cuda:0")


def call(m=1, **more):
    return call_for(DECODE, case(m=m, **LLAMA | more))


def gpu():
    where = place(DECODE, "tilelang").device
    if where is None:
        pytest.skip("needs a GPU")
    return where


@for_sm_90
def test_tiles_of_pages_are_fetched_16_bytes_at_a_time_into_every_stage(compiler):
    given = specs(block_size=16)
    made = compiler.compile("attention_decode", "tilelang", given, "sm_90")
    problem = DECODE.call(given)
    assert made.shared == kernel.shared(problem, kernel.default(problem))  # with the 1024 bytes of the driver
    assert "cp_async_gs_conditional<16>" in made.code["cuda"] and "cp_async_wait<1>" in made.code["cuda"]
    code = toolkit.sass(made.cubin)
    assert "HGMMA" in code and "LDGSTS" in code and made.spills == 0


@for_sm_90
@pytest.mark.parametrize("layout", ["contiguous", "misaligned"])
def test_entries_of_the_table_are_checked_before_they_are_followed(compiler, layout):
    """TileLang does it for indices that it cannot bound; rows that see what is missing are NaN, lengths are clipped."""
    given = specs(block_size=16, n=64, keys=256, layout=layout)
    code = compiler.compile("attention_decode", "tilelang", given, "sm_90").code["cuda"]
    reads = [line for line in code.splitlines() if "k_cache[" in line]
    if layout == "contiguous":  # each copy with its condition
        assert reads and all("< pages)" in line and "(0 <= table[" in line for line in reads)
    else:
        checks = re.findall(r"if \(.* < end\) && \(0 <= condval_?\d*\)\) && \(condval_?\d* < pages\)\)", code)
        assert len(checks) == 2 * len(reads) > 0  # of keys and of values
    assert "missing[0] = min(missing[0]," in code and code.count("CUDART_NAN_F") == 2
    assert re.search(r"length\[0\] = min\(max\(lengths\[.*\], 0\), \(?most \* 16\)?\)", code)


def test_where_there_are_no_keys_wrong_lengths_and_rows_that_see_a_page_are_nan():
    q, cache = torch.zeros(4, 2, 4, 64, dtype=torch.bfloat16), torch.zeros(0, 16, 2, 64, dtype=torch.bfloat16)
    lengths, table = torch.tensor([0, -1, 1, 33], dtype=torch.int32), torch.zeros(4, 2, dtype=torch.int32)
    for pages, wrong in ((table, [[0, 0], [1, 1], [0, 1], [1, 1]]), (table[:, :0], [[0, 0], [1, 1], [1, 1], [1, 1]])):
        out = torch.full_like(q, 3.0)
        args = DECODE.complete(
            (), {"q": q, "k_cache": cache, "v_cache": cache, "lengths": lengths, "block_table": pages}
        )
        (launch,) = kernel.launches(DECODE.call(DECODE.specs(args)), kernel.Config(64, 64, 16, 3))
        launch.run((*args, out))
        assert torch.equal(out.isnan(), torch.tensor(wrong).bool()[:, :, None, None].expand_as(out))
        assert not out[0].any()


def test_more_keys_than_int32_numbers_are_refused():
    q, k, v, lengths, table, *rest = specs(block_size=16)
    wide = table._replace(shape=(1, 2**26), strides=(2**26, 1))
    assert f"numbers keys up to {2**30}, got {2**30}" in kernel.refusal(DECODE.call((q, k, v, lengths, wide, *rest)))


@for_sm_90
@pytest.mark.parametrize("params", [{}, {"queries": 4}, {"queries": 16}, {"n": 256}, {"block_size": 16}])
def test_nothing_that_decides_bits_depends_on_the_batch(params):
    alone, many = call(1, **params), call(16, **params)
    assert kernel.default(alone) == kernel.default(many)
    assert kernel.configs(alone) == kernel.configs(many)


@pytest.mark.parametrize("arch", device.ARCHS)
@pytest.mark.parametrize("params", [{}, {"n": 256}, {"n": 16}, {"queries": 16}, {"heads": 8, "keys": 0}])
def test_configs_are_few_and_fit(arch, params):
    with device.pretend(arch):
        given = call(**params)
        found = kernel.configs(given)
        assert 2 <= len(found) == len(set(found)) <= 40
        assert all(kernel.refusal(given, c) is None for c in (*found, kernel.default(given)))


@for_sm_90
@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"block_m": 48}, "block_m and block_n must be powers of two from 16 to 128"),
        ({"block_n": 256}, "block_m and block_n must be powers of two from 16 to 128"),
        ({"stages": 1}, "stages must be 2 to 8"),
        ({"splits": 0}, "splits 1 to 65535"),
        ({"stages": 8}, "needs 279552 bytes of shared memory, a block has 232448"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(changed, said):
    given = call()
    assert said in kernel.refusal(given, dataclasses.replace(kernel.default(given), **changed))


def test_splits_that_can_have_a_key_have_a_workspace():
    config = kernel.Config(64, 64, 16, 3)
    found = kernel.workspace(call(m=2, keys=200), config)
    assert found["partial_out"].shape == (4, 2, 1, 32, 128) and found["partial_stats"].shape == (2, 4, 2, 1, 32)
    assert kernel.workspace(call(keys=8192), config)["partial_out"].shape[0] == 16


@pytest.mark.parametrize("splits", [1, 2, 16])
@pytest.mark.parametrize("block_m", [16, 64, 128])
@pytest.mark.parametrize("params", [{}, {"queries": 16, "heads": 10}, {"block_size": 0}, {"layout": "misaligned"}])
def test_keys_split_among_so_many_blocks(splits, block_m, params):
    where = gpu()
    short = {"m": 2, "keys": 200, "kv_heads": 2, "n": 64, "dtype": "fp16", "lengths": "200+33", "block_size": 16}
    config = kernel.Config(block_m, 32, splits, 3)
    assert check(DECODE, "tilelang", case(**short | params), where, config=config).refused is None


@pytest.mark.parametrize("splits", [1, 16])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize(
    "more",
    [
        {"block_size": 0, "wrong": "l0:-1+l2:701"},
        {"block_size": 16, "wrong": "l1:2147483647+t3:-1+t112:200"},
        {"block_size": 64, "wrong": "t10:36+t11:-2147483648+t23:1000000"},
        {"block_size": 16, "layout": "misaligned", "wrong": "t43:-1+t44:2147483647"},
    ],
    ids=str,
)
def test_wrong_indices_give_nan_to_their_rows_alone(more, queries, splits):
    where = gpu()
    params = {"m": 3, "keys": 700, "kv_heads": 2, "n": 64, "dtype": "fp16", "lengths": "700+33+400", "queries": queries}
    config = kernel.Config(64, 32, splits, 3)
    assert check(DECODE, "tilelang", case(**params | more), where, config=config).refused is None


@pytest.mark.parametrize("block_size", [0, 16, 64])
def test_a_sequence_gives_the_same_bits_alone_as_in_a_batch_of_16(block_size):
    lengths = "150+1+0+131+64+17+149+3+65+128+90+50+2+150+77+31"
    params = {"m": 16, "keys": 150, "queries": 2, "n": 64, "dtype": "fp16", "lengths": lengths}
    args = DECODE.inputs(**params, block_size=block_size, device=gpu(), seed=5)
    together = tilery.attention_decode(**args, backend="tilelang")
    own = ("q", "lengths", "block_table") if block_size else ("q", "lengths", "k_cache", "v_cache")
    for b in (0, 2, 3, 15):
        one = {name: args[name][b : b + 1] for name in own}
        assert torch.equal(tilery.attention_decode(**args | one, backend="tilelang")[0], together[b]), f"sequence {b}"

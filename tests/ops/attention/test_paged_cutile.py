"""Attention to a KV cache in cuTile: wrong lengths and pages give NaN to their rows alone, however keys are split."""

import pytest
import torch

from tilery import languages
from tilery.base.spec import case
from tilery.core.cases import specs_for
from tilery.core.op import REGISTRY
from tilery.hardware import device
from tilery.measure.check import check
from tilery.measure.place import place

if why := languages.missing("cutile"):
    pytest.skip(why, allow_module_level=True)

from tilery.ops.attention.cutile.paged import Config

attention_decode, mla_decode = REGISTRY["attention_decode"], REGISTRY["mla_decode"]

DECODE = {"m": 4, "keys": 701, "lengths": "701+0+77+131", "heads": 8, "kv_heads": 2, "n": 64, "dtype": "fp16"}
MLA = {"m": 3, "context": 600, "heads": 8, "latent": 32, "rope": 16, "dtype": "fp16"}


def run(op, drawn):
    """The outputs of a call for which nothing is launched."""
    args = op.complete((), drawn)
    call = op.call(op.specs(args))
    outs = [spec.empty().fill_(3.0) for spec in op.output_specs(call)]
    (launch,) = op.kernel("cutile").launches(call, Config(64, 32, 4))
    launch.run((*args, *outs))
    return outs


@pytest.mark.parametrize("table", [2, 0])
def test_where_there_are_no_keys_wrong_lengths_and_rows_that_see_a_page_are_nan(table):
    lengths, table = torch.tensor([0, -1, 1, 33], dtype=torch.int32), torch.zeros(4, table, dtype=torch.int32)
    wrong = torch.tensor([[0, 0], [1, 1], [0 if table.shape[1] else 1, 1], [1, 1]]).bool()
    q, cache = torch.zeros(4, 2, 4, 32), torch.zeros(0, 16, 48)
    shared = {"lengths": lengths, "block_table": table}
    drawn = {"q": q, "q_rope": q[..., :16], "cache": cache, "scale": 1.0} | shared
    out, lse = run(mla_decode, drawn)
    assert torch.equal(out.isnan(), wrong[:, :, None, None].expand_as(out)) and not out[0].any()
    assert torch.equal(lse.isnan(), wrong[:, None].expand_as(lse)) and (lse[0] == -torch.inf).all()
    caches = {name: torch.zeros(0, 16, 2, 32) for name in ("k_cache", "v_cache")}
    (out,) = run(attention_decode, {"q": q} | caches | shared)
    assert torch.equal(out.isnan(), wrong[:, :, None, None].expand_as(out)) and not out[0].any()


def test_more_keys_than_int32_numbers_are_refused():
    with device.pretend("sm_90"):
        q, k, v, lengths, table, *rest = specs_for(attention_decode, case(**DECODE | {"block_size": 16}), "cuda:0")
        wide = table._replace(shape=(4, 2**26), strides=(2**26, 1))
        call = attention_decode.call((q, k, v, lengths, wide, *rest))
        why = attention_decode.kernel("cutile").refusal(call)
    assert f"numbers keys up to {2**30}, got {2**30}" in why


# On a GPU.


def on_gpu(op, params, config):
    where = place(op, "cutile").device
    if where is None:
        pytest.skip("needs a GPU")
    assert check(op, "cutile", case(**params), where, config=config).refused is None


@pytest.mark.parametrize("splits", [1, 8])
@pytest.mark.parametrize("keys", [32, 64])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize(
    "more",
    [
        {"wrong": "l0:-1+l2:702+l3:2147483647"},
        {"block_size": 16, "wrong": "l0:-2147483648+t92:-1+t132:179+t135:2147483647"},
        {"block_size": 16, "wrong": "t3:-1+t42:1000000+t140:179"},
        {"block_size": 64, "wrong": "t0:-1+t22:-2147483648+t35:47"},
        {"block_size": 256, "wrong": "t2:-1+t9:15"},
    ],
    ids=str,
)
def test_wrong_indices_give_nan_to_their_rows_alone(more, queries, keys, splits):
    config = Config(64, keys, splits, num_worker_warps=8)
    on_gpu(attention_decode, DECODE | {"queries": queries} | more, config)


@pytest.mark.parametrize("splits", [1, 8])
@pytest.mark.parametrize("keys", [32, 64])
@pytest.mark.parametrize(
    "more",
    [
        {"wrong": "l0:-1+l1:601"},
        {"block_size": 16, "wrong": "l0:-1+t40:-1+t113:2147483647"},
        {"block_size": 64, "wrong": "t9:30+t10:-2147483648", "queries": 4},
    ],
    ids=str,
)
def test_wrong_indices_of_mla_give_nan_to_their_rows_alone(more, keys, splits):
    on_gpu(mla_decode, MLA | more, Config(64, keys, splits, num_worker_warps=8))

"""moe_route in Triton: a program takes some rows into registers and picks k times the largest of what is left."""

import triton
import triton.language as tl

from tilery.base.launch import Launch
from tilery.base.rows import rows
from tilery.core.call import Call
from tilery.languages.triton_glue import pdl_wait
from tilery.ops.sampling.triton_kernels import RowsConfig, TopkRows
from tilery.ops.sampling.triton_topk import TAKEN, keys, largest


@triton.jit
def _scores(x, SCORING: tl.constexpr):
    if SCORING == "softmax":
        e = tl.exp(x - tl.max(x, axis=1)[:, None])
        x = e / tl.sum(e, axis=1)[:, None]  # NaN of any logit goes into the sum, and so into every score
    if SCORING == "sigmoid":
        x = 1 / (1 + tl.exp(-x))
    return x


@triton.jit
def _two_largest(values, key, cols, BLOCK: tl.constexpr):
    """The sum of each row's two largest values."""
    _, first = largest(key, cols, BLOCK)
    _, second = largest(tl.where(first, TAKEN, key), cols, BLOCK)
    return tl.sum(tl.where(first, values, 0.0), axis=1) + tl.sum(tl.where(second, values, 0.0), axis=1)


@triton.jit
def _best_groups(
    values, key, cols, size,
    GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    """The keys of experts in the best groups; all others sink below."""
    numbers, group = tl.arange(0, BLOCK_G), cols // size
    sums = tl.zeros((ROWS, BLOCK_G), tl.float32)
    for g in range(GROUPS):
        own = _two_largest(values, tl.where((group == g)[None, :], key, TAKEN), cols, BLOCK)
        sums = tl.where(numbers[None, :] == g, own[:, None], sums)
    group_key = keys(sums, numbers, GROUPS, BLOCK_G)
    kept = tl.full((ROWS, BLOCK), TAKEN, tl.int64)
    for _ in range(TOP_GROUPS):
        best, chosen = largest(group_key, numbers, BLOCK_G)
        group_key = tl.where(chosen, TAKEN, group_key)
        kept = tl.where(group[None, :] == best[:, None], key, kept)
    return kept


@triton.jit
def _moe_route(
    x_ptr, bias_ptr, weights_ptr, ids_ptr, x_stride, m, n, scaling,
    K: tl.constexpr, SCORING: tl.constexpr, RENORMALIZE: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_G: tl.constexpr,
):  # fmt: skip
    pdl_wait()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = row.to(tl.int64)  # int64: row * stride overflows int32 past 2**31 elements
    cols, places = tl.arange(0, BLOCK), tl.arange(0, BLOCK_K)
    inside = (row[:, None] < m) & (cols[None, :] < n)
    x = tl.load(x_ptr + row[:, None] * x_stride + cols[None, :], mask=inside, other=-float("inf")).to(tl.float32)
    scores = _scores(x, SCORING)
    values = scores
    if bias_ptr is not None:
        values += tl.load(bias_ptr + cols, mask=cols < n, other=0.0)[None, :]
    elif GROUPS == 1:
        values = x  # scores rise with it, and round values that differ to equal ones
    key = keys(values, cols, n, BLOCK)
    if GROUPS > 1:
        key = _best_groups(values, key, cols, n // GROUPS, GROUPS, TOP_GROUPS, ROWS, BLOCK, BLOCK_G)
    weights = tl.full((ROWS, BLOCK_K), -float("inf") if SCORING == "softmax_topk" else 0.0, tl.float32)
    ids = tl.zeros((ROWS, BLOCK_K), tl.int32)
    for i in range(K):
        index, chosen = largest(key, cols, BLOCK)
        weight = tl.sum(tl.where(chosen, scores, 0.0), axis=1)
        key = tl.where(chosen, TAKEN, key)
        weights = tl.where(places[None, :] == i, weight[:, None], weights)
        ids = tl.where(places[None, :] == i, index[:, None], ids)
    if SCORING == "softmax_topk":
        weights = _scores(weights, "softmax")
    elif RENORMALIZE:
        weights = weights / (tl.sum(weights, axis=1) + 1e-20)[:, None]
    here = row[:, None] * K + places[None, :]
    mask = (row[:, None] < m) & (places[None, :] < K)
    tl.store(weights_ptr + here, weights * scaling, mask=mask)
    tl.store(ids_ptr + here, ids, mask=mask)


class MoeRoute(TopkRows):
    def launches(self, call: Call, config: RowsConfig) -> list[Launch]:
        m, n, stride = rows(call.logits)
        args = {"x_ptr": call.logits, "bias_ptr": call.bias, "weights_ptr": call.weights, "ids_ptr": call.ids}
        args |= {"x_stride": stride, "m": m, "n": n, "scaling": call.scaling}
        constants = {
            "K": call.k, "SCORING": call.scoring, "RENORMALIZE": call.renormalize, "GROUPS": call.groups,
            "TOP_GROUPS": call.top_groups, "ROWS": config.rows, "BLOCK": triton.next_power_of_2(n),
            "BLOCK_K": triton.next_power_of_2(call.k), "BLOCK_G": triton.next_power_of_2(call.groups),
        }  # fmt: skip
        programs, options = triton.cdiv(m, config.rows), {"num_warps": config.num_warps}
        return [Launch(_moe_route, programs, args, constants, options, pdl=True)]


moe_route = MoeRoute()

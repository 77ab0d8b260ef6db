"""moe_route in Numba: rows in parallel over the cores."""

import numpy as np
import torch
from numba import prange

from tilery.base.launch import Launch
from tilery.base.rows import rows
from tilery.base.spec import TensorSpec
from tilery.core.call import Call
from tilery.languages import numba_glue
from tilery.languages.numba_elements import FP32, STORAGE, ZERO, at, exp, f32, load, store, store_integer
from tilery.languages.numba_glue import jit, kernel
from tilery.ops.moe.call import SCORINGS
from tilery.ops.rows.numba_rows import Config, NumbaRows
from tilery.ops.sampling.numba_topk import pick
from tilery.ops.softmax.numba_kernels import row_sums

_SOFTMAX, _SIGMOID, _SOFTMAX_TOPK = range(3)  # places in SCORINGS
_LEAST_SUM = f32(1e-20)


@jit
def _score(x, scores, n, scoring, dtype):
    """Scores of a row, in fp32."""
    top, total = f32(0), f32(1)
    if scoring == _SOFTMAX:
        top, total, _ = row_sums(x, n, False, dtype)
    for j in range(n):
        value = load(x, j, dtype)
        if scoring == _SOFTMAX:
            value = exp(value - top) / total
        elif scoring == _SIGMOID:
            value = f32(1) / (f32(1) + exp(-value))
        store(scores, j, value, FP32)


@jit
def _keep_best_groups(values, sums, size, groups, top_groups, found, places, kept):
    """Moves the values of the best groups, in order, to the front of `values`; `kept` says which groups they are."""
    for group in range(groups):
        own = at(values, group * size, FP32)
        pick(own, size, 2, found, places, FP32)
        store(sums, group, load(own, places[0], FP32) + load(own, places[1], FP32), FP32)
    pick(sums, groups, top_groups, found, places, FP32)
    count = 0
    for group in range(groups):
        chosen = False
        for i in range(top_groups):
            chosen |= places[i] == group
        if chosen:
            for j in range(size):
                store(values, count * size + j, load(values, group * size + j, FP32), FP32)
            kept[count] = group
            count += 1


@jit
def _weigh(weights, k, scoring, renormalize, scaling):
    """Makes weights of the scores of the chosen."""
    total = _LEAST_SUM
    if scoring == _SOFTMAX_TOPK:
        top, total, _ = row_sums(weights, k, False, FP32)
        for i in range(k):
            store(weights, i, exp(load(weights, i, FP32) - top), FP32)
    elif renormalize:
        for i in range(k):
            total += load(weights, i, FP32)
    else:
        total = f32(1)
    for i in range(k):
        store(weights, i, load(weights, i, FP32) / total * scaling, FP32)


@jit
def _rows(tensors, work, x_stride, first, last, sizes, top_groups, scoring, renormalize, biased, scaling, dtype):
    (x, bias, weights, ids), (n, k, groups) = tensors, sizes
    found, places = np.empty(max(k, top_groups, 2), np.int32), np.empty(max(k, top_groups, 2), np.int64)
    kept, scaling, size = np.empty(groups, np.int64), f32(scaling), n // groups
    values, sums = at(work, n, FP32), at(work, 2 * n, FP32)
    for row in range(first, last):
        x_row, row_weights = at(x, row * x_stride, dtype), at(weights, row * k, FP32)
        _score(x_row, work, n, scoring, dtype)
        if biased or groups > 1:
            for j in range(n):
                shift = load(bias, j, FP32) if biased else f32(0)
                store(values, j, load(work, j, FP32) + shift, FP32)
            kept[0] = 0
            if groups > 1:
                _keep_best_groups(values, sums, size, groups, top_groups, found, places, kept)
            pick(values, size * top_groups, k, found, places, FP32)
            for i in range(k):
                places[i] = kept[places[i] // size] * size + places[i] % size
        else:  # scores rise with logits, and round some that differ to equal ones
            pick(x_row, n, k, found, places, dtype)
        for i in range(k):
            store(row_weights, i, load(work, places[i], FP32), FP32)
            store_integer(ids, row * k + i, places[i], 4)
        _weigh(row_weights, k, scoring, renormalize, scaling)


@kernel
def _moe_route(
    threads, tensors, work, work_size, x_stride, m, sizes, top_groups, scoring, renormalize, biased, scaling, dtype
):
    """tensors: logits, bias, weights, ids; sizes: n, k, groups."""
    if threads > 1:
        for i in prange(threads):
            part = np.int64(i)  # prange counts unsigned, and unsigned times signed is a float
            own, first, last = at(work, part * work_size, FP32), part * m // threads, (part + 1) * m // threads
            _rows(tensors, own, x_stride, first, last, sizes, top_groups, scoring, renormalize, biased, scaling, dtype)
    else:
        _rows(tensors, work, x_stride, ZERO, m, sizes, top_groups, scoring, renormalize, biased, scaling, dtype)


class MoeRoute(NumbaRows):
    least = 2**15

    def workspace(self, call: Call, config: Config) -> dict[str, TensorSpec]:
        """For each thread scores, what experts are chosen by, and sums of groups."""
        shape = numba_glue.threads(config.parallel), 2 * call.logits.shape[-1] + call.groups
        return {"work": TensorSpec.contiguous(shape, torch.float32, call.logits.device)}

    def launches(self, call: Call, config: Config) -> list[Launch]:
        m, n, stride = rows(call.logits)
        biased = call.bias is not None
        args = {
            "tensors": (call.logits, call.bias if biased else call.logits, call.weights, call.ids), "work": call.work,
            "work_size": call.work.shape[1], "x_stride": stride, "m": m, "sizes": (n, call.k, call.groups),
            "top_groups": call.top_groups, "scoring": SCORINGS.index(call.scoring), "renormalize": call.renormalize,
            "biased": biased, "scaling": call.scaling, "dtype": STORAGE[call.logits.dtype],
        }  # fmt: skip
        return [Launch(_moe_route, 1, args, options={"parallel": config.parallel})]


moe_route = MoeRoute()

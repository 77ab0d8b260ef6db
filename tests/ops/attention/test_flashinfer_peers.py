"""What FlashInfer is given means what the op does: a stand-in computes attention from the page tables that it gets."""

import gc
import importlib.util
import inspect
import sys
import types
import weakref
from itertools import pairwise

import pytest
import torch

from tilery.base.spec import case
from tilery.core.op import REGISTRY
from tilery.measure.check import check_baseline
from tilery.ops.attention import flashinfer_peers
from tilery.ops.attention.reference import attend


class StandIn:
    """A wrapper with what the three have in common. Arguments are named as FlashInfer names them."""

    made: list["StandIn"]  # since the test began

    def _begin(self, workspace, kv_layout="NHD"):
        assert kv_layout == "NHD" and workspace.dtype == torch.uint8
        self.workspace, self.plans, self.runs = workspace, 0, 0
        self.made.append(self)

    def _planned(self, qo, heads, kv_heads, dim, options):
        assert qo.dtype == torch.int32 and qo[0] == 0 and (qo.diff() >= 0).all()
        self.qo, self.heads, self.options, self.plans = qo.tolist(), (heads, kv_heads, dim), options, self.plans + 1

    def _paged(self, indptr, indices, last_page_len, page_size):
        assert {x.dtype for x in (indptr, indices, last_page_len)} == {torch.int32}
        assert indptr[0] == 0 and len(indices) == indptr[-1] and len(indptr) == len(last_page_len) + 1
        has = indptr.diff() > 0
        assert ((last_page_len >= has.int()) & (last_page_len <= page_size * has)).all()
        self.indptr, self.indices, self.last, self.page = indptr.tolist(), indices, last_page_len.tolist(), page_size

    def _keys(self, cache):
        """Those of each sequence, from its pages."""
        assert cache.shape[1] == self.page
        for (a, b), last in zip(pairwise(self.indptr), self.last):
            held = (b - a - 1) * self.page + last if b > a else 0
            yield cache[self.indices[a:b].long()].flatten(0, 1)[:held]

    def _run(self, q, keys, values, out, causal, of_none=False):
        heads, kv_heads, dim = self.heads
        assert self.plans == 1 and q.shape == (self.qo[-1], heads, dim) and q.dtype == self.options["q_data_type"]
        assert out.is_contiguous() and out.dtype == q.dtype and out.shape[:2] == q.shape[:2]
        left = self.options["window_left"]
        assert causal or left == -1
        how = {"causal": causal, "window": left + 1, "softcap": self.options["logits_soft_cap"] or 0.0}
        scale = self.options["sm_scale"] or dim**-0.5
        for (a, b), k, v in zip(pairwise(self.qo), keys, values, strict=True):
            assert k.shape[1:] == (kv_heads, dim) and (not causal or of_none or len(k) >= b - a)
            out[a:b] = attend(q[a:b].double(), k.double(), v.double(), scale, **how)[0].to(out.dtype)
        self.runs += 1


class Decode(StandIn):
    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, use_tensor_cores=False):
        assert not use_cuda_graph
        self._begin(float_workspace_buffer, kv_layout)
        self.tensor_cores = use_tensor_cores

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, *, window_left=-1,
        logits_soft_cap=None, q_data_type="float16", sm_scale=None,
    ):  # fmt: skip
        assert self.tensor_cores or num_qo_heads // num_kv_heads in (1, 2, 3, 4, 6, 8, 16)
        options = {"window_left": window_left, "logits_soft_cap": logits_soft_cap, "q_data_type": q_data_type}
        tokens = torch.arange(len(last_page_len) + 1, dtype=torch.int32)
        self._planned(tokens, num_qo_heads, num_kv_heads, head_dim, options | {"sm_scale": sm_scale})
        self._paged(indptr, indices, last_page_len, page_size)

    def run(self, q, paged_kv_cache, *, out):
        self._run(q, *map(self._keys, paged_kv_cache), out, True, of_none=True)


class Paged(StandIn):
    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, backend="auto"):
        assert not use_cuda_graph
        self._begin(float_workspace_buffer, kv_layout)
        self.backend = backend

    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, num_kv_heads,
        head_dim_qk, page_size, causal=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
        q_data_type="float16",
    ):  # fmt: skip
        options = {"window_left": window_left, "logits_soft_cap": logits_soft_cap, "q_data_type": q_data_type}
        options |= {"sm_scale": sm_scale, "causal": causal}
        self._planned(qo_indptr, num_qo_heads, num_kv_heads, head_dim_qk, options)
        self._paged(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)

    def run(self, q, paged_kv_cache, *, out):
        self._run(q, *map(self._keys, paged_kv_cache), out, self.options["causal"])


class Ragged(StandIn):
    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, backend="auto"):
        assert not use_cuda_graph
        self._begin(float_workspace_buffer, kv_layout)
        self.backend = backend

    def plan(
        self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None, causal=False,
        window_left=-1, logits_soft_cap=None, sm_scale=None, q_data_type="float16",
    ):  # fmt: skip
        assert kv_indptr.dtype == torch.int32 and kv_indptr[0] == 0
        options = {"window_left": window_left, "logits_soft_cap": logits_soft_cap, "q_data_type": q_data_type}
        options |= {"sm_scale": sm_scale, "causal": causal}
        self._planned(qo_indptr, num_qo_heads, num_kv_heads, head_dim_qk, options)
        self.edges, self.value_dim = kv_indptr.tolist(), head_dim_vo or head_dim_qk

    def run(self, q, k, v, *, out):
        assert len(k) == len(v) == self.edges[-1] and out.shape[-1] == v.shape[-1] == self.value_dim
        keys, values = ([x[a:b] for a, b in pairwise(self.edges)] for x in (k, v))
        self._run(q, keys, values, out, self.options["causal"])


WRAPPERS = {
    "BatchDecodeWithPagedKVCacheWrapper": Decode,
    "BatchPrefillWithPagedKVCacheWrapper": Paged,
    "BatchPrefillWithRaggedKVCacheWrapper": Ragged,
}


@pytest.fixture(params=["the first is fastest", "the last is fastest"])
def wrappers(request, monkeypatch):
    """Those that were made; `_ms` lets one of them be the fastest."""
    module = types.ModuleType("flashinfer")
    vars(module).update(WRAPPERS)
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(StandIn, "made", made := [], raising=False)
    times, step = [0.0], 1.0 if request.param.startswith("the first") else -1.0
    monkeypatch.setattr(flashinfer_peers, "_ms", lambda run: [times.append(times[-1] + step), times[-1]][1])
    return made


def right(op, params):
    return check_baseline(REGISTRY[op], "baseline:flashinfer", case(**params), "cpu", seed=3).errors


def drawn(op, **params):
    return REGISTRY[op].complete((), REGISTRY[op].inputs(**params, device="cpu", seed=3))


def assert_right(op, args):
    """For arguments as they are now."""
    made = REGISTRY[op].baselines["baseline:flashinfer"](*args)
    want = REGISTRY[op].reference(*(x.double() if torch.is_tensor(x) and x.is_floating_point() else x for x in args))
    torch.testing.assert_close(made.double(), want, atol=2e-2, rtol=0)


DECODE = {"m": 3, "keys": 96, "n": 64, "heads": 4, "kv_heads": 2, "dtype": "fp16"}
CHUNKED = {"m": 21, "keys": 96, "chunks": "16+0+5", "n": 64, "dtype": "bf16"}
DENSE = {"m": 40, "dtype": "fp16", "batch": 2}
PACKED = {"m": 30, "keys": 40, "dtype": "bf16", "order": "thd", "lengths": "5+0+30", "key_lengths": "40+7+31"}


@pytest.mark.parametrize(
    "params",
    [
        DECODE,
        DECODE | {"lengths": "96+0+33"},
        DECODE | {"lengths": "90+1+33", "block_size": 16},
        DECODE | {"lengths": "0+64+65", "block_size": 32, "heads": 8, "kv_heads": 1, "n": 128, "dtype": "bf16"},
        DECODE | {"lengths": "96+0+33", "window": 9},
        DECODE | {"lengths": "90+1+33", "block_size": 64, "window": 20, "softcap": 5.0, "scale": 0.3},
        DECODE | {"window": 1000, "heads": 10},  # a window that masks nothing; a group for tensor cores alone
        DECODE | {"keys": 97, "lengths": "97+13+64"},  # in one piece, of which pages can have one key
        DECODE | {"lengths": "96+50+3", "layout": "padded"},
        DECODE | {"lengths": "96+50+3", "block_size": 16, "layout": "together"},
        DECODE | {"queries": 3, "lengths": "96+3+33"},
        DECODE | {"queries": 4, "lengths": "90+16+5", "block_size": 16, "window": 9},
        DECODE | {"queries": 16, "block_size": 64, "heads": 6, "layout": "padded"},
        DECODE | {"keys": 0},
        DECODE | {"m": 0},
    ],
    ids=str,
)
def test_what_it_is_given_for_decoding_means_the_same(params, wrappers):
    assert right("attention_decode", params)


@pytest.mark.parametrize(
    "params",
    [
        CHUNKED,
        CHUNKED | {"lengths": "90+7+5", "window": 6},
        CHUNKED | {"lengths": "16+0+64", "block_size": 32, "heads": 8, "kv_heads": 1, "softcap": 5.0},
        CHUNKED | {"lengths": "17+96+33", "block_size": 128, "bounded": False, "scale": 0.3, "n": 128},
        CHUNKED | {"m": 20, "chunks": "20", "layout": "together"},
        {"m": 0, "keys": 64, "n": 64, "dtype": "fp16"},
    ],
    ids=str,
)
def test_what_it_is_given_for_chunks_means_the_same(params, wrappers):
    assert right("attention_chunked", params)


@pytest.mark.parametrize(
    "params",
    [
        DENSE,
        DENSE | {"order": "bhsd"},
        DENSE | {"order": "bhsd", "batch": 1, "keys": 50},
        DENSE | {"keys": 70, "causal": False, "softcap": 5.0},
        DENSE | {"window": 8, "heads": 8, "kv_heads": 1, "n": 128, "dtype": "bf16", "scale": 0.3},
        DENSE | {"window": 90, "causal": False},  # masks nothing
        DENSE | {"n": 192, "value": 128},
        DENSE | {"layout": "padded"},  # views of a model's qkv
        DENSE | {"keys": 0, "causal": False},
        DENSE | {"m": 0},
        DENSE | {"batch": 0},
        PACKED | {"key_lengths": "40+7+31"},
        PACKED | {"causal": False, "key_lengths": "3+0+40"},
        PACKED | {"spare": 20, "window": 9},  # tokens of no sequence
        PACKED | {"lengths": "0+0+0", "spare": 3},
    ],
    ids=str,
)
def test_what_it_is_given_for_whole_sequences_means_the_same(params, wrappers):
    assert right("attention", params)


@pytest.mark.parametrize("order", ["bshd", "bhsd"])
def test_dense_sequences_are_one_run_where_their_tokens_follow_each_other(order, wrappers):
    """Else a run for each, of one plan."""
    args = drawn("attention", **DENSE, order=order)
    apart = [x.clone(memory_format=torch.contiguous_format) if torch.is_tensor(x) else x for x in args]
    for given, runs in ((args, 1), (apart, 1 if order == "bshd" else DENSE["batch"])):
        wrappers.clear()
        assert_right("attention", given)
        assert sorted(wrapper.runs for wrapper in wrappers) == [0, runs]


@pytest.mark.parametrize(
    ("op", "params", "says"),
    [
        ("attention", DENSE | {"sinks": True}, "FlashInfer has no sinks"),
        ("attention", DENSE | {"padding": True}, "FlashInfer has no key_mask"),
        ("attention", DENSE | {"bias": "fp16"}, "FlashInfer has no bias"),
        ("attention", DENSE | {"slopes": True}, "FlashInfer has no slopes"),
        ("attention", DENSE | {"dtype": "e4m3"}, "FlashInfer has no q_scale"),
        ("attention", DENSE | {"dtype": "fp32"}, "fp16 and bf16 alone"),
        ("attention", DENSE | {"n": 80}, "no kernel for heads of 80"),
        ("attention", DENSE | {"scale": -0.5}, "positive scales alone"),
        ("attention", DENSE | {"layout": "misaligned"}, "16 bytes at once"),
        ("attention", DENSE | {"window": 8, "causal": False}, "no window without a causal mask"),
        ("attention", DENSE | {"keys": 33}, "no causal mask of more tokens than keys"),
        ("attention", PACKED | {"key_lengths": "40+7+29"}, "no causal mask of more tokens than keys"),
        ("attention", PACKED | {"wrong": "q1:-1"}, "valid sequences alone"),
        ("attention_decode", DECODE | {"sinks": True}, "FlashInfer has no sinks"),
        ("attention_decode", DECODE | {"format": "e4m3", "block_size": 16}, "FlashInfer has no k_scale"),
        ("attention_decode", DECODE | {"n": 96}, "no kernel for heads of 96"),
        ("attention_decode", DECODE | {"queries": 3, "lengths": "96+2+33"}, "more tokens than keys"),
        ("attention_decode", DECODE | {"wrong": "l0:97"}, "lengths that the cache can hold alone"),
        ("attention_decode", DECODE | {"wrong": "l0:-1"}, "lengths that the cache can hold alone"),
        ("attention_decode", DECODE | {"block_size": 16, "wrong": "t0:99"}, "one is not in the cache"),
        ("attention_chunked", CHUNKED | {"format": "e4m3"}, "FlashInfer has no k_scale"),
        ("attention_chunked", CHUNKED | {"lengths": "15+0+64"}, "more tokens than keys"),
        ("attention_chunked", CHUNKED | {"wrong": "q1:0+q2:25"}, "valid sequences alone"),
    ],
    ids=str,
)
def test_what_it_does_not_know_is_refused_in_a_sentence(op, params, says, wrappers):
    with pytest.raises(NotImplementedError, match=says):
        right(op, params)


@pytest.mark.parametrize(
    ("op", "params", "name", "values"),
    [
        ("attention", PACKED, "cu_seqlens_q", [0, 4, 5, 35]),
        ("attention", PACKED, "cu_seqlens_k", [0, 39, 46, 78]),
        ("attention_decode", DECODE, "lengths", [96, 50, 0]),
        ("attention_decode", DECODE | {"queries": 2, "block_size": 64}, "block_table", [[1, 2], [0, 2], [4, 3]]),
        ("attention_chunked", CHUNKED, "lengths", [80, 0, 5]),
        ("attention_chunked", CHUNKED, "cu_seqlens_q", [0, 7, 16, 21]),
    ],
    ids=str,
)
def test_it_plans_once_for_the_same_tensors_and_again_when_they_change(op, params, name, values, wrappers):
    args = drawn(op, **params)
    if name == "block_table":
        for cache in args[1:3]:
            cache.nan_to_num_()
    for _ in range(3):
        assert_right(op, args)
    planned = len(wrappers)
    assert planned in (1, 2) and sum(wrapper.runs for wrapper in wrappers) == 3
    assert len({id(wrapper.workspace) for wrapper in wrappers}) == 1  # which they share
    args[REGISTRY[op].names.index(name)].copy_(torch.tensor(values))
    assert_right(op, args)
    assert len(wrappers) == 2 * planned
    assert_right(op, drawn(op, **params))  # another input set has a plan of its own, and the first one keeps its
    assert_right(op, args)
    assert len(wrappers) == 3 * planned


@pytest.mark.parametrize(("op", "params"), [("attention", PACKED), ("attention_decode", DECODE)], ids=str)
def test_plans_go_with_the_tensors_that_they_are_of(op, params, wrappers):
    args = drawn(op, **params)
    REGISTRY[op].baselines["baseline:flashinfer"](*args)
    held = [weakref.ref(x) for x in (*args, *wrappers) if torch.is_tensor(x) or isinstance(x, StandIn)]
    assert len(held) > 3
    wrappers.clear()
    del args
    gc.collect()
    assert not any(x() is not None for x in held)


def test_backends_and_tensor_cores_that_are_tried(wrappers):
    for op, params in (("attention", DENSE), ("attention_chunked", CHUNKED), ("attention_decode", DECODE)):
        assert right(op, params)
    assert right("attention_decode", DECODE | {"heads": 10}) and right("attention_decode", DECODE | {"queries": 2})
    assert [getattr(w, "backend", None) or w.tensor_cores for w in wrappers] == [
        "auto", "fa2", "auto", "fa2", True, False, True, "fa2",
    ]  # fmt: skip


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="FlashInfer is not installed")
@pytest.mark.parametrize("name", WRAPPERS)
def test_flashinfer_names_its_arguments_as_the_stand_ins_do(name):
    import flashinfer

    theirs, ours = getattr(flashinfer, name), WRAPPERS[name]
    for method in ("__init__", "plan", "run"):
        known = list(inspect.signature(getattr(theirs, method)).parameters)
        if method == "plan" and "kwargs" in known:  # it hands the rest on
            known += inspect.signature(theirs._plan_impl).parameters
        taken = inspect.signature(getattr(ours, method)).parameters.values()
        assert {x.name for x in taken} <= set(known)
        by_place = [x.name for x in taken if x.default is x.empty and x.kind is x.POSITIONAL_OR_KEYWORD]
        assert by_place == known[: len(by_place)]

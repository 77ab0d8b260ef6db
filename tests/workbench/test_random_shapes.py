"""--shapes random: every op gets cases that it takes, spread as they should be, the same for the same seed."""

import random
import re
from collections import Counter
from dataclasses import replace

import pytest

from tilery import models
from tilery.base.errors import BadInput
from tilery.base.spec import Case, TensorSpec
from tilery.cli.common import parsed_case
from tilery.core import policy
from tilery.core.cases import call_for, specs_for
from tilery.core.op import REGISTRY
from tilery.hardware import gpu
from tilery.models.published import published
from tilery.workbench import random_shapes, shapes


def drawn(name, count, seed):
    return [case.params for case in shapes.cases(REGISTRY[name], f"random:{count}:{seed}")]


@pytest.mark.parametrize("op", list(REGISTRY.values()), ids=lambda op: op.name)
def test_an_op_takes_its_random_cases(op):
    cases = shapes.cases(op, "random:12:7")
    assert len({str(case) for case in cases}) == 12
    for case in cases:
        tensors = [s for s in specs_for(op, case) if isinstance(s, TensorSpec)]
        assert sum(s.nbytes for s in tensors) <= 4 * 2**30, case
        assert parsed_case(op, str(case)) == Case(case.params)  # so that --case repeats one of them
        with gpu.pretend("h200"):
            call = call_for(op, case)  # raises where the op does not take it
            refusals = [policy.refusal(op, kernel, call) for kernel in op.kernels if kernel != "numba"]
        assert None in refusals, f"{case}: every kernel for a GPU refuses it: {refusals}"


@pytest.mark.parametrize("op", list(REGISTRY.values()), ids=lambda op: op.name)
def test_a_seed_decides_the_cases(op):
    once, again, longer, other = (
        [str(case) for case in shapes.cases(op, name)]
        for name in ("random:6:1", "random:6:1", "random:8:1", "random:6:2")
    )
    assert once == again == longer[:6] and set(once) != set(other)


def test_a_seed_gives_these_cases_on_every_machine():
    """A change of the list of models or of how cases are drawn changes them: say so in the changelog."""
    assert [str(case) for case in shapes.cases(REGISTRY["matmul"], "random:4:12345")] == [
        "m=1,n=576,k=7168,dtype=bf16,layout_b=contiguous",
        "m=3,n=6144,k=16384,dtype=bf16,layout=transposed,layout_b=contiguous",
        "m=3626,n=65536,k=3072,dtype=fp16,layout=transposed,layout_b=contiguous",
        "m=7,n=18432,k=15009,dtype=bf16,layout_b=contiguous",
    ]


def test_nothing_is_asked_of_random_that_python_may_change(monkeypatch):
    class Only:
        def __init__(self, seed, made=random.Random):
            self.random = made(seed).random

    before = drawn("attention_decode", 5, 3)
    monkeypatch.setattr(random_shapes.random, "Random", Only)
    assert drawn("attention_decode", 5, 3) == before


def test_rows_are_spread_evenly_over_the_octaves_from_1_to_8192():
    rows = [params["m"] for params in drawn("matmul", 1300, 5)]
    assert min(rows) == 1 and max(rows) == 8192
    octaves = Counter(m.bit_length() - 1 for m in rows if m < 8192)
    assert all(60 < octaves[i] < 150 for i in range(13)), octaves  # 100 each, roughly
    assert 0.2 < sum(m % 2 for m in rows if m > 64) / sum(m > 64 for m in rows) < 0.3  # half are powers of 2
    assert len(set(rows)) > 300


@pytest.mark.parametrize("name", ["mla_decode", "log_softmax_backward"])
def test_what_fits_does_not_decide_on_rows(name):
    """8192 sequences with a long context, or rows of a large vocabulary, are more than 4 GiB."""
    rows = [params["m"] for params in drawn(name, 130, 5)]
    assert sum(m >= 1024 for m in rows) > 20  # three of 13 octaves: 30


def test_products_have_all_layouts_and_both_16_bit_dtypes():
    found = Counter(
        (p["dtype"], p.get("layout", "contiguous"), p.get("layout_b", "transposed")) for p in drawn("matmul", 400, 5)
    )
    straight = ("contiguous", "transposed")
    assert all(found[dtype, a, b] > 20 for dtype in ("bf16", "fp16") for a in straight for b in straight), found
    assert {dtype for dtype, _, _ in found} == {"bf16", "fp16"}
    for operand in (1, 2):
        assert 20 < sum(n for key, n in found.items() if key[operand] == "padded") < 60


def test_ops_get_the_layouts_that_they_take():
    found = {name: drawn(name, 60, 5) for name in ("linear", "rms_norm", "attention_decode")}
    assert {p.get("layout_b") for p in found["linear"]} == {None, "transposed", "padded"}
    for cases in found.values():
        assert {p.get("layout") for p in cases} == {None, "padded"}


def test_dtypes_are_those_of_the_op():
    rows = Counter(p["dtype"] for p in drawn("rms_norm", 200, 5))
    assert set(rows) == {"bf16", "fp16", "fp32"} and 10 < rows["fp32"] < 60
    assert {p["dtype"] for p in drawn("fp8_matmul", 30, 5)} == {"e4m3"}
    assert {p["dtype"] for p in drawn("splitk_reduce", 30, 5)} == {"fp32"}
    assert {p["dtype"] for p in drawn("sample", 60, 5)} == {"bf16", "fp16", "fp32"}  # whose own bench is in fp32
    casts = {(p["dtype"], p["to"]) for p in drawn("cast", 100, 5)}
    assert {("fp16", "fp32"), ("fp32", "bf16"), ("e4m3", "bf16")} <= casts and not any(a == b for a, b in casts)


def test_a_tenth_of_the_sizes_is_no_models():
    real = {size for model in published() for tp in (1, 2, 4, 8) for size in _widths(model, tp)}
    sizes = [p[name] for p in drawn("matmul", 500, 5) for name in ("n", "k")]
    uneven = [size for size in sizes if size not in real]
    assert 60 < len(uneven) < 140
    assert all(size % 2 or size % 1000 == 0 for size in uneven)
    assert sum(size % 2 for size in uneven) > 20 and sum(size % 1000 == 0 for size in uneven) > 20
    assert len({size for size in sizes if size in real}) > 80


def _widths(model, tp):
    try:
        return [size for layer in replace(model, tp=tp).linears() for size in (layer.n, layer.k)]
    except BadInput:
        return []


def test_models_are_shared_by_up_to_eight_ranks(monkeypatch):
    op, asked = REGISTRY["rope"], []
    sizes = op.model_sizes
    monkeypatch.setattr(op, "model_sizes", lambda model: asked.append(model) or sizes(model))
    cases = drawn("rope", 60, 5)
    assert {model.tp for model in asked} == {1, 2, 4, 8} and len({model.name for model in asked}) > 40
    assert all(p["heads"] % p["kv_heads"] == 0 for p in cases)


def test_contexts_are_drawn_too():
    chunks, decodes = drawn("attention_chunked", 60, 5), drawn("attention_decode", 60, 5)
    assert all(p["keys"] >= p["m"] for p in chunks) and len({p["keys"] for p in decodes}) > 40
    assert any(p["keys"] < p["m"] for p in decodes)  # of each sequence
    assert {p["parts"] for p in drawn("splitk_reduce", 30, 5)} == {2, 4, 8, 16}


def test_attention_is_no_more_than_its_reference_can_hold():
    for p in drawn("attention_chunked", 200, 5):
        assert p["heads"] // p["kv_heads"] * p["m"] * p["keys"] <= 2**31


def test_an_op_that_no_model_has_gets_rows_of_hidden_sizes(monkeypatch):
    monkeypatch.setattr(REGISTRY["softmax"], "model_sizes", lambda model: [])
    hidden = {model.hidden_size for model in published()}
    assert sum(p["n"] in hidden for p in drawn("softmax", 60, 5)) > 45


def test_the_models_are_published_ones():
    found = published()
    assert len({model.name for model in found}) == len(found) > 60
    assert {models.load(name).name for name in models.known()} <= {model.name for model in found}
    for model in found:
        assert model.linears() and model.num_attention_heads % model.num_key_value_heads == 0


def test_a_set_is_said_with_its_seed():
    assert shapes.settled("random:7:3") == "random:7:3" and shapes.settled("quick") == "quick"
    assert shapes.settled(None) is None
    assert shapes.settled("quick,random:7:3,odd") == "quick,random:7:3,odd"
    assert re.fullmatch(r"random:20:\d+,random:2:\d+", shapes.settled("random,random:2"))
    fresh = {shapes.settled("random") for _ in range(5)}
    assert len(fresh) > 1 and all(name.startswith("random:20:") for name in fresh)
    assert shapes.settled("random:50").startswith("random:50:")


@pytest.mark.parametrize(
    "name", ["random:x", "random:", "random:5:", "random:5:6:7", "random:0", "random:-1", "random:²"]
)
def test_a_set_that_is_none_is_named(name):
    with pytest.raises(BadInput, match=r"--shapes random\[:COUNT\[:SEED\]\] takes .*, got 'random:"):
        shapes.settled(name)

"""Scalars of attention have one meaning in every language, or are refused by name; and what a bucket tells apart."""

import math

import pytest
import torch

import tilery
from tilery.base.errors import BadInput
from tilery.base.spec import case
from tilery.core.cases import call_for
from tilery.core.op import REGISTRY
from tilery.ops.attention.call import effective_window

BACKENDS = ["numba", "triton"]  # tests/ops/conftest.py puts their tensors where these run
EITHER = pytest.mark.parametrize("backend", BACKENDS)
SMALL = {
    "attention": {"m": 20, "heads": 2, "kv_heads": 1, "n": 16},
    "attention_lse": {"m": 20, "heads": 2, "kv_heads": 1, "n": 16},
    "attention_backward": {"m": 20, "heads": 2, "kv_heads": 1, "n": 16},
    "attention_decode": {"m": 2, "keys": 40, "queries": 2, "heads": 2, "kv_heads": 1, "n": 16, "block_size": 16},
    "attention_chunked": {"m": 9, "keys": 40, "heads": 2, "kv_heads": 1, "n": 16},
    "mla": {"m": 20, "nope": 16, "rope": 16, "value": 16},
    "mla_decode": {"m": 2, "context": 40, "heads": 2, "latent": 16, "rope": 16, "block_size": 16},
}
WINDOWED = ("attention", "attention_lse", "attention_backward", "attention_decode", "attention_chunked")


def drawn(name, **more):
    return REGISTRY[name].inputs(**{"dtype": "fp32"} | SMALL[name] | more, device=torch.get_default_device(), seed=6)


def outputs(made):
    return made if isinstance(made, tuple) else (made,)


@EITHER
@pytest.mark.parametrize("window", [2**31 - 1, 2**31, 2**62, 2**63 - 1])
@pytest.mark.parametrize("name", WINDOWED)
def test_a_window_of_any_size_is_one_of_all_keys(name, window, backend):
    op, given = REGISTRY[name], drawn(name)
    for how in ({}, {"causal": False}) if name in ("attention", "attention_lse") else ({},):
        plain, wide = (outputs(op(**given | how | {"window": w}, backend=backend)) for w in (0, window))
        assert all(map(torch.equal, wide, plain))


@EITHER
@pytest.mark.parametrize("name", WINDOWED)
def test_windows_about_as_large_as_what_there_is(name, backend):
    """Those that are as wide as queries and keys together mask nothing, those that are narrower may."""
    op, given = REGISTRY[name], drawn(name)
    for window in (18, 39, 40, 41, 42, 60):
        found = outputs(op(**given | {"window": window}, backend=backend))
        wide = {n: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for n, x in given.items()}
        right = outputs(op.reference(*op.complete((), wide | {"window": window})))
        assert all(torch.allclose(a.double(), b, atol=1e-5) for a, b in zip(found, right)), window
    assert [effective_window(window, 5, 9) for window in (0, 1, 13, 14, 2**63)] == [0, 1, 13, 0, 0]


@pytest.mark.parametrize("softcap", [math.inf, math.nan, -1.0, 1e-40, 1e39])
@pytest.mark.parametrize("name", WINDOWED)
def test_a_softcap_that_is_no_number_is_refused(name, softcap):
    words = f"{name}: softcap must be 0 .none. or a positive number from 1e-30 to 1e30, got {softcap}"
    with pytest.raises(BadInput, match=words.replace("+", r"\+")):
        REGISTRY[name](**drawn(name) | {"softcap": softcap})


@pytest.mark.parametrize("scale", [math.inf, -math.inf, math.nan, 1e39])
@pytest.mark.parametrize("name", SMALL)
def test_a_scale_that_is_no_number_is_refused_at_every_call(name, scale):
    op, given = REGISTRY[name], drawn(name)
    op(**given)
    with pytest.raises(BadInput, match=f"{name}: scale must be None .* or a finite number in fp32, got"):
        op(**given | {"scale": scale})


def test_an_fp8_bias_is_refused():
    """There is no kernel that reads it."""
    given = drawn("attention", n=32, dtype="e4m3")
    bias = torch.zeros(1, 1, 20, 20)
    tilery.attention(**given | {"bias": bias})
    with pytest.raises(BadInput, match=r"bias must be fp32 \[1 or 1, 1 or 2, 20, 20\], got e4m3"):
        tilery.attention(**given | {"bias": bias.to(torch.float8_e4m3fn)})


# Buckets: a config that is tuned for one problem must not be taken for another whose code is not the same


OPTIONS = {
    "attention": [
        {"sinks": True},
        {"softcap": 3.0},
        {"padding": True},
        {"bias": "fp16"},
        {"slopes": True},
        {"window": 7},
        {"window": 8},
        {"causal": False},
        {"order": "bhsd"},
        {"order": "thd"},
        {"dtype": "bf16"},
    ],
    "attention_decode": [
        {"sinks": True},
        {"softcap": 3.0},
        {"window": 7},
        {"block_size": 0},
        {"block_size": 64},
        {"format": "e4m3"},
        {"queries": 3},
    ],
    "attention_chunked": [
        {"sinks": True},
        {"softcap": 3.0},
        {"window": 7},
        {"block_size": 64},
        {"format": "e4m3"},
    ],
    "mla": [{"causal": False}, {"order": "bhsd"}, {"order": "thd"}, {"rope": 32}],
    "mla_decode": [{"block_size": 0}, {"block_size": 64}, {"queries": 3}],
}
OPTIONS["attention_lse"] = OPTIONS["attention"]
OPTIONS["attention_backward"] = [
    {"softcap": 3.0},
    {"window": 7},
    {"window": 8},
    {"causal": False},
    {"order": "bhsd"},
    {"order": "thd", "lengths": "20"},
]


def bucket(name, **more):
    op = REGISTRY[name]
    return op.bucket(call_for(op, case(**{"dtype": "fp16"} | SMALL[name] | more), "cpu"))


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_has_a_bucket_of_its_own(name):
    found = [bucket(name).exact, *(bucket(name, **option).exact for option in OPTIONS[name])]
    assert len(set(found)) == len(found), found


@pytest.mark.parametrize("name", WINDOWED)
def test_a_window_that_masks_nothing_has_the_bucket_of_none(name):
    assert bucket(name, window=2**62) == bucket(name)


def test_the_bucket_of_a_plain_problem_names_no_options():
    """Files of tuned configs have this key."""
    found = REGISTRY["attention"].bucket(call_for(REGISTRY["attention"], case(m=40, n=64, dtype="bf16"), "cpu"))
    assert found == ("q=4,k=2,d=64,e=64,bf16,bshd,causal", {"m": 40, "keys": 40, "batch": 1})

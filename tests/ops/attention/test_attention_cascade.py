"""attention_cascade beyond its cases: it is attention_decode of joined tables, what it launches, what is refused."""

import pytest
import torch

import tilery
from tilery.base import settings
from tilery.base.errors import BadInput, NoBackward
from tilery.base.spec import case
from tilery.core import policy
from tilery.core.cases import call_for
from tilery.core.op import REGISTRY
from tilery.hardware import device

OP, DECODE = REGISTRY["attention_cascade"], REGISTRY["attention_decode"]
EITHER = pytest.mark.parametrize("backend", ["numba", "triton"])
SHARED = {"m": 6, "keys": 40, "prefix": 96, "n": 32, "dtype": "fp32", "groups": "2+4", "lengths": "40+17+3+40+1+33"}
OWN = ("q", "k_cache", "v_cache", "lengths", "block_table", "k_scale", "v_scale", "sinks", "scale", "softcap")


def drawn(**params):
    return OP.inputs(**SHARED | params, device=torch.get_default_device(), seed=5)


def joined(given):
    """The arguments of attention_decode: each sequence's table begins with the pages of its prefix."""
    token = torch.arange(len(given["q"]), device="cpu") * given["q"].shape[1]
    prefix = torch.searchsorted(given["cu_prefix_q"].cpu(), token, right=True) - 1
    tables = given["prefix_table"].cpu()[prefix], given["block_table"].cpu()
    lengths = given["lengths"].cpu() + given["prefix_lengths"].cpu()[prefix]
    made = {"block_table": torch.cat(tables, 1), "lengths": lengths.to(torch.int32)}
    kept = {name: given[name] for name in OWN}
    return kept | {name: x.to(given["q"].device) for name, x in made.items()}


@EITHER
@pytest.mark.parametrize("params", [{}, {"queries": 3, "lengths": "40+17+3+40+9+33"}, {"sinks": True, "softcap": 3.0}])
def test_it_is_attention_decode_of_tables_that_begin_alike(params, backend):
    """Where prefixes fill their pages; the op itself takes others too."""
    given = drawn(prefix_lengths="96+96", **params)
    found = OP(**given, backend=backend)
    assert torch.allclose(found, DECODE(**joined(given), backend=backend), atol=1e-6)
    assert torch.allclose(found.double(), DECODE.reference(**joined(given)).double(), atol=1e-6)


@EITHER
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_a_sequence_without_a_prefix_has_the_bits_of_attention_decode(dtype, backend):
    given = drawn(groups="2", prefix_lengths="90", dtype=dtype)
    plain = DECODE(**{name: given[name] for name in OWN}, backend=backend)
    found = OP(**given, backend=backend)
    assert torch.equal(found[2:], plain[2:]) and not torch.equal(found[:2], plain[:2])


@EITHER
def test_pages_and_keys_that_nobody_sees_are_not_read(backend):
    """Unused entries of both tables lead far outside; what is behind a length is NaN."""
    given = drawn(prefix_lengths="33+0")
    given["prefix_table"][0, 3:] = given["prefix_table"][1] = -(2**31)
    assert OP(**given, backend=backend).isfinite().all()


@EITHER
@pytest.mark.parametrize(
    ("name", "entry", "wrong", "spoilt"),
    [
        ("prefix_lengths", (0,), 97, range(2)),
        ("prefix_lengths", (1,), -1, range(2, 6)),
        ("prefix_table", (1, 0), 2**31 - 1, range(2, 6)),
        ("lengths", (3,), 49, range(3, 4)),
        ("block_table", (0, 0), -1, range(1)),
        ("cu_prefix_q", (2,), 2**30, range(2, 6)),
    ],
)
def test_integers_that_lead_outside_spoil_their_own_tokens_alone(name, entry, wrong, spoilt, backend):
    given = drawn(prefix_lengths="96+33")
    right = OP(**given, backend=backend)
    given[name][entry] = wrong
    found = OP(**given, backend=backend)
    for b in range(6):
        assert found[b].isnan().all() if b in spoilt else torch.equal(found[b], right[b]), b


@pytest.mark.parametrize(
    ("name", "entry", "wrong", "says"),
    [
        ("prefix_table", (0, 0), 99, r"prefix_table\[0, 0\] must be from 0 to"),
        ("prefix_lengths", (1,), 97, r"prefix_lengths\[1\] must be from 0 to 96, got 97"),
        ("cu_prefix_q", (1,), 7, r"cu_prefix_q\[1\] must be from 0 to 6, got 7"),
        ("block_table", (2, 0), -1, r"block_table\[2, 0\] must be from 0 to"),
        ("lengths", (0,), 50, r"lengths\[0\] must be from 0 to 48, got 50"),
    ],
)
def test_a_wrong_entry_is_named_if_asked(name, entry, wrong, says):
    given = drawn(prefix_lengths="96+33")
    with settings.override(check_indices=True):
        OP(**given)
        given[name][entry] = wrong
        with pytest.raises(BadInput, match=f"attention_cascade: {says}"):
            OP(**given)


def test_programs_are_dealt_out_by_prefix_and_not_by_sequence():
    """So a prefix is read by the tiles of its rows, and not by every sequence."""
    kernel = OP.kernel("triton")
    call = call_for(OP, case(m=64, keys=512, prefix=32768, heads=32, kv_heads=8, n=128, dtype="bf16"))
    with device.pretend("sm_90"):
        config = kernel.default(call)
        made = kernel.launches(policy.with_workspace(OP, kernel, call, config)[1], config)
    (tiles, _, prefixes), (_, _, sequences) = (x.grid for x in made if isinstance(x.grid, tuple))
    assert tiles == 8 * 64 * 4 // config.prefix_block_m and prefixes <= 2 and sequences == 64


def test_cost_counts_a_prefix_once():
    one, many = (call_for(OP, case(m=m, keys=16, prefix=4096, n=64, dtype="fp16")) for m in (1, 64))
    prefix = 2 * 4096 * 2 * 64 * 2  # bytes of keys and values of two heads
    assert OP.cost(one).reads - prefix == (OP.cost(many).reads - prefix) // 64
    assert OP.cost(many).flops == 64 * OP.cost(one).flops


@pytest.mark.parametrize(
    ("match", "name", "make"),
    [
        (r"prefix_lengths must be int32", "prefix_lengths", lambda a: a["prefix_lengths"].long()),
        (r"prefix_table must be \[prefixes, most blocks of one\]", "prefix_table", lambda a: a["prefix_table"][:1]),
        (r"cu_prefix_q must be \[prefixes \+ 1\]", "cu_prefix_q", lambda a: a["cu_prefix_q"][1:]),
        (r"lengths must be \[sequences\]", "lengths", lambda a: a["lengths"][:1]),
        (r"1 to 16 query tokens, got 17", "q", lambda a: a["q"].new_zeros(6, 17, 4, 32)),
        (r"tokens must lie at one distance", "q", lambda a: a["q"].new_zeros(6, 4, 4, 32)[:, :2]),
        (r"sinks must be fp32\[4\]", "sinks", lambda a: torch.ones(3)),
        ("softcap must be 0", "softcap", lambda a: -1.0),
    ],
)
def test_bad_input_is_named(match, name, make):
    given = drawn()
    with pytest.raises(BadInput, match=match):
        tilery.attention_cascade(**given | {name: make(given)})


def test_gradients_are_refused():
    given = drawn()
    with pytest.raises(NoBackward, match="attention_cascade has no backward and q requires grad"):
        tilery.attention_cascade(**given | {"q": given["q"].requires_grad_()})

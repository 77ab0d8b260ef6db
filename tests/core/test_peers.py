"""Peers: named in contracts, loaded only if there."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F

from tilery.core import peers
from tilery.core.op import REGISTRY


def test_contracts_name_known_peers_and_torch_is_one():
    for op in REGISTRY.values():
        assert "baseline:torch" in op.baselines
        assert {name.removeprefix("baseline:") for name in op.baselines} <= set(peers.PEERS)


def test_a_missing_peer_says_what_adds_it(monkeypatch, without_a_gpu):
    monkeypatch.setitem(peers.PEERS, "liger", peers.Peer("no_such_module", "liger-kernel"))
    assert peers.missing("liger") == "liger-kernel is not installed: pip install liger-kernel"
    monkeypatch.setitem(peers.PEERS, "deepgemm", peers.PEERS["deepgemm"]._replace(module="no_such_module"))
    source = "https://github.com/deepseek-ai/DeepGEMM"  # what pip calls deep-gemm lacks the functions that are called
    assert peers.missing("deepgemm") == f"DeepGEMM is not installed: build it from {source}"
    assert peers.missing("torch") is None
    assert peers.missing("cudnn") == "needs a GPU"


def test_an_unknown_peer_is_a_mistake_in_the_contract():
    with pytest.raises(AssertionError, match="no such peer"):
        peers.baselines(cublast=torch.matmul)


def test_torch_compile_is_made_anew_for_each_shape(monkeypatch):
    made = []

    def compile(function, **options):
        made.append(options)
        return function

    monkeypatch.setattr(torch, "compile", compile)
    double = peers.Compiled(lambda x, by: x * by)
    for shape in ((2, 3), (2, 3), (4, 5), (4, 5)):
        x = torch.randn(shape)
        assert torch.equal(double(x, 2.0), x * 2)
    assert len(made) == 2 and all(not options["dynamic"] and options["fullgraph"] for options in made)


def test_what_a_forward_saves_is_computed_once_for_each_input():
    seen = []

    def forward(x, eps):
        seen.append(eps)
        return x.sum() + eps

    saved, x, other = peers.Saved(forward), torch.ones(3), torch.zeros(3)
    assert [saved(x, 1.0), saved(x, 1.0), saved(other, 1.0)] == [4, 4, 1] and len(seen) == 2
    assert saved(x, 2.0) == 5  # another eps
    x.zero_()
    assert saved(x, 2.0) == 2  # other values


def test_what_is_saved_is_computed_anew_for_other_tensors_beside_it():
    seen = []
    saved = peers.Saved(lambda x, by, more: [x @ by + more, seen.append(1)][0])
    x, by, other = torch.ones(3), torch.ones(3), torch.zeros(3)
    assert [saved(x, by, 1), saved(x, by, 1), saved(x, other, 1), saved(x, other, 2)] == [4, 4, 1, 2]
    other.fill_(1.0)
    assert saved(x, other, 2) == 5 and len(seen) == 4


def test_what_is_saved_goes_with_its_tensor():
    made = []

    def forward(x):
        made.append(weakref.ref(found := torch.ones(3)))
        return found

    saved, x = peers.Saved(forward), torch.ones(3)
    saved(x)
    assert made[0]() is not None
    del x
    gc.collect()
    assert made[0]() is None


@pytest.mark.parametrize(("op", "given"), [("fp8_matmul", {}), ("fp8_matmul_rowwise", {"scales": "tensor"})])
def test_what_cublaslt_needs_is_made_ready_in_nobodys_time(op, given, monkeypatch):
    """The second call of a set, which is timed, is given what the first made ready."""
    seen = []

    def scaled_mm(a, b, a_scale, a_kind, b_scale, b_kind, output_dtype):
        seen.append([x.data_ptr() for x in (a, a_scale, b_scale)])
        return torch.empty(a.shape[0], b.shape[1], dtype=output_dtype)

    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    found = REGISTRY[op]
    args = found.complete((), found.inputs(m=17, n=128, k=384, device="cpu", **given))
    for _ in range(2):
        found.baselines["baseline:cublaslt"](*args)
    assert seen[0] == seen[1]


def test_torch_compile_may_overlap_its_launches_where_the_gpu_can(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, overlaps in (((9, 0), True), ((8, 0), False)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda capability=capability: capability)
        options = peers._compile_options()
        assert options["max_autotune"] and options.get("triton.enable_pdl", False) == overlaps
        assert not options["autotune_local_cache"]


@pytest.mark.parametrize("op", ["fp8_matmul", "fp8_matmul_rowwise"])
def test_scaled_mm_is_given_scaling_types_that_torch_has(op, monkeypatch):
    given = []

    def scaled_mm(a, b, a_scale, a_kind, b_scale, b_kind, output_dtype):
        given.extend((a_kind, b_kind))
        return torch.empty(a.shape[0], b.shape[1], dtype=output_dtype)

    monkeypatch.setattr(F, "scaled_mm", scaled_mm)
    found = REGISTRY[op]
    args = found.complete((), found.inputs(m=16, n=128, k=256, device="cpu"))
    assert found.baselines["baseline:cublaslt"](*args).shape == (16, 128)
    assert len(given) == 2 and all(isinstance(kind, F.ScalingType) for kind in given)

"""Peers: named in contracts, loaded only if there."""

import pytest
import torch

from tilery import peers
from tilery.op import REGISTRY


def test_contracts_name_known_peers_and_torch_is_one():
    for op in REGISTRY.values():
        assert "baseline:torch" in op.baselines
        assert {name.removeprefix("baseline:") for name in op.baselines} <= set(peers.PEERS)


def test_a_missing_peer_says_what_adds_it(monkeypatch):
    monkeypatch.setitem(peers.PEERS, "liger", peers.Peer("no_such_module", "liger-kernel"))
    assert peers.missing("liger") == "liger-kernel is not installed: pip install liger-kernel"
    assert peers.missing("torch") is None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
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

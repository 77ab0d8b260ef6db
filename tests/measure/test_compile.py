"""The compiling child: kept, crash-proof, timed."""

import os
import signal

import pytest
import torch

import tilery.ops
from tilery.base.errors import CompileFailed
from tilery.base.spec import TensorSpec
from tilery.core.cases import specs_for
from tilery.core.op import REGISTRY
from tilery.measure import inspect
from tilery.measure.compile import Compiler

X = (TensorSpec.contiguous((8, 4096), torch.bfloat16, "cuda:0"),)


def test_the_child_is_kept_for_the_next_request(compiler):
    first = compiler.compile("softmax", "triton", X, "sm_90")
    child = compiler._child._process.pid
    second = compiler.compile("softmax", "triton", X, "sm_80")
    assert compiler._child._process.pid == child
    assert ".target sm_90" in first.code["ptx"] and ".target sm_80" in second.code["ptx"]


def test_alignment_reaches_the_code(compiler):
    def wide_loads(aligned):
        artifact = compiler.compile("softmax", "triton", (X[0]._replace(aligned=aligned),), "sm_90")
        return artifact.code["ptx"].count("ld.global.v4")

    assert wide_loads(True) > wide_loads(False)


def test_what_the_compiler_says_reaches_the_user(compiler):
    bad = (X[0]._replace(dtype=torch.complex64),)
    with pytest.raises(CompileFailed, match=r"softmax triton does not build for sm_90:\n(.|\n)*complex64"):
        compiler.compile("softmax", "triton", bad, "sm_90")
    assert compiler.compile("softmax", "triton", X, "sm_90").registers  # and the child lives


def test_a_dead_child_is_named_and_replaced():
    with Compiler() as compiler:
        process = compiler._child._start()
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        with pytest.raises(CompileFailed, match="does not build for sm_90: its process was killed by signal 9"):
            compiler.compile("softmax", "triton", X, "sm_90")
        assert compiler.compile("softmax", "triton", X, "sm_90").registers


def test_a_hanging_child_is_stopped():
    """It has not even imported torch by then."""
    with Compiler(timeout_s=0.01) as compiler, pytest.raises(CompileFailed, match="no answer within 0 s"):
        compiler.compile("softmax", "triton", X, "sm_90")
    assert compiler._child._process is None


def test_stages_hold_what_they_say(compiler):
    artifact = compiler.compile("softmax", "triton", X, "sm_90")
    assert inspect.stages(artifact) == ["source", "ir", "ptx", "sass"]
    assert "ttg." in inspect.stage(artifact, "ir") and "EXIT" in inspect.stage(artifact, "sass")
    with pytest.raises(tilery.base.errors.BadInput, match="has the stages source, ir, ptx, sass, got 'cuda'"):
        inspect.stage(artifact, "cuda")


def test_source_of_a_cuda_kernel_holds_its_cu_file():
    assert "__global__" in inspect.source(REGISTRY["softmax"], "cuda")


def test_specs_are_those_of_the_inputs():
    op = REGISTRY["matmul"]
    a, b, _ = specs_for(op, op.cases["test"][0])
    assert a.device == torch.device("cuda", 0) and a.shape == (128, 192) and b.strides == (1, 192)

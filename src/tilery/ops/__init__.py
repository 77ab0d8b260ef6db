"""Every op. Importing this fills the registry, third parties' ops and kernels included."""

from importlib import import_module
from importlib.metadata import entry_points

from tilery import languages
from tilery.core.op import REGISTRY
from tilery.ops.add_rms_norm import add_rms_norm
from tilery.ops.add_rms_norm_backward import add_rms_norm_backward
from tilery.ops.add_rms_norm_fp8 import add_rms_norm_fp8
from tilery.ops.argmax import argmax
from tilery.ops.attention import attention
from tilery.ops.attention_backward import attention_backward
from tilery.ops.attention_chunked import attention_chunked
from tilery.ops.attention_decode import attention_decode
from tilery.ops.attention_lse import attention_lse
from tilery.ops.bmm import bmm
from tilery.ops.cast import cast
from tilery.ops.cross_entropy import cross_entropy
from tilery.ops.cross_entropy_backward import cross_entropy_backward
from tilery.ops.dequantize_fp8 import dequantize_fp8
from tilery.ops.dropout import dropout
from tilery.ops.embedding import embedding
from tilery.ops.fp8_matmul import fp8_matmul
from tilery.ops.fp8_matmul_rowwise import fp8_matmul_rowwise
from tilery.ops.fused_linear_cross_entropy import fused_linear_cross_entropy
from tilery.ops.fused_linear_cross_entropy_backward import fused_linear_cross_entropy_backward
from tilery.ops.gelu_mul import gelu_mul
from tilery.ops.gelu_mul_backward import gelu_mul_backward
from tilery.ops.gelu_mul_packed_backward import gelu_mul_packed_backward
from tilery.ops.grouped_matmul import grouped_matmul, grouped_matmul_list
from tilery.ops.layer_norm import layer_norm
from tilery.ops.layer_norm_backward import layer_norm_backward
from tilery.ops.linear import linear
from tilery.ops.linear_silu_mul import linear_silu_mul
from tilery.ops.log_softmax import log_softmax
from tilery.ops.log_softmax_backward import log_softmax_backward
from tilery.ops.matmul import matmul
from tilery.ops.matmul_add import matmul_add
from tilery.ops.mla import mla
from tilery.ops.mla_decode import mla_decode
from tilery.ops.qk_norm_rope_ import qk_norm_rope_
from tilery.ops.quantize_fp8 import quantize_fp8
from tilery.ops.relu_squared import relu_squared
from tilery.ops.relu_squared_backward import relu_squared_backward
from tilery.ops.rms_norm import rms_norm
from tilery.ops.rms_norm_backward import rms_norm_backward
from tilery.ops.rms_norm_fp8 import rms_norm_fp8
from tilery.ops.rope import rope
from tilery.ops.rope_ import rope_
from tilery.ops.rope_backward import rope_backward
from tilery.ops.rope_cache_write_ import rope_cache_write_
from tilery.ops.sample import sample
from tilery.ops.silu_mul import silu_mul
from tilery.ops.silu_mul_backward import silu_mul_backward
from tilery.ops.silu_mul_fp8 import silu_mul_fp8
from tilery.ops.silu_mul_packed_backward import silu_mul_packed_backward
from tilery.ops.softmax import softmax
from tilery.ops.softmax_backward import softmax_backward
from tilery.ops.splitk_reduce import splitk_reduce
from tilery.ops.topk_softmax import topk_softmax
from tilery.ops.transpose import transpose

__all__ = [
    "mla",
    "mla_decode",
    "attention",
    "attention_backward",
    "attention_chunked",
    "attention_decode",
    "attention_lse",
    "dropout",
    "embedding",
    "transpose",
    "cast",
    "silu_mul_fp8",
    "dequantize_fp8",
    "quantize_fp8",
    "relu_squared_backward",
    "relu_squared",
    "silu_mul_packed_backward",
    "silu_mul_backward",
    "gelu_mul_packed_backward",
    "gelu_mul_backward",
    "gelu_mul",
    "linear",
    "linear_silu_mul",
    "matmul",
    "matmul_add",
    "bmm",
    "grouped_matmul",
    "grouped_matmul_list",
    "splitk_reduce",
    "fp8_matmul",
    "fp8_matmul_rowwise",
    "rms_norm",
    "add_rms_norm",
    "add_rms_norm_backward",
    "layer_norm",
    "layer_norm_backward",
    "add_rms_norm_fp8",
    "rms_norm_fp8",
    "qk_norm_rope_",
    "rope",
    "rope_cache_write_",
    "rope_",
    "rope_backward",
    "rms_norm_backward",
    "silu_mul",
    "softmax",
    "argmax",
    "sample",
    "topk_softmax",
    "cross_entropy",
    "fused_linear_cross_entropy",
    "fused_linear_cross_entropy_backward",
    "cross_entropy_backward",
    "softmax_backward",
    "log_softmax",
    "log_softmax_backward",
]


def load_plugins() -> None:
    """Entry points `tilery.languages` (a Language), `tilery.ops` (a module), `tilery.kernels` (OP/KERNEL, a module)."""
    for entry in entry_points(group="tilery.languages"):
        languages.LANGUAGES[entry.name] = entry.load()
    for entry in entry_points(group="tilery.ops"):
        import_module(entry.value)
    for entry in entry_points(group="tilery.kernels"):
        op, _, kernel = entry.name.partition("/")
        REGISTRY[op].add_kernel(kernel, entry.value)


load_plugins()

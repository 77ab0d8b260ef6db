"""A model by the numbers of its config.json, and what one rank of tensor parallelism has of it."""

from dataclasses import dataclass
from typing import NamedTuple

from tilery.base.errors import BadInput, require

BF16, FP8 = WEIGHTS = ("bf16", "fp8")  # of linear layers; fp8 has a scale per block of 128 × 128


class Linear(NamedTuple):
    """y [M, n] = x [M, k] · wᵀ, as one rank of tensor parallelism sees it."""

    name: str
    n: int
    k: int


@dataclass(frozen=True)
class Model:
    """Fields as Hugging Face's config.json names them; those of MLA and MoE are None for models without."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    model_type: str | None = None
    hidden_act: str = "silu"
    head_dim: int | None = None
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    use_sliding_window: bool = False
    q_lora_rank: int | None = None  # MLA without it makes its queries in one step
    kv_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    n_routed_experts: int | None = None
    n_shared_experts: int | None = None
    num_experts_per_tok: int | None = None
    moe_intermediate_size: int | None = None  # None with experts: they are as wide as intermediate_size says
    norm_topk_prob: bool = True  # as Mixtral does without saying so
    topk_method: str | None = None
    first_k_dense_replace: int = 0  # these layers have no experts; so have those that the next three leave out
    moe_layer_freq: int = 1
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    weights: str = BF16  # one of WEIGHTS, or what the config calls a format that is not planned
    tp: int = 1  # ranks that share each layer

    def __post_init__(self) -> None:
        require(self.tp >= 1, f"{self.name}: tp must be 1 or more, got {self.tp}")

    # Sizes on one rank

    @property
    def head_size(self) -> int:
        if self.head_dim is None and self.hidden_size % self.num_attention_heads:
            what = f"hidden_size of {self.hidden_size} is no multiple of {self.num_attention_heads} heads"
            raise BadInput(f"{self.name}: the config must say head_dim where {what}")
        return self.head_dim or self.hidden_size // self.num_attention_heads

    @property
    def query_heads(self) -> int:
        return self._share("attention heads", self.num_attention_heads)

    @property
    def key_heads(self) -> int:
        """Fewer heads than ranks are copied."""
        heads = self.num_key_value_heads
        if self.num_attention_heads % heads:
            raise BadInput(
                f"{self.name}: {self.num_attention_heads} heads must be a multiple of {heads} key-value heads"
            )
        if heads % self.tp and self.tp % heads:
            raise BadInput(
                f"{self.name}: {heads} key-value heads can neither be shared by nor copied to {self.tp} ranks"
            )
        return max(heads // self.tp, 1)

    @property
    def mlp_size(self) -> int:
        """Columns of gate and of up on one rank; of one expert where there are experts."""
        return self._share("intermediate size", self.moe_intermediate_size or self.intermediate_size)

    @property
    def dense_size(self) -> int:
        """mlp_size in a layer without experts."""
        return self._share("intermediate size", self.intermediate_size)

    @property
    def shared_size(self) -> int:
        """mlp_size of the experts that every token passes, taken as one; 0 where there are none."""
        one = self.moe_intermediate_size or self.intermediate_size
        return self._share("shared experts", (self.n_shared_experts or 0) * one)

    @property
    def expert_layers(self) -> int:
        return sum(map(self._has_experts, range(self.num_hidden_layers)))

    def _has_experts(self, layer: int) -> bool:
        if not self.n_routed_experts or layer < self.first_k_dense_replace or layer in self.mlp_only_layers:
            return False
        return layer % self.moe_layer_freq == 0 and (layer + 1) % self.decoder_sparse_step == 0

    # Linear layers

    def linears(self) -> list[Linear]:
        """Every linear layer of a block, and the head that makes logits."""
        return [*self.attention(), *self.mlp(self.mlp_size), self.head()]

    def attention(self) -> list[Linear]:
        return self._mla() if self.kv_lora_rank else self._gqa()

    def mlp(self, size: int) -> list[Linear]:
        """Linear layers of an MLP of `size` columns: mlp_size, dense_size or shared_size."""
        return [Linear("gate_up", 2 * size, self.hidden_size), Linear("down", self.hidden_size, size)]

    def head(self) -> Linear:
        return Linear("lm_head", self._share("vocabulary", self.vocab_size), self.hidden_size)

    def _gqa(self) -> list[Linear]:
        queries, keys, size = self.query_heads, self.key_heads, self.head_size
        return [
            Linear("qkv", (queries + 2 * keys) * size, self.hidden_size),
            Linear("o", self.hidden_size, queries * size),
        ]

    def _mla(self) -> list[Linear]:
        """Multi-head latent attention: queries and keys pass through narrow layers, which every rank has whole."""
        heads, hidden, q = self.query_heads, self.hidden_size, self.q_lora_rank
        kv, nope, rope, value = self.mla_sizes()
        queries = [Linear("q", heads * (nope + rope), hidden)]
        if q:
            queries = [Linear("qkv_a", q + kv + rope, hidden), Linear("q_b", heads * (nope + rope), q)]
        kv_a, kv_b = Linear("kv_a", kv + rope, hidden), Linear("kv_b", heads * (nope + value), kv)
        return [queries[0], kv_a, *queries[1:], kv_b, Linear("o", hidden, heads * value)]

    def mla_sizes(self) -> tuple[int, int, int, int]:
        """kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim, v_head_dim."""
        kv, nope, rope, value = self.kv_lora_rank, self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim
        assert kv and nope and rope and value, "a config with the first has them all"
        return kv, nope, rope, value

    def _share(self, what: str, size: int) -> int:
        if size % self.tp:
            raise BadInput(f"{self.name}: {what} of {size} cannot be shared by {self.tp} ranks")
        return size // self.tp

"""Every mutation, by layer. A new one needs a snippet that stands once in the source, and a test that notices it."""

from mutations.catalogue import (
    attention,
    attention_parts,
    checks,
    contract,
    cuda_kernels,
    dispatch,
    hopper,
    mla_hopper,
    moe,
    numba_kernels,
    patch,
    product_gradients,
    store,
    timing,
    tools,
    triton_kernels,
    tuned,
    tuning,
)

LAYERS = (
    *contract.LAYERS,
    *dispatch.LAYERS,
    *tuned.LAYERS,
    *numba_kernels.LAYERS,
    *triton_kernels.LAYERS,
    *attention.LAYERS,
    *attention_parts.LAYERS,
    *product_gradients.LAYERS,
    *hopper.LAYERS,
    *cuda_kernels.LAYERS,
    *mla_hopper.LAYERS,
    *moe.LAYERS,
    *checks.LAYERS,
    *timing.LAYERS,
    *store.LAYERS,
    *tuning.LAYERS,
    *tools.LAYERS,
    *patch.LAYERS,
)
MUTATIONS = [mutation for layer in LAYERS for mutation in layer.mutations]

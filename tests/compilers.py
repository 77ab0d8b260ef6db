"""Which compilers the bounds on spilled registers hold for: older ones allocate otherwise, and a user may have one."""

WRITTEN_WITH = {"cuda": (13, 4), "triton": (3, 7)}  # NVRTC; Triton, which brings its own ptxas


def most_spills(kernel, older=0):
    """Bytes of stack a thread may have: none with the compiler that kernels are written with, `older` before it."""
    language = kernel.partition(".")[0]
    return older if language in WRITTEN_WITH and version(language) < WRITTEN_WITH[language] else 0


def version(language):
    if language == "cuda":
        from tilery.languages import cuda_compiler

        return tuple(cuda_compiler._compiler())
    import triton

    return tuple(int(part) for part in triton.__version__.split(".")[:2])

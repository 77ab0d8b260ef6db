"""Which compilers the bounds on spilled registers hold for: others allocate otherwise, and a user may have one."""

WRITTEN_WITH = {"cuda": (13, 4), "triton": (3, 7)}  # NVRTC; Triton, which brings its own ptxas


def most_spills(kernel, older=0, newer=0):
    """Bytes of stack a thread may have: none with the compiler that kernels are written with; with others as given."""
    language = kernel.partition(".")[0]
    if language not in WRITTEN_WITH or version(language) == WRITTEN_WITH[language]:
        return 0
    return older if version(language) < WRITTEN_WITH[language] else newer


def version(language):
    if language == "cuda":
        from tilery.languages import cuda_compiler

        return tuple(cuda_compiler._compiler())
    import triton

    return tuple(int(part) for part in triton.__version__.split(".")[:2])

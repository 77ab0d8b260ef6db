"""An emulator of CUDA C++ on a CPU, for machines without a GPU: right, slow, and strict about barriers and bounds.

A kernel's source is compiled for the CPU by g++, its asm statements are interpreted (`runtime/`), and the threads of a
few blocks take turns in a random order. Copies by TMA, wgmma and the like complete at a random later time, so that a
missing wait gives a wrong result. A deadlock, an access outside of shared memory or a misused barrier is an error that
says where. What it does not know: the memory model (every write is seen at once), speed, and instructions of other
architectures than sm_90.
"""

from tilery.languages.cuda_emulator.build import refusal
from tilery.languages.cuda_emulator.launch import bind

__all__ = ["bind", "refusal"]

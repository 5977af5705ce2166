"""Triton kernels for GPUs.

Each module has kernels and the functions that launch them. Modules and functions have the same names as in
`compressors/kernels/`.

| Operation | On a GPU |
| :--- | :--- |
| maxima, norms, sums, signs, levels, powers, ternary codes | one kernel each; two for signs and sums |
| largest entries of groups of up to 16384 | one kernel, which finds the k-th largest bit by bit in registers |
| largest entries of a tensor, entries that reach a level | three histograms (top-k only), one count, one write |
| random numbers | inside the kernel that uses them |
| 16-bit rounding and sums, sums of packed codes | one kernel each, in `collectives/payloads/codec/triton.py` |
| residuals, packing of indices, positions from a seed, PowerSGD | PyTorch operations |

Every element is computed exactly as in C and in PyTorch, so results do not depend on the order of the programs.
"""

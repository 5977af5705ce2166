"""The same in Triton, for GPUs: each module holds kernels, and the functions of its namesake above that launch them.

| What | On a GPU |
| :--- | :--- |
| maxima, norms, sums, signs, levels, powers, three values, a + factor * b | a kernel each, two for signs and sums |
| the largest of groups of up to 16384 | a kernel; the k-th largest is found bit by bit in registers |
| the largest of all, those that reach a level | three histograms by kernels, then two passes that count and write |
| random numbers | within the kernel that uses them |
| 16-bit rounding and sums; adding packed codes (`collectives/payloads/codec/triton/`) | a kernel each |
| residuals of what was sent, indices and their packing, positions drawn from a seed, PowerSGD | torch's calls |

Every element is computed as in C and on the reference path, so no result depends on the order in which programs run.
"""

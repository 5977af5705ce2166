"""The same in Triton: each module holds kernels, and the functions of its namesake above that launch them."""

/* The largest magnitude, and the L2 norm, of every block of consecutive elements; the last may be shorter. */
#include "sums.h"

/* NaN is the largest of all, as its bits are. */
void block_maxima(const int32_t *x, int64_t numel, int64_t block_numel, int32_t *maxima) {
    for (int64_t start = 0; start < numel; start += block_numel) {
        int64_t stop = numel - start < block_numel ? numel : start + block_numel;
        int32_t largest = 0;
        for (int64_t i = start; i < stop; i++) {
            int32_t magnitude = x[i] & 0x7fffffff;
            largest = magnitude > largest ? magnitude : largest;
        }
        *maxima++ = largest;
    }
}

/* Sums of squares. */
void block_squares(const float *x, int64_t numel, int64_t block_numel, double *sums) {
    for (int64_t start = 0; start < numel; start += block_numel) {
        int64_t width = numel - start < block_numel ? numel - start : block_numel;
        *sums++ = sum_of(x + start, width, square_term, __builtin_inff());
    }
}

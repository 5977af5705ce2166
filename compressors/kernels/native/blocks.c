/* The largest magnitude, and sums, of every block of consecutive elements; the last may be shorter. */
#include "sums.h"

static inline int64_t smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* NaN is the largest of all, as its bits are. */
void block_maxima(const int32_t *x, int64_t numel, int64_t block_numel, int32_t *maxima) {
    for (int64_t start = 0; start < numel; start += block_numel) {
        int64_t stop = smaller(numel, start + block_numel);
        int32_t largest = 0;
        for (int64_t i = start; i < stop; i++) {
            int32_t magnitude = x[i] & 0x7fffffff;
            largest = magnitude > largest ? magnitude : largest;
        }
        *maxima++ = largest;
    }
}

static inline __attribute__((always_inline)) void block_sums(
    const float *x, int64_t numel, int64_t block_numel, sum_term term, float limit, double *scratch, double *sums) {
    for (int64_t start = 0; start < numel; start += block_numel) {
        int64_t stop = smaller(numel, start + block_numel), count = 0;
        for (int64_t first = start; first < stop; first += SUM_STRETCH)
            scratch[count++] = stretch_sum(x + first, smaller(SUM_STRETCH, stop - first), term, limit);
        *sums++ = folded_sum(scratch, count);
    }
}

/* Of min(|x|, limit); `scratch` [ceil(block_numel / 1024)] is overwritten. */
void block_magnitudes(
    const float *x, int64_t numel, int64_t block_numel, float limit, double *scratch, double *sums) {
    block_sums(x, numel, block_numel, magnitude_term, limit, scratch, sums);
}

/* Of min(|x|, limit)^2; `scratch` as above. */
void block_squares(const float *x, int64_t numel, int64_t block_numel, float limit, double *scratch, double *sums) {
    block_sums(x, numel, block_numel, square_term, limit, scratch, sums);
}

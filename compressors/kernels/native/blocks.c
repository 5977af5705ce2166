/* Maximum magnitude and sum of squares of every block of consecutive elements; the last block may be shorter. */
#include "../../../collectives/payloads/codec/native/parts.h"
#include "sums.h"

static inline int64_t min_int64(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* Writes the bits of each block's largest magnitude, NaN if there is one, to maxima, int32 [ceil(numel / block_numel)].
   starts, borders: see `struct parts`. */
void block_maxima(
    const float *const *starts, const int64_t *borders, int64_t numel, int64_t block_numel, int32_t *maxima) {
    struct parts x = {starts, borders, 0};
    for (int64_t start = 0, stop; start < numel; start = stop) {
        int32_t largest = 0;
        stop = min_int64(numel, start + block_numel);
        for (int64_t i = start, width; i < stop; i += width) {
            const float *here = element_at(&x, i, &width);
            width = min_int64(width, stop - i);
            largest = largest_bits(here, width, largest);
        }
        *maxima++ = largest;
    }
}

/* Writes the sum of squares of each block, in fp64, to sums, fp64 [ceil(numel / block_numel)]. */
void block_squares(
    const float *const *starts, const int64_t *borders, int64_t numel, int64_t block_numel, double *sums) {
    struct parts x = {starts, borders, 0};
    float buffer[SUM_STRETCH];
    struct folded_sum pending;
    for (int64_t start = 0, stop; start < numel; start = stop) {
        double sum = 0;
        __builtin_memset(pending.counts, 0, sizeof pending.counts);
        stop = min_int64(numel, start + block_numel);
        for (int64_t i = start, width; i < stop; i += width) {
            width = min_int64(SUM_STRETCH, stop - i);
            sum = stretch_sum(elements_at(&x, i, width, buffer), width, square_term, __builtin_inff());
            if (stop - start > SUM_STRETCH)
                push_sum(&pending, sum);
        }
        *sums++ = stop - start > SUM_STRETCH ? finish_sum(&pending) : sum;
    }
}

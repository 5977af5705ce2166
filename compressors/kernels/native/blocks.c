/* The largest magnitude, and the L2 norm, of every block of consecutive elements; the last may be shorter. */
#include "../../../collectives/payloads/codec/native/parts.h"
#include "sums.h"

static inline int64_t smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* NaN is the largest of all, as its bits are. */
void block_maxima(
    const float *const *starts, const int64_t *borders, int64_t numel, int64_t block_numel, int32_t *maxima) {
    struct parts x = {starts, borders, 0};
    for (int64_t start = 0, stop; start < numel; start = stop) {
        int32_t largest = 0;
        stop = smaller(numel, start + block_numel);
        for (int64_t i = start, width; i < stop; i += width) {
            const float *here = element_at(&x, i, &width);
            width = smaller(width, stop - i);
            largest = larger(here, width, largest);
        }
        *maxima++ = largest;
    }
}

/* Sums of squares. */
void block_squares(
    const float *const *starts, const int64_t *borders, int64_t numel, int64_t block_numel, double *sums) {
    struct parts x = {starts, borders, 0};
    float room[SUM_STRETCH];
    struct folding waiting;
    for (int64_t start = 0, stop; start < numel; start = stop) {
        double sum = 0;
        __builtin_memset(waiting.counts, 0, sizeof waiting.counts);
        stop = smaller(numel, start + block_numel);
        for (int64_t i = start, width; i < stop; i += width) {
            width = smaller(SUM_STRETCH, stop - i);
            sum = stretch_sum(elements_at(&x, i, width, room), width, square_term, __builtin_inff());
            if (stop - start > SUM_STRETCH)
                add_sum(&waiting, sum);
        }
        *sums++ = stop - start > SUM_STRETCH ? finished(&waiting) : sum;
    }
}

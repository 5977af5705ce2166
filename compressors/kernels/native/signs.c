/* One bit per element, set where it is not negative, and the sums that say what a bit stands for. */
#include "masks.h"
#include "sums.h"

static inline int64_t smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* Bits of `count` elements; NaN's is not set. Returns how many are. */
static inline int64_t pack_signs(const float *x, int64_t count, uint8_t *packed) {
    int64_t num_set = 0;
    for (int64_t i = 0; i < count; i += 64) {
        uint64_t bits = at_least_of_64(x + i, count - i, 0);
        if (count - i >= 64) /* without a call */
            __builtin_memcpy(packed + i / 8, &bits, sizeof bits);
        else
            __builtin_memcpy(packed + i / 8, &bits, (uint64_t)(count - i + 7) / 8);
        num_set += __builtin_popcountll(bits);
    }
    return num_set;
}

/* Returns the sum of magnitudes. */
double signs_and_magnitude(const float *x, int64_t numel, uint8_t *packed) {
    struct folding waiting = {.counts = {0}};
    for (int64_t start = 0; start < numel; start += SUM_STRETCH) {
        int64_t width = smaller(SUM_STRETCH, numel - start);
        add_sum(&waiting, stretch_sum(x + start, width, limited_term, __builtin_inff()));
        pack_signs(x + start, width, packed + start / 8);
    }
    return finished(&waiting);
}

/* Returns how many bits are set; `sums`: of the elements whose bits are, and of the others. NaN's is not. */
int64_t signs_and_sums(const float *x, int64_t numel, uint8_t *packed, double *sums) {
    struct folding positive = {.counts = {0}}, negative = {.counts = {0}};
    int64_t num_set = 0;
    for (int64_t start = 0; start < numel; start += SUM_STRETCH) {
        int64_t width = smaller(SUM_STRETCH, numel - start);
        add_sum(&positive, stretch_sum(x + start, width, positive_term, 0));
        add_sum(&negative, stretch_sum(x + start, width, negative_term, 0));
        num_set += pack_signs(x + start, width, packed + start / 8);
    }
    sums[0] = finished(&positive);
    sums[1] = finished(&negative);
    return num_set;
}

/* Sums in fp64 in an order of their own, the same wherever they are computed: blocks of ROWS rows of LANES elements; in
   a block a sum per lane, row after row, then the upper half of the lanes onto the lower until one is left; then the
   blocks' sums, one after the other. */
#include "magnitude.h"

#define ROWS 64
#define LANES 1024

static inline float absolute(int32_t bits) {
    bits &= 0x7fffffff;
    float value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

static inline double fold(double *lanes) {
    for (int width = LANES / 2; width; width /= 2)
        for (int lane = 0; lane < width; lane++)
            lanes[lane] += lanes[width + lane];
    return lanes[0];
}

#define SUM_IN_BLOCKS(term)                                                                                            \
    double total = 0;                                                                                                  \
    for (int64_t block = 0; block < numel; block += ROWS * LANES) {                                                    \
        double lanes[LANES] = {0};                                                                                     \
        int64_t stop = numel - block < ROWS * LANES ? numel : block + ROWS * LANES;                                    \
        int64_t row = block;                                                                                           \
        for (; row + LANES <= stop; row += LANES)                                                                      \
            for (int lane = 0; lane < LANES; lane++) {                                                                 \
                int32_t bits = x[row + lane];                                                                          \
                lanes[lane] += (term);                                                                                 \
            }                                                                                                          \
        for (int lane = 0; row + lane < stop; lane++) {                                                                \
            int32_t bits = x[row + lane];                                                                              \
            lanes[lane] += (term);                                                                                     \
        }                                                                                                              \
        total += fold(lanes);                                                                                          \
    }                                                                                                                  \
    return total

double sum_of_squares(const int32_t *x, int64_t numel) {
    SUM_IN_BLOCKS((double)absolute(bits) * (double)absolute(bits));
}

/* Of the magnitudes that reach the bound, a magnitude at most INFINITE. */
double sum_of_magnitudes(const int32_t *x, int64_t numel, int32_t bound) {
    SUM_IN_BLOCKS((bits & 0x7fffffff) >= bound ? (double)absolute(bits) : 0.0);
}

/* As magnitudes are: NaN counts as infinite; 0 of nothing. */
float largest_magnitude(const int32_t *x, int64_t numel) {
    int32_t largest = 0;
    for (int64_t i = 0; i < numel; i++) {
        int32_t other = x[i] & 0x7fffffff;
        largest = other > largest ? other : largest;
    }
    return absolute(magnitude(largest));
}

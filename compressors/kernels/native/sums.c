/* Sums, in fp64, and extremes of the magnitudes of x, fp32 [numel]. */
#include "sums.h"

/* Returns the sum of min(|x|, limit)^2. */
double sum_of_squares(const float *x, int64_t numel, float limit) {
    return sum_of(x, numel, square_term, limit);
}

/* Returns the sum of min(|x|, limit). */
double sum_of_limited(const float *x, int64_t numel, float limit) {
    return sum_of(x, numel, limited_term, limit);
}

/* Returns the largest |x|, 0 if numel is 0; NaN counts as infinite. */
float largest_magnitude(const float *x, int64_t numel) {
    int32_t largest = magnitude(largest_bits(x, numel, 0));
    float value;
    __builtin_memcpy(&value, &largest, sizeof value);
    return value;
}

/* Writes the smallest and the largest |x| to range, fp32 [2]; numel must be at least 1. */
void magnitude_range(const float *x, int64_t numel, float *range) {
    int32_t smallest = INFINITE, largest = magnitude(largest_bits(x, numel, 0));
    for (int64_t i = 0; i < numel; i++) {
        int32_t other = magnitude_bits(x[i]);
        smallest = other < smallest ? other : smallest;
    }
    __builtin_memcpy(range, &smallest, sizeof *range);
    __builtin_memcpy(range + 1, &largest, sizeof *range);
}

static inline __attribute__((always_inline)) double sum_and_largest(
    const float *x, int64_t numel, sum_term term, float *out) {
    struct folded_sum pending = {.counts = {0}};
    int32_t largest = 0;
    for (int64_t start = 0; start < numel; start += SUM_STRETCH) {
        int64_t width = numel - start < SUM_STRETCH ? numel - start : SUM_STRETCH;
        largest = largest_bits(x + start, width, largest);
        push_sum(&pending, stretch_sum(x + start, width, term, __builtin_inff()));
    }
    largest = magnitude(largest);
    __builtin_memcpy(out, &largest, sizeof *out);
    return finish_sum(&pending);
}

/* These two return the sum of |x|, or of x^2, and set `largest` to the largest |x|, in one pass. */
double magnitudes_and_largest(const float *x, int64_t numel, float *largest) {
    return sum_and_largest(x, numel, limited_term, largest);
}

double squares_and_largest(const float *x, int64_t numel, float *largest) {
    return sum_and_largest(x, numel, square_term, largest);
}

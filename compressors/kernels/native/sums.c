/* Sums over all elements, and the largest of them. */
#include "sums.h"

/* Of min(|x|, limit)^2. */
double sum_of_squares(const float *x, int64_t numel, float limit) {
    return sum_of(x, numel, square_term, limit);
}

/* Of min(|x|, limit). */
double sum_of_limited(const float *x, int64_t numel, float limit) {
    return sum_of(x, numel, limited_term, limit);
}

/* Of the magnitudes that reach a level. */
double sum_of_reaching(const float *x, int64_t numel, float level) {
    return sum_of(x, numel, reaching_term, level);
}

/* As magnitudes are: NaN counts as infinite; 0 of nothing. */
float largest_magnitude(const int32_t *x, int64_t numel) {
    int32_t largest = 0;
    for (int64_t i = 0; i < numel; i++) {
        int32_t other = x[i] & 0x7fffffff;
        largest = other > largest ? other : largest;
    }
    largest = magnitude(largest);
    float value;
    __builtin_memcpy(&value, &largest, sizeof value);
    return value;
}

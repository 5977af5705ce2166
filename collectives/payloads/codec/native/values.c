/* Values in the type they travel in: rounded to it, added in it, put where they belong. */
#include "floats.h"

#define AHEAD 32 /* entries: so long does memory take to answer */

void round_to_bf16(const float *x, int64_t count, float limit, uint16_t *out) {
    for (int64_t i = 0; i < count; i++)
        out[i] = to_bf16(limited(x[i], limit));
}

void round_to_fp16(const float *x, int64_t count, float limit, uint16_t *out) {
    for (int64_t i = 0; i < count; i++)
        out[i] = to_fp16(limited(x[i], limit));
}

void sum_bf16(const uint16_t *a, const uint16_t *b, int64_t count, float limit, uint16_t *out) {
    for (int64_t i = 0; i < count; i++)
        out[i] = to_bf16(limited(from_bf16(a[i]) + from_bf16(b[i]), limit));
}

void sum_fp16(const uint16_t *a, const uint16_t *b, int64_t count, float limit, uint16_t *out) {
    for (int64_t i = 0; i < count; i++)
        out[i] = to_fp16(limited(from_fp16(a[i]) + from_fp16(b[i]), limit));
}

static inline float value_at(const void *values, int64_t i, int64_t bf16, int64_t nbytes) {
    if (nbytes == 4)
        return ((const float *)values)[i];
    uint16_t half = ((const uint16_t *)values)[i];
    return bf16 ? from_bf16(half) : from_fp16(half);
}

static inline __attribute__((always_inline)) int64_t add_values_at(
    const void *values, int64_t bf16, int64_t nbytes, const int64_t *positions, int64_t count, float divisor,
    float *dense, int64_t numel) {
    int64_t outside = 0;
    for (int64_t i = 0; i < count; i++)
        outside |= positions[i] < 0 || positions[i] >= numel;
    if (outside)
        return 0;
    for (int64_t i = 0; i < count; i++) {
        if (i + AHEAD < count)
            __builtin_prefetch(dense + positions[i + AHEAD], 1);
        dense[positions[i]] += value_at(values, i, bf16, nbytes) / divisor;
    }
    return 1;
}

/* dense[positions] += values / divisor. Returns 0, having changed nothing, where a position lies outside. */
int64_t add_fp32_at(
    const float *values, const int64_t *positions, int64_t count, float divisor, float *dense, int64_t numel) {
    return add_values_at(values, 0, 4, positions, count, divisor, dense, numel);
}

int64_t add_fp16_at(
    const uint16_t *values, const int64_t *positions, int64_t count, float divisor, float *dense, int64_t numel) {
    return add_values_at(values, 0, 2, positions, count, divisor, dense, numel);
}

int64_t add_bf16_at(
    const uint16_t *values, const int64_t *positions, int64_t count, float divisor, float *dense, int64_t numel) {
    return add_values_at(values, 1, 2, positions, count, divisor, dense, numel);
}

/* Values in the type they travel in: rounded to it, added in it, put where they belong. */
#include "floats.h"
#include "past_cache.h"

#define AHEAD 32 /* entries: so long does memory take to answer */

void round_to_bf16(const float *x, int64_t count, float limit, uint16_t *out) {
    for (int64_t i = 0; i < count; i++)
        out[i] = to_bf16(limited(x[i], limit));
}

void round_to_fp16(const float *x, int64_t count, float limit, uint16_t *out) {
    for (int64_t i = 0; i < count; i++)
        out[i] = to_fp16(limited(x[i], limit));
}

/* out = values / divisor */
void write_values(const void *values, int64_t kind, int64_t count, float divisor, float *out) {
    _Alignas(64) float wide[AT_ONCE];
    int64_t width = before_aligned(out); /* all others start aligned */
    for (int64_t first = 0; first < count; first += width, width = AT_ONCE) {
        width = count - first < width ? count - first : width;
        widen(values, kind, first, width, wide);
        divide(wide, width, divisor);
        copy_part(wide, width, count, out + first);
    }
    finish_past_cache();
}

void sum_bf16(const uint16_t *a, const uint16_t *b, int64_t count, float limit, uint16_t *out) {
    for (int64_t i = 0; i < count; i++)
        out[i] = to_bf16(limited(from_bf16(a[i]) + from_bf16(b[i]), limit));
}

void sum_fp16(const uint16_t *a, const uint16_t *b, int64_t count, float limit, uint16_t *out) {
    for (int64_t i = 0; i < count; i++)
        out[i] = to_fp16(limited(from_fp16(a[i]) + from_fp16(b[i]), limit));
}

/* Declares NAME: whether any value is not zero, plus 2 where any is -0.0. */
#define SURVEY(NAME, TYPE, MINUS_ZERO)                                                                                 \
    int64_t NAME(const TYPE *values, int64_t count) {                                                                  \
        TYPE any = 0;                                                                                                  \
        int minus = 0;                                                                                                 \
        for (int64_t i = 0; i < count; i++) {                                                                          \
            any |= (TYPE)(values[i] << 1);                                                                             \
            minus |= values[i] == MINUS_ZERO;                                                                          \
        }                                                                                                              \
        return (any != 0) | minus << 1;                                                                                \
    }

SURVEY(survey_fp32, uint32_t, 0x80000000)
SURVEY(survey_halves, uint16_t, 0x8000)

static inline __attribute__((always_inline)) int64_t add_values_at(
    const void *values, int64_t kind, const int64_t *positions, int64_t count, float divisor, float *dense,
    int64_t numel) {
    int64_t outside = 0;
    for (int64_t i = 0; i < count; i++)
        outside |= positions[i] < 0 || positions[i] >= numel;
    if (outside)
        return 0;
    float wide[AT_ONCE];
    for (int64_t first = 0; first < count; first += AT_ONCE) {
        int64_t stop = count - first < AT_ONCE ? count : first + AT_ONCE;
        widen(values, kind, first, stop - first, wide);
        for (int64_t i = 0; i < stop - first; i++)
            wide[i] /= divisor;
        for (int64_t i = first; i < stop; i++) {
            if (i + AHEAD < count)
                __builtin_prefetch(dense + positions[i + AHEAD], 1);
            dense[positions[i]] += wide[i - first];
        }
    }
    return 1;
}

/* dense[positions] += values / divisor. Returns 0, having changed nothing, where a position lies outside. */
int64_t add_fp32_at(
    const float *values, const int64_t *positions, int64_t count, float divisor, float *dense, int64_t numel) {
    return add_values_at(values, FP32, positions, count, divisor, dense, numel);
}

int64_t add_fp16_at(
    const uint16_t *values, const int64_t *positions, int64_t count, float divisor, float *dense, int64_t numel) {
    return add_values_at(values, FP16, positions, count, divisor, dense, numel);
}

int64_t add_bf16_at(
    const uint16_t *values, const int64_t *positions, int64_t count, float divisor, float *dense, int64_t numel) {
    return add_values_at(values, BF16, positions, count, divisor, dense, numel);
}

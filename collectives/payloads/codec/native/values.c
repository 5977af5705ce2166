/* Rounding, addition and scattering of values in the dtypes in which they are sent. */
#include "floats.h"
#include "nontemporal.h"

#define SCATTER_PREFETCH 32 /* entries; this far ahead, a prefetch hides the latency of memory */

/* out = x clamped to +-limit and rounded to bf16, or to fp16 in the next function; x: fp32 [count]. */
void round_to_bf16(const float *x, int64_t count, float limit, uint16_t *out) {
    for (int64_t i = 0; i < count; i++)
        out[i] = to_bf16(clamped(x[i], limit));
}

void round_to_fp16(const float *x, int64_t count, float limit, uint16_t *out) {
    for (int64_t i = 0; i < count; i++)
        out[i] = to_fp16(clamped(x[i], limit));
}

/* out = values / divisor, fp32 [count]; values: fp32, fp16 or bf16 [count], as `dtype` says. */
void write_values(const void *values, int64_t dtype, int64_t count, float divisor, float *out) {
    _Alignas(64) float wide[VALUE_CHUNK];
    int64_t width = numel_before_aligned(out); /* aligns all later chunks */
    for (int64_t first = 0; first < count; first += width, width = VALUE_CHUNK) {
        width = count - first < width ? count - first : width;
        widen(values, dtype, first, width, wide);
        divide(wide, width, divisor);
        copy_chunk(wide, width, count, out + first);
    }
    fence_nontemporal_stores();
}

/* out = a + b in fp32, clamped to +-limit and rounded to bf16, or fp16 in the next function; all [count]. */
void sum_bf16(const uint16_t *a, const uint16_t *b, int64_t count, float limit, uint16_t *out) {
    for (int64_t i = 0; i < count; i++)
        out[i] = to_bf16(clamped(from_bf16(a[i]) + from_bf16(b[i]), limit));
}

void sum_fp16(const uint16_t *a, const uint16_t *b, int64_t count, float limit, uint16_t *out) {
    for (int64_t i = 0; i < count; i++)
        out[i] = to_fp16(clamped(from_fp16(a[i]) + from_fp16(b[i]), limit));
}

/* Defines NAME: returns 1 if any value is not zero, plus 2 if any is -0.0. values: the bits of floats, [count]. */
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
    const void *values, int64_t dtype, const int64_t *positions, int64_t count, float divisor, float *dense,
    int64_t numel) {
    int64_t outside = 0;
    for (int64_t i = 0; i < count; i++)
        outside |= positions[i] < 0 || positions[i] >= numel;
    if (outside)
        return 0;
    float wide[VALUE_CHUNK];
    for (int64_t first = 0; first < count; first += VALUE_CHUNK) {
        int64_t stop = count - first < VALUE_CHUNK ? count : first + VALUE_CHUNK;
        widen(values, dtype, first, stop - first, wide);
        for (int64_t i = 0; i < stop - first; i++)
            wide[i] /= divisor;
        for (int64_t i = first; i < stop; i++) {
            if (i + SCATTER_PREFETCH < count)
                __builtin_prefetch(dense + positions[i + SCATTER_PREFETCH], 1);
            dense[positions[i]] += wide[i - first];
        }
    }
    return 1;
}

/* dense[positions[i]] += values[i] / divisor for i < count; positions: int64 [count]; dense: fp32 [numel]. Returns 1;
   or 0, with `dense` unchanged, if a position is out of range. */
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

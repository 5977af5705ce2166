/* Addition of gradient and residual, fused with a measurement of the sum: one pass over memory. */
#include "../../../collectives/payloads/codec/native/set_bits.h"
#include "sum_by_blocks.h"
#include "sums.h"

struct measure_context {
    struct folded_sum pending;
    int32_t largest;
};

static inline void measure_block(float *x, int64_t start, int64_t width, void *context) {
    struct measure_context *measured = context;
    (void)start;
    measured->largest = largest_bits(x, width, measured->largest);
    push_sum(&measured->pending, stretch_sum(x, width, limited_term, __builtin_inff()));
}

/* sum = gradient + residual, fp32 [numel]. Returns the sum of |sum|, in fp64; largest: the largest |sum|, where NaN
   counts as infinite. */
double add_and_measure(const float *gradient, const float *residual, int64_t numel, float *largest, float *sum) {
    struct measure_context measured = {.pending.counts = {0}, .largest = 0};
    sum_by_blocks(gradient, residual, numel, SUM_STRETCH, measure_block, &measured, sum);
    int32_t bits = magnitude(measured.largest);
    __builtin_memcpy(largest, &bits, sizeof *largest);
    return finish_sum(&measured.pending);
}

struct find_context {
    struct folded_sum pending;
    int32_t bound;
    int64_t capacity, count, missing;
    int64_t *positions;
    float *values;
};

static inline void find_in_block(float *x, int64_t start, int64_t width, void *context) {
    struct find_context *found = context;
    int64_t before = found->count, count = before;
    push_sum(&found->pending, stretch_sum(x, width, square_term, __builtin_inff()));
    for (int64_t i = 0; i < width; i += 64) {
        uint64_t mask = reaching_mask_64((const int32_t *)x + i, width - i, found->bound);
        if (count + __builtin_popcountll(mask) > found->capacity)
            found->missing += __builtin_popcountll(mask);
        else
            count = write_set_bits(mask, start + i, found->capacity, count, found->positions);
    }
    for (int64_t i = before; i < count; i++)
        found->values[i] = x[found->positions[i] - start];
    found->count = count;
}

/* sum = gradient + residual, fp32 [numel]; squares: its sum of squares. Writes positions, int64 [capacity], ascending,
   and values, fp32 [capacity], of the entries whose magnitude has bits >= bound. Returns their number; if it exceeds
   `capacity`, some are missing. */
int64_t add_and_find(
    const float *gradient, const float *residual, int64_t numel, int32_t bound, int64_t capacity, int64_t *positions,
    float *values, double *squares, float *sum) {
    struct find_context found = {
        .pending.counts = {0}, .bound = bound, .capacity = capacity, .positions = positions, .values = values};
    sum_by_blocks(gradient, residual, numel, SUM_STRETCH, find_in_block, &found, sum);
    *squares = finish_sum(&found.pending);
    return found.count + found.missing;
}

/* Gradient and residual added, and what is to be known of the sum, found while it is at hand: one pass over memory. */
#include "../../../collectives/payloads/codec/native/set_bits.h"
#include "sum_by_blocks.h"
#include "sums.h"

struct measuring {
    struct folding waiting;
    int32_t largest;
};

static inline void measure_block(float *x, int64_t start, int64_t width, void *context) {
    struct measuring *measured = context;
    (void)start;
    measured->largest = larger(x, width, measured->largest);
    add_sum(&measured->waiting, stretch_sum(x, width, limited_term, __builtin_inff()));
}

/* sum = gradient + residual. Returns the sum of its magnitudes; `largest`: of them, where NaN counts as infinite. */
double add_and_measure(const float *gradient, const float *residual, int64_t numel, float *largest, float *sum) {
    struct measuring measured = {.waiting.counts = {0}, .largest = 0};
    sum_by_blocks(gradient, residual, numel, SUM_STRETCH, measure_block, &measured, sum);
    int32_t most = magnitude(measured.largest);
    __builtin_memcpy(largest, &most, sizeof *largest);
    return finished(&measured.waiting);
}

struct finding {
    struct folding waiting;
    int32_t bound;
    int64_t room, count, missing;
    int64_t *positions;
    float *values;
};

static inline void find_in_block(float *x, int64_t start, int64_t width, void *context) {
    struct finding *found = context;
    int64_t before = found->count, count = before;
    add_sum(&found->waiting, stretch_sum(x, width, square_term, __builtin_inff()));
    for (int64_t i = 0; i < width; i += 64) {
        uint64_t mask = reaching_of_64((const int32_t *)x + i, width - i, found->bound);
        if (count + __builtin_popcountll(mask) > found->room)
            found->missing += __builtin_popcountll(mask);
        else
            count = write_set_bits(mask, start + i, found->room, count, found->positions);
    }
    for (int64_t i = before; i < count; i++)
        found->values[i] = x[found->positions[i] - start];
    found->count = count;
}

/* The same; `squares`: the sum of their squares. positions: int64 [room], ascending, of those that reach the bound, and
   values: what is there. Returns how many there are; where they are more than `room`, some are missing. */
int64_t add_and_find(
    const float *gradient, const float *residual, int64_t numel, int32_t bound, int64_t room, int64_t *positions,
    float *values, double *squares, float *sum) {
    struct finding found = {
        .waiting.counts = {0}, .bound = bound, .room = room, .positions = positions, .values = values};
    sum_by_blocks(gradient, residual, numel, SUM_STRETCH, find_in_block, &found, sum);
    *squares = finished(&found.waiting);
    return found.count + found.missing;
}

/* Gradient and residual added, and what is to be known of the sum, found while it is at hand: one pass over memory. */
#include "../../../collectives/payloads/codec/native/past_cache.h"
#include "../../../collectives/payloads/codec/native/set_bits.h"
#include "sums.h"

static inline void add_stretch(const float *gradient, const float *residual, int64_t width, float *x) {
    for (int64_t i = 0; i < width; i++)
        x[i] = gradient[i] + residual[i];
}

/* sum = gradient + residual. Returns the sum of its magnitudes; `largest`: of them, where NaN counts as infinite. */
double add_and_measure(const float *gradient, const float *residual, int64_t numel, float *largest, float *sum) {
    struct folding waiting = {.counts = {0}};
    _Alignas(64) float x[SUM_STRETCH];
    int32_t most = 0;
    for (int64_t start = 0; start < numel; start += SUM_STRETCH) {
        int64_t width = numel - start < SUM_STRETCH ? numel - start : SUM_STRETCH;
        add_stretch(gradient + start, residual + start, width, x);
        most = larger(x, width, most);
        add_sum(&waiting, stretch_sum(x, width, limited_term, __builtin_inff()));
        copy_part(x, width, numel, sum + start);
    }
    finish_past_cache();
    most = magnitude(most);
    __builtin_memcpy(largest, &most, sizeof *largest);
    return finished(&waiting);
}

/* The same; `squares`: the sum of their squares. positions: int64 [room], ascending, of those that reach the bound, and
   values: what is there. Returns how many there are; where they are more than `room`, some are missing. */
int64_t add_and_find(
    const float *gradient, const float *residual, int64_t numel, int32_t bound, int64_t room, int64_t *positions,
    float *values, double *squares, float *sum) {
    struct folding waiting = {.counts = {0}};
    _Alignas(64) float x[SUM_STRETCH];
    int64_t count = 0, missing = 0;
    for (int64_t start = 0; start < numel; start += SUM_STRETCH) {
        int64_t width = numel - start < SUM_STRETCH ? numel - start : SUM_STRETCH, before = count;
        add_stretch(gradient + start, residual + start, width, x);
        add_sum(&waiting, stretch_sum(x, width, square_term, __builtin_inff()));
        for (int64_t i = 0; i < width; i += 64) {
            uint64_t mask = reaching_of_64((const int32_t *)x + i, width - i, bound);
            if (count + __builtin_popcountll(mask) > room)
                missing += __builtin_popcountll(mask);
            else
                count = write_set_bits(mask, start + i, room, count, positions);
        }
        for (int64_t i = before; i < count; i++)
            values[i] = x[positions[i] - start];
        copy_part(x, width, numel, sum + start);
    }
    finish_past_cache();
    *squares = finished(&waiting);
    return count + missing;
}

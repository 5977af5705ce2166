/* A part of gradient + residual to be sent from given positions; what is not sent stays. One pass. */
#include "../../../collectives/payloads/codec/native/floats.h"
#include "past_cache.h"

#define BLOCK 1024
#define LONG (1 << 22) /* from here on what is left is not read again before the caches have forgotten it */

enum { FP32, FP16, BF16 };

static inline float sent(float x, int64_t kind, float limit, void *values, int64_t i) {
    if (kind == FP32)
        return ((float *)values)[i] = x;
    uint16_t half = kind == FP16 ? to_fp16(limited(x, limit)) : to_bf16(limited(x, limit));
    ((uint16_t *)values)[i] = half;
    return kind == FP16 ? from_fp16(half) : from_bf16(half);
}

/* Of elements start..start+numel-1: values of those at `positions`, of `count` ascending ones from `next` on, and
   left = gradient + residual - values. Returns the `next` of the part that follows. */
int64_t send_at(
    const float *gradient, const float *residual, int64_t start, int64_t numel, const int64_t *positions, int64_t next,
    int64_t count, int64_t kind, float limit, void *values, float *left) {
    _Alignas(64) float x[BLOCK];
    for (int64_t from = 0; from < numel; from += BLOCK) {
        int64_t width = numel - from < BLOCK ? numel - from : BLOCK;
        int64_t first = start + from;
        for (int64_t i = 0; i < width; i++)
            x[i] = gradient[from + i] + residual[from + i];
        for (; next < count && positions[next] < first + width; next++) {
            float *element = x + (positions[next] - first);
            *element -= sent(*element, kind, limit, values, next);
        }
        if (numel >= LONG)
            copy_past_cache(x, width, left + from);
        else
            for (int64_t i = 0; i < width; i++)
                left[from + i] = x[i];
    }
    finish_past_cache();
    return next;
}

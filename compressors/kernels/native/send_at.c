/* A part of gradient + residual to be sent from given positions; what is not sent stays. One pass. */
#include "../../../collectives/payloads/codec/native/floats.h"
#include "../../../collectives/payloads/codec/native/past_cache.h"

static inline float sent(float x, int64_t kind, float limit, void *values, int64_t i) {
    if (kind == FP32)
        return ((float *)values)[i] = x;
    uint16_t half = kind == FP16 ? to_fp16(limited(x, limit)) : to_bf16(limited(x, limit));
    ((uint16_t *)values)[i] = half;
    return kind == FP16 ? from_fp16(half) : from_bf16(half);
}

static inline vector sum_of(const float *gradient, const float *residual) {
    vector a, b;
    __builtin_memcpy(&a, gradient, sizeof a);
    __builtin_memcpy(&b, residual, sizeof b);
    return a + b;
}

static inline void put(vector x, int past_cache, float *left) {
    if (past_cache)
        store_past_cache(x, left);
    else
        __builtin_memcpy(left, &x, sizeof x);
}

/* Of elements start..start+numel-1: values of those at `positions`, of `count` ascending ones from `next` on, and
   left = gradient + residual - values. Returns the `next` of the part that follows. */
int64_t send_at(
    const float *gradient, const float *residual, int64_t start, int64_t numel, const int64_t *positions, int64_t next,
    int64_t count, int64_t kind, float limit, void *values, float *left) {
    int past_cache = numel >= LONG && is_aligned(left);
    int64_t i = 0, whole = numel - numel % VECTOR;
    while (i < whole) {
        int64_t line = next < count ? (positions[next] - start) / VECTOR * VECTOR : whole; /* of which is sent next */
        for (; i < whole && i < line; i += VECTOR)
            put(sum_of(gradient + i, residual + i), past_cache, left + i);
        if (i == whole)
            break;
        vector x = sum_of(gradient + i, residual + i);
        for (; next < count && positions[next] - start < i + VECTOR; next++)
            x[positions[next] - start - i] -= sent(x[positions[next] - start - i], kind, limit, values, next);
        put(x, past_cache, left + i);
        i += VECTOR;
    }
    for (; i < numel; i++) {
        left[i] = gradient[i] + residual[i];
        if (next < count && positions[next] - start == i) {
            left[i] -= sent(left[i], kind, limit, values, next);
            next++;
        }
    }
    finish_past_cache();
    return next;
}

/* A part of gradient + residual to be sent from given positions; what is not sent stays. One pass. */
#include "../../../collectives/payloads/codec/native/floats.h"
#include "sum_by_blocks.h"

static inline float sent(float x, int64_t kind, float limit, void *values, int64_t i) {
    if (kind == FP32)
        return ((float *)values)[i] = x;
    uint16_t half = kind == FP16 ? to_fp16(limited(x, limit)) : to_bf16(limited(x, limit));
    ((uint16_t *)values)[i] = half;
    return kind == FP16 ? from_fp16(half) : from_bf16(half);
}

struct sending {
    int64_t first; /* number of this part's first element */
    const int64_t *positions;
    int64_t next, count; /* which of the positions come */
    int64_t kind;
    float limit;
    void *values;
};

/* In a loop of their own, entries are taken without a guess where the next one is. */
static inline void send_of_block(float *x, int64_t start, int64_t width, void *context) {
    struct sending *to = context;
    int64_t from = to->first + start;
    for (; to->next < to->count && to->positions[to->next] < from + width; to->next++) {
        float *entry = x + (to->positions[to->next] - from);
        *entry -= sent(*entry, to->kind, to->limit, to->values, to->next);
    }
}

/* Of elements start..start+numel-1: values of those at `positions`, of `count` ascending ones from `next` on, and
   left = gradient + residual - values. Returns the `next` of the part that follows. */
int64_t send_at(
    const float *gradient, const float *residual, int64_t start, int64_t numel, const int64_t *positions, int64_t next,
    int64_t count, int64_t kind, float limit, void *values, float *left) {
    struct sending to = {start, positions, next, count, kind, limit, values};
    sum_by_blocks(gradient, residual, numel, SHORT_BLOCK, send_of_block, &to, left);
    return to.next;
}

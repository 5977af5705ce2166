/* A part of gradient + residual to be sent from certain positions; what is not sent stays. One pass. */
#include "../../../collectives/payloads/codec/native/drawing.h"
#include "../../../collectives/payloads/codec/native/floats.h"
#include "../../../collectives/payloads/codec/native/set_bits.h"
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

struct listing {
    struct sending to; /* of which `count` grows */
    int64_t *positions;
    int64_t numel, room;
    const uint64_t *marks;
    uint64_t others; /* all ones where those that were not drawn are sent */
    const float *gradient;
};

/* A block's positions are listed, and its entries taken, while the elements that follow are on their way. */
static inline void send_drawn_of_block(float *x, int64_t start, int64_t width, void *context) {
    struct listing *drawn = context;
    for (int64_t i = start; i < start + width; i += 64) {
        for (int64_t j = i + width; j < i + width + 64; j += LINE)
            __builtin_prefetch(drawn->gradient + j);
        uint64_t word = drawn->marks[i / 64] ^ drawn->others;
        if (drawn->numel - i < 64)
            word &= (1ull << (drawn->numel - i)) - 1;
        drawn->to.count = write_set_bits(word, i, drawn->room, drawn->to.count, drawn->positions);
    }
    send_of_block(x, start, width, &drawn->to);
}

/* The same at `count` positions that a key draws, as `draw_positions` does, and lists. marks: as there. */
void send_drawn(
    const float *gradient, const float *residual, int64_t numel, int64_t count, uint64_t key, uint64_t *marks,
    int64_t *positions, int64_t kind, float limit, void *values, float *left) {
    int others = count > numel / 2;
    draw((uint32_t)numel, others ? numel - count : count, key, marks);
    struct listing drawn = {
        {0, positions, 0, 0, kind, limit, values}, positions, numel, count, marks, others ? ~0ull : 0,
        gradient};
    sum_by_blocks(gradient, residual, numel, SHORT_BLOCK, send_drawn_of_block, &drawn, left);
}

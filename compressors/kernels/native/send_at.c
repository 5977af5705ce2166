/* Encodes the entries of gradient + residual at given or random positions, and keeps the rest, in one pass. */
#include "../../../collectives/payloads/codec/native/drawing.h"
#include "../../../collectives/payloads/codec/native/floats.h"
#include "../../../collectives/payloads/codec/native/set_bits.h"
#include "sum_by_blocks.h"

/* Does the same as `encode_value` of encode_value.h, but keeps -0.0. */
static inline float encode_keeping_zero_sign(float x, int64_t dtype, float limit, void *values, int64_t i) {
    if (dtype == FP32)
        return ((float *)values)[i] = x;
    uint16_t half = dtype == FP16 ? to_fp16(clamped(x, limit)) : to_bf16(clamped(x, limit));
    ((uint16_t *)values)[i] = half;
    return dtype == FP16 ? from_fp16(half) : from_bf16(half);
}

struct send_context {
    int64_t first; /* position of element 0 */
    const int64_t *positions;
    int64_t next, count; /* next: index of the next position to send */
    int64_t dtype;
    float limit;
    void *values;
};

/* One loop over the positions: a test of every element would be mispredicted at each position. */
static inline void send_in_block(float *x, int64_t start, int64_t width, void *context) {
    struct send_context *send = context;
    int64_t block_start = send->first + start;
    for (; send->next < send->count && send->positions[send->next] < block_start + width; send->next++) {
        float *entry = x + (send->positions[send->next] - block_start);
        *entry -= encode_keeping_zero_sign(*entry, send->dtype, send->limit, send->values, send->next);
    }
}

/* Writes the entries of x = gradient + residual at `positions` to `values`, in `dtype`, clamped to +-limit, and the
   rest of x to `left`, fp32 [numel]. gradient, residual and left are parts of longer tensors, from element `start` on;
   positions, int64 [count], ascending, and values are those of the whole. next: index of the first position in this
   part. Returns that of the next part. */
int64_t send_at(
    const float *gradient, const float *residual, int64_t start, int64_t numel, const int64_t *positions, int64_t next,
    int64_t count, int64_t dtype, float limit, void *values, float *left) {
    struct send_context send = {start, positions, next, count, dtype, limit, values};
    sum_by_blocks(gradient, residual, numel, SHORT_BLOCK, send_in_block, &send, left);
    return send.next;
}

struct drawn_context {
    struct send_context send; /* its `count` grows as positions are found */
    int64_t *positions;
    int64_t numel, capacity;
    const uint64_t *marks;
    uint64_t inversion; /* all ones to send the elements that were not drawn */
    const float *gradient;
};

/* Finds the positions in a block and sends its entries, while prefetching the gradient of the next block. */
static inline void send_drawn_in_block(float *x, int64_t start, int64_t width, void *context) {
    struct drawn_context *drawn = context;
    for (int64_t i = start; i < start + width; i += 64) {
        for (int64_t j = i + width; j < i + width + 64; j += CACHE_LINE)
            __builtin_prefetch(drawn->gradient + j);
        uint64_t word = drawn->marks[i / 64] ^ drawn->inversion;
        if (drawn->numel - i < 64)
            word &= (1ull << (drawn->numel - i)) - 1;
        drawn->send.count = write_set_bits(word, i, drawn->capacity, drawn->send.count, drawn->positions);
    }
    send_in_block(x, start, width, &drawn->send);
}

/* Does the work of `send_at` for all elements at `count` random positions, and writes these to positions, int64
   [count]. key, marks: see `draw_positions`. */
void send_drawn(
    const float *gradient, const float *residual, int64_t numel, int64_t count, uint64_t key, uint64_t *marks,
    int64_t *positions, int64_t dtype, float limit, void *values, float *left) {
    int complement = count > numel / 2;
    draw_distinct((uint32_t)numel, complement ? numel - count : count, key, marks);
    struct drawn_context drawn = {
        {0, positions, 0, 0, dtype, limit, values}, positions, numel, count, marks, complement ? ~0ull : 0,
        gradient};
    sum_by_blocks(gradient, residual, numel, SHORT_BLOCK, send_drawn_in_block, &drawn, left);
}

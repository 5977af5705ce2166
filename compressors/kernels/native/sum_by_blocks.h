/* Gradient and residual added a block at a time, and what is to be done with the sum done while a block is at hand. */
#ifndef SUM_BY_BLOCKS_H
#define SUM_BY_BLOCKS_H

#include "../../../collectives/payloads/codec/native/past_cache.h"

#define MOST 1024       /* elements of a block */
#define SHORT_BLOCK 512 /* for work that needs no more at once: it is at hand sooner */

/* What is done with elements start..start+width-1; it may change them. */
typedef void (*block_work)(float *x, int64_t start, int64_t width, void *context);

/* Blocks of `block` elements, at most MOST. One leaves in the loop in which the next one comes. */
static inline __attribute__((always_inline)) void sum_by_blocks(
    const float *gradient, const float *residual, int64_t numel, int64_t block, block_work work, void *context,
    float *sum) {
    _Alignas(64) float x[MOST] = {0};
    int64_t width = numel < block ? numel : block;
    int past_cache = numel >= LONG;
    replace_by_sum(gradient, residual, width, x, past_cache, sum); /* zeros leave, whose place the first block takes */
    for (int64_t start = 0, following; start < numel; start += width, width = following) {
        int64_t next = start + width, rest = numel - next;
        work(x, start, width, context);
        following = rest < width ? rest : width;
        replace_by_sum(gradient + next, residual + next, following, x, past_cache, sum + start);
        copy_part(x + following, width - following, numel, sum + start + following);
    }
    finish_past_cache();
}

#endif

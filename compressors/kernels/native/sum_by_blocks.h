/* Addition of gradient and residual by blocks, with a callback for each block while it is in the cache. */
#ifndef SUM_BY_BLOCKS_H
#define SUM_BY_BLOCKS_H

#include "../../../collectives/payloads/codec/native/nontemporal.h"

#define MAX_BLOCK 1024  /* elements */
#define SHORT_BLOCK 512 /* for callbacks that work as well on shorter blocks, which are ready sooner */

/* Processes elements start..start+width-1, which are in x; may change them. */
typedef void (*block_callback)(float *x, int64_t start, int64_t width, void *context);

/* Adds by blocks of `block` <= MAX_BLOCK elements. A block is written to `sum` in the loop that loads the next one. */
static inline __attribute__((always_inline)) void sum_by_blocks(
    const float *gradient, const float *residual, int64_t numel, int64_t block, block_callback callback, void *context,
    float *sum) {
    _Alignas(64) float x[MAX_BLOCK] = {0};
    int64_t width = numel < block ? numel : block;
    int nontemporal = numel >= NONTEMPORAL_MIN_NUMEL;
    flush_and_add(gradient, residual, width, x, nontemporal, sum); /* writes zeros, overwritten by the first block */
    for (int64_t start = 0, next_width; start < numel; start += width, width = next_width) {
        int64_t next = start + width, remaining = numel - next;
        callback(x, start, width, context);
        next_width = remaining < width ? remaining : width;
        flush_and_add(gradient + next, residual + next, next_width, x, nontemporal, sum + start);
        copy_chunk(x + next_width, width - next_width, numel, sum + start + next_width);
    }
    fence_nontemporal_stores();
}

#endif

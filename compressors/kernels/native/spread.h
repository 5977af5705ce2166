/* A stretch of elements, and what divides them to be relative to the scale of their block. */
#ifndef SPREAD_H
#define SPREAD_H

#include <stdint.h>

#include "packing.h"

struct stretch {
    const float *x; /* [STRETCH] */
    float divisor;
};

/* Elements start..start+width-1, in x: there, if they fill a stretch within one block; else, divided and filled up with
   zeros, in `room`. */
static inline struct stretch stretch_of(
    const float *x, const float *divisors, int64_t block_numel, int64_t start, int64_t width, float *room) {
    int64_t block = start / block_numel, end = (block + 1) * block_numel - start;
    if (width == STRETCH && end >= STRETCH)
        return (struct stretch){x, divisors[block]};
    __builtin_memset(room, 0, STRETCH * sizeof *room);
    for (int64_t i = 0; i < width; i++) {
        if (i == end) {
            block++;
            end += block_numel;
        }
        room[i] = x[i] / divisors[block];
    }
    return (struct stretch){room, 1};
}

#endif

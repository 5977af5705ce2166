/* A stretch of elements over the scales of their blocks. */
#ifndef SPREAD_H
#define SPREAD_H

#include <stdint.h>

#include "packing.h"

/* out[i] = x[start + i] / divisors[its block] for i < width, 0 for the rest of the stretch. */
static inline void quotients(
    const float *x, const float *divisors, int64_t block_numel, int64_t start, int64_t width, float *out) {
    int64_t block = start / block_numel, end = (block + 1) * block_numel - start;
    if (width == STRETCH && end >= STRETCH) {
        for (int64_t i = 0; i < STRETCH; i++)
            out[i] = x[start + i] / divisors[block];
        return;
    }
    __builtin_memset(out, 0, STRETCH * sizeof *out);
    for (int64_t i = 0; i < width; i++) {
        if (i == end) {
            block++;
            end += block_numel;
        }
        out[i] = x[start + i] / divisors[block];
    }
}

#endif

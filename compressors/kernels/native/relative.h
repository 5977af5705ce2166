/* Elements relative to the scale of their block, in chunks. */
#ifndef RELATIVE_H
#define RELATIVE_H

#include <stdint.h>

#include "packing.h"

struct relative_chunk {
    const float *x; /* [CHUNK]; element i relative to its scale is x[i] / divisor */
    float divisor;
};

/* Returns elements start..start+width-1, given in x. If they are not a whole chunk within one block, they are divided
   by their divisors and padded with zeros in `divided`. */
static inline struct relative_chunk relative_to_blocks(
    const float *x, const float *divisors, int64_t block_numel, int64_t start, int64_t width, float *divided) {
    int64_t block = start / block_numel, end = (block + 1) * block_numel - start;
    if (width == CHUNK && end >= CHUNK)
        return (struct relative_chunk){x, divisors[block]};
    __builtin_memset(divided, 0, CHUNK * sizeof *divided);
    for (int64_t i = 0; i < width; i++) {
        if (i == end) {
            block++;
            end += block_numel;
        }
        divided[i] = x[i] / divisors[block];
    }
    return (struct relative_chunk){divided, 1};
}

#endif

/* Drawing of elements without replacement: the first distinct elements that a key's random numbers select. */
#ifndef DRAWING_H
#define DRAWING_H

#include "philox.h"

/* Sets the bits of the `count` drawn elements in marks, uint64 [ceil(numel / 64)], which must be zeros. */
static inline void draw_distinct(uint32_t numel, int64_t count, uint64_t key, uint64_t *marks) {
    if (!count)
        return;
    /* a product with a smaller low half is rejected: some elements would otherwise be more likely than others */
    uint32_t rejection_threshold = (uint32_t)((1ull << 32) % numel);
    uint32_t numbers[2][STRETCH];
    random_stretch(key, 0, numbers[0]);
    for (int64_t stretch = 0; count; stretch++) {
        uint32_t *current = numbers[stretch % 2], *next = numbers[(stretch + 1) % 2];
        random_stretch(key, stretch + 1, next);
        for (int i = 0; i < STRETCH && count; i++) {
            /* numbers of the next stretch are known early enough to prefetch their words of marks */
            __builtin_prefetch(marks + ((uint64_t)next[i] * numel >> 38), 1);
            uint64_t product = (uint64_t)current[i] * numel, position = product >> 32;
            uint64_t is_new = ((uint32_t)product >= rejection_threshold) & ~(marks[position >> 6] >> (position & 63));
            marks[position >> 6] |= is_new << (position & 63);
            count -= (int64_t)is_new;
        }
    }
}

#endif

/* Which elements are drawn without replacement: the first distinct ones that a key's random numbers name. */
#ifndef DRAWING_H
#define DRAWING_H

#include "philox.h"

/* `marks` [ceil(numel / 64)], zeros at first, has a bit for every element; afterwards those of the drawn are set. */
static inline void draw(uint32_t numel, int64_t count, uint64_t key, uint64_t *marks) {
    if (!count)
        return;
    uint32_t unfair = (uint32_t)((1ull << 32) % numel); /* so many of 2^32 numbers are too many to be shared out */
    uint32_t numbers[2][NUMBERS];
    random_stretch(key, 0, numbers[0]);
    for (int64_t stretch = 0; count; stretch++) {
        uint32_t *now = numbers[stretch % 2], *next = numbers[(stretch + 1) % 2];
        random_stretch(key, stretch + 1, next);
        for (int i = 0; i < NUMBERS && count; i++) {
            __builtin_prefetch(marks + ((uint64_t)next[i] * numel >> 38), 1);
            uint64_t product = (uint64_t)now[i] * numel, position = product >> 32;
            uint64_t is_new = ((uint32_t)product >= unfair) & ~(marks[position >> 6] >> (position & 63));
            marks[position >> 6] |= is_new << (position & 63);
            count -= (int64_t)is_new;
        }
    }
}

#endif

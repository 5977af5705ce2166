/* Conversion of a bitmask to positions. */
#ifndef SET_BITS_H
#define SET_BITS_H

#include <stdint.h>

/* Appends start + the index of each set bit to positions, which has `count` of at most `capacity` entries; returns the
   new count. Always writes two entries if there is room, because a branch on the number of bits is often
   mispredicted. */
static inline int64_t write_set_bits(
    uint64_t word, int64_t start, int64_t capacity, int64_t count, int64_t *positions) {
    int64_t new_count = count + __builtin_popcountll(word);
    if (count + 2 <= capacity)
        for (int i = 0; i < 2; i++, word &= word - 1)
            positions[count++] = start + __builtin_ctzll(word | 1ull << 63);
    for (; word; word &= word - 1)
        positions[count++] = start + __builtin_ctzll(word);
    return new_count;
}

#endif

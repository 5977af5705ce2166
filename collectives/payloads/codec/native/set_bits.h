/* The bits that are set in a word, as positions. */
#ifndef SET_BITS_H
#define SET_BITS_H

#include <stdint.h>

/* Writes them at positions[count] and after, counted from `start`; returns the new count, at most `room`. The first two
   are written without a branch on whether there are any, which nobody could foretell: most words hold none to two. */
static inline int64_t write_set_bits(uint64_t word, int64_t start, int64_t room, int64_t count, int64_t *positions) {
    int64_t after = count + __builtin_popcountll(word);
    if (count + 2 <= room)
        for (int i = 0; i < 2; i++, word &= word - 1)
            positions[count++] = start + __builtin_ctzll(word | 1ull << 63);
    for (; word; word &= word - 1)
        positions[count++] = start + __builtin_ctzll(word);
    return after;
}

#endif

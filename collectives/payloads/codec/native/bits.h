/* Unsigned integers of any width up to 32 bits, laid end to end, low bits first. */
#ifndef BITS_H
#define BITS_H

#include <stdint.h>

/* The i-th of them; nothing is read beyond `nbytes`. */
static inline uint64_t code_at(const uint8_t *packed, int64_t nbytes, int64_t i, int64_t bits) {
    int64_t byte = i * bits >> 3;
    uint64_t word = 0;
    if (nbytes - byte >= 8)
        __builtin_memcpy(&word, packed + byte, 8);
    else
        for (int64_t j = byte; j < nbytes; j++)
            word |= (uint64_t)packed[j] << 8 * (j - byte);
    return word >> (i * bits & 7) & ((1ull << bits) - 1);
}

/* The same of one that lies within four bytes: of the first `num_short_codes`, all of which are done at once. */
static inline uint32_t short_code_at(const uint8_t *packed, int64_t i, int64_t bits) {
    uint32_t word;
    __builtin_memcpy(&word, packed + (i * bits >> 3), 4);
    return word >> (i * bits & 7) & ((1u << bits) - 1);
}

static inline int64_t num_short_codes(int64_t nbytes, int64_t bits) {
    return bits < 1 || bits > 25 || nbytes < 4 ? 0 : 8 * (nbytes - 4) / bits;
}

#endif

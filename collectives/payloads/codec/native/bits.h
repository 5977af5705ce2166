/* Reading of packed codes: unsigned integers of 0..32 bits each, stored without gaps, low bits first. */
#ifndef BITS_H
#define BITS_H

#include <stdint.h>

/* Returns code i. Reads no byte beyond `nbytes`. */
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

typedef int64_t codes_4 __attribute__((vector_size(32)));

/* Returns how many codes `four_codes_at` can read, a multiple of 4: each four must lie in 8 bytes that all exist. */
static inline int64_t num_in_fours(int64_t count, int64_t nbytes, int64_t bits) {
    if (bits < 1 || 4 * bits + 7 > 64 || nbytes < 8)
        return 0;
    int64_t readable = 8 * (nbytes - 8) / bits;
    return (readable < count ? readable : count) & ~3ll;
}

/* Returns codes i..i+3. */
static inline codes_4 four_codes_at(const uint8_t *packed, int64_t i, int64_t bits) {
    typedef uint64_t words_4 __attribute__((vector_size(32)));
    uint64_t word;
    __builtin_memcpy(&word, packed + (i * bits >> 3), 8);
    words_4 all = (words_4){0} + (word >> (i * bits & 7)), shifts = (words_4){0, 1, 2, 3} * (uint64_t)bits;
    return (codes_4)(all >> shifts & (((uint64_t)1 << bits) - 1));
}

static inline void unpack_codes(const uint8_t *packed, int64_t count, int64_t bits, int64_t *codes) {
    int64_t nbytes = (count * bits + 7) / 8, in_fours = num_in_fours(count, nbytes, bits), i = 0;
    for (; i < in_fours; i += 4) {
        codes_4 four = four_codes_at(packed, i, bits);
        __builtin_memcpy(codes + i, &four, sizeof four);
    }
    for (; i < count; i++)
        codes[i] = (int64_t)code_at(packed, nbytes, i, bits);
}

#endif

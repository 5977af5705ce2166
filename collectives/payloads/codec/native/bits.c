/* Unsigned integers of any width up to 32 bits, laid end to end, low bits first. */
#include <stdint.h>

void pack_bits(const int64_t *codes, int64_t count, int64_t bits, uint8_t *packed) {
    uint64_t mask = (1ull << bits) - 1, waiting = 0;
    int64_t filled = 0;
    for (int64_t i = 0; i < count; i++) {
        waiting |= ((uint64_t)codes[i] & mask) << filled;
        filled += bits;
        if (filled >= 32) {
            __builtin_memcpy(packed, &waiting, 4);
            packed += 4;
            waiting >>= 32;
            filled -= 32;
        }
    }
    for (; filled > 0; filled -= 8, waiting >>= 8)
        *packed++ = (uint8_t)waiting;
}

void unpack_bits(const uint8_t *packed, int64_t count, int64_t bits, int64_t *codes) {
    uint64_t mask = (1ull << bits) - 1;
    int64_t nbytes = (count * bits + 7) / 8, i = 0;
    for (; bits && (i * bits >> 3) + 8 <= nbytes && i < count; i++) {
        uint64_t word;
        __builtin_memcpy(&word, packed + (i * bits >> 3), 8);
        codes[i] = (int64_t)(word >> (i * bits & 7) & mask);
    }
    for (; i < count; i++) { /* the last ones, where a whole word would reach beyond the end */
        uint64_t word = 0;
        for (int64_t byte = i * bits >> 3; byte < nbytes; byte++)
            word |= (uint64_t)packed[byte] << 8 * (byte - (i * bits >> 3));
        codes[i] = (int64_t)(word >> (i * bits & 7) & mask);
    }
}

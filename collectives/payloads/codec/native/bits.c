/* Unsigned integers of any width up to 32 bits, laid end to end, low bits first; and bitmaps. */
#include <stdint.h>

static inline int64_t smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}

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
    int64_t nbytes = (count * bits + 7) / 8;
    int64_t safe = nbytes < 8 ? 0 : smaller(count, ((nbytes - 8) * 8 + 7) / (bits ? bits : 1) + 1);
    for (int64_t i = 0; i < safe; i++) {
        uint64_t word;
        __builtin_memcpy(&word, packed + (i * bits >> 3), 8);
        codes[i] = (int64_t)(word >> (i * bits & 7) & mask);
    }
    for (int64_t i = safe; i < count; i++) { /* the last ones, where a whole word would reach beyond the end */
        uint64_t word = 0;
        int64_t byte = i * bits >> 3;
        __builtin_memcpy(&word, packed + byte, (uint64_t)smaller(8, nbytes - byte));
        codes[i] = (int64_t)(word >> (i * bits & 7) & mask);
    }
}

/* Bit i is set where element i is not zero. */
void pack_mask(const uint8_t *mask, int64_t count, uint8_t *packed) {
    for (int64_t start = 0; start < count; start += 8) {
        uint64_t eight = 0;
        __builtin_memcpy(&eight, mask + start, (uint64_t)smaller(8, count - start));
        packed[start / 8] = (uint8_t)(eight * 0x0102040810204080ull >> 56);
    }
}

#include "bits.h"

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
    unpack_codes(packed, count, bits, codes);
}

#include "bits.h"

/* Packs the low `bits` bits (0..32) of codes, int64 [count], without gaps: uint8 [ceil(count * bits / 8)]. */
void pack_bits(const int64_t *codes, int64_t count, int64_t bits, uint8_t *packed) {
    uint64_t mask = (1ull << bits) - 1, pending = 0;
    int64_t filled = 0;
    for (int64_t i = 0; i < count; i++) {
        pending |= ((uint64_t)codes[i] & mask) << filled;
        filled += bits;
        if (filled >= 32) {
            __builtin_memcpy(packed, &pending, 4);
            packed += 4;
            pending >>= 32;
            filled -= 32;
        }
    }
    for (; filled > 0; filled -= 8, pending >>= 8)
        *packed++ = (uint8_t)pending;
}

/* Unpacks codes that `pack_bits` packed: from uint8 [ceil(count * bits / 8)] to int64 [count]. */
void unpack_bits(const uint8_t *packed, int64_t count, int64_t bits, int64_t *codes) {
    unpack_codes(packed, count, bits, codes);
}

/* A stretch of small codes into its bytes, by words whose bytes are the codes that one byte will hold. */
#ifndef PACKING_H
#define PACKING_H

#include <stdint.h>

#define STRETCH 128 /* elements taken together: as many as a stretch has shared random numbers */

/* The low `bits` bits of each, 2, 4 or 8, the first one lowest. */
static inline void pack_low(const uint8_t *codes, int64_t bits, uint8_t *packed) {
    uint32_t words[STRETCH / 4];
    uint16_t pairs[STRETCH / 2];
    switch (bits) {
    case 2:
        __builtin_memcpy(words, codes, sizeof words);
        for (int64_t i = 0; i < STRETCH / 4; i++) {
            uint32_t word = words[i] & 0x03030303;
            packed[i] = (uint8_t)(word | word >> 6 | word >> 12 | word >> 18);
        }
        return;
    case 4:
        __builtin_memcpy(pairs, codes, sizeof pairs);
        for (int64_t i = 0; i < STRETCH / 2; i++)
            packed[i] = (uint8_t)((pairs[i] & 0x0f) | (pairs[i] >> 4 & 0xf0));
        return;
    default:
        __builtin_memcpy(packed, codes, STRETCH);
    }
}

/* As many of `bytes` as `width` codes fill; the usual whole stretch without a call. */
static inline void write_bytes(const uint8_t *bytes, int64_t width, int64_t bits, uint8_t *packed) {
    if (width < STRETCH)
        __builtin_memcpy(packed, bytes, (uint64_t)(width * bits + 7) / 8);
    else if (bits == 2)
        __builtin_memcpy(packed, bytes, STRETCH / 4);
    else if (bits == 4)
        __builtin_memcpy(packed, bytes, STRETCH / 2);
    else
        __builtin_memcpy(packed, bytes, STRETCH);
}

#endif

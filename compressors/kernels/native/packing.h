/* Packing of a chunk of codes. Each byte is made by shifts from a word whose bytes are its codes. */
#ifndef PACKING_H
#define PACKING_H

#include <stdint.h>

#define CHUNK 128 /* elements per chunk: as many as `shared_stretch` has random numbers */

/* Packs the low `bits` bits (2, 4 or 8) of CHUNK codes, the first code of a byte in its low bits. */
static inline void pack_low(const uint8_t *codes, int64_t bits, uint8_t *packed) {
    uint32_t words[CHUNK / 4];
    uint16_t pairs[CHUNK / 2];
    switch (bits) {
    case 2:
        __builtin_memcpy(words, codes, sizeof words);
        for (int64_t i = 0; i < CHUNK / 4; i++) {
            uint32_t word = words[i] & 0x03030303;
            packed[i] = (uint8_t)(word | word >> 6 | word >> 12 | word >> 18);
        }
        return;
    case 4:
        __builtin_memcpy(pairs, codes, sizeof pairs);
        for (int64_t i = 0; i < CHUNK / 2; i++)
            packed[i] = (uint8_t)((pairs[i] & 0x0f) | (pairs[i] >> 4 & 0xf0));
        return;
    default:
        __builtin_memcpy(packed, codes, CHUNK);
    }
}

/* Copies the bytes of `width` codes. Whole chunks have a constant length, so that no call of memcpy is needed. */
static inline void write_bytes(const uint8_t *bytes, int64_t width, int64_t bits, uint8_t *packed) {
    if (width < CHUNK)
        __builtin_memcpy(packed, bytes, (uint64_t)(width * bits + 7) / 8);
    else if (bits == 2)
        __builtin_memcpy(packed, bytes, CHUNK / 4);
    else if (bits == 4)
        __builtin_memcpy(packed, bytes, CHUNK / 2);
    else
        __builtin_memcpy(packed, bytes, CHUNK);
}

#endif

/* Decoding of 8-bit and 4-bit codes by a formula. Unlike a table lookup per byte, a formula is vectorised. */
#ifndef BYTE_VALUES_H
#define BYTE_VALUES_H

#include <stdint.h>

typedef float (*byte_decoder)(uint8_t byte);

/* The byte is a two's complement integer, -128..127. */
static inline float decode_integer(uint8_t byte) { return (float)(int8_t)byte; }

/* The top bit is the sign; the other bits are 0 for zero, or j for 2^(1-j). */
static inline float decode_power(uint8_t byte) {
    uint32_t j = byte & 0x7f, bits = (128 - j) << 23 | (uint32_t)(byte & 0x80) << 24;
    float value;
    bits = j ? bits : 0;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

/* A byte holds two 4-bit two's complement integers, -8..7, the first one in its low half. */
static inline int8_t low_half(uint8_t byte) { return (int8_t)((int8_t)(byte << 4) >> 4); }
static inline int8_t high_half(uint8_t byte) { return (int8_t)((int8_t)byte >> 4); }

/* Return whether a table, fp32 [256] or [256, 2], holds exactly the values of the formula, bit for bit. */
static inline __attribute__((always_inline)) int matches_table(const float *table, byte_decoder decode) {
    for (int byte = 0; byte < 256; byte++) {
        float computed = decode((uint8_t)byte);
        if (__builtin_memcmp(&computed, table + byte, sizeof computed))
            return 0;
    }
    return 1;
}

static int halves_match_table(const float *table) {
    for (int byte = 0; byte < 256; byte++) {
        float halves[2] = {low_half((uint8_t)byte), high_half((uint8_t)byte)};
        if (__builtin_memcmp(halves, table + 2 * byte, sizeof halves))
            return 0;
    }
    return 1;
}

/* sum[i] += scale * the value of byte i. */
static inline __attribute__((always_inline)) void add_decoded(
    byte_decoder decode, const uint8_t *bytes, int64_t count, float scale, float *sum) {
    for (int64_t i = 0; i < count; i++)
        sum[i] += decode(bytes[i]) * scale;
}

/* sum[2 * i] += scale * the low half of byte i; sum[2 * i + 1] += scale * the high half. */
static inline void add_halves(const uint8_t *bytes, int64_t count, float scale, float *sum) {
    int64_t i = 0;
#ifdef __clang__ /* explicit shuffle: compilers do not vectorise the interleaving of the halves */
    typedef int8_t bytes_8 __attribute__((vector_size(8)));
    typedef int8_t bytes_16 __attribute__((vector_size(16)));
    typedef float floats_16 __attribute__((vector_size(64)));
    for (; i + 8 <= count; i += 8) {
        bytes_8 packed;
        floats_16 sums;
        __builtin_memcpy(&packed, bytes + i, sizeof packed);
        __builtin_memcpy(&sums, sum + 2 * i, sizeof sums);
        bytes_8 low = (packed << 4) >> 4, high = packed >> 4;
        bytes_16 in_order = __builtin_shufflevector(low, high, 0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
        sums += __builtin_convertvector(in_order, floats_16) * scale;
        __builtin_memcpy(sum + 2 * i, &sums, sizeof sums);
    }
#endif
    for (; i < count; i++) {
        sum[2 * i] += low_half(bytes[i]) * scale;
        sum[2 * i + 1] += high_half(bytes[i]) * scale;
    }
}

#endif

/* What codes of eight or four bits stand for, where that follows a formula: it takes many bytes at once, while each would
   be looked up in a table by itself. */
#ifndef BYTE_VALUES_H
#define BYTE_VALUES_H

#include <stdint.h>

typedef float (*byte_value)(uint8_t byte);

/* An integer of -128..127. */
static inline float integer_of(uint8_t byte) { return (float)(int8_t)byte; }

/* The low bits are 0 for zero and j for 2^(1-j); the top bit is the sign. */
static inline float power_of(uint8_t byte) {
    uint32_t j = byte & 0x7f, bits = (128 - j) << 23 | (uint32_t)(byte & 0x80) << 24;
    float value;
    bits = j ? bits : 0;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

/* A byte of two integers of -8..7, the first one in the low half. */
static inline int8_t low_half(uint8_t byte) { return (int8_t)((int8_t)(byte << 4) >> 4); }
static inline int8_t high_half(uint8_t byte) { return (int8_t)((int8_t)byte >> 4); }

/* Whether a table of 256 values holds, to the last bit, what the formula gives. */
static inline __attribute__((always_inline)) int follows(const float *table, byte_value value) {
    for (int byte = 0; byte < 256; byte++) {
        float computed = value((uint8_t)byte);
        if (__builtin_memcmp(&computed, table + byte, sizeof computed))
            return 0;
    }
    return 1;
}

static int follows_halves(const float *table) {
    for (int byte = 0; byte < 256; byte++) {
        float halves[2] = {low_half((uint8_t)byte), high_half((uint8_t)byte)};
        if (__builtin_memcmp(halves, table + 2 * byte, sizeof halves))
            return 0;
    }
    return 1;
}

/* sum += the value of each byte, times a scale. */
static inline __attribute__((always_inline)) void add_values_of(
    byte_value value, const uint8_t *bytes, int64_t count, float scale, float *sum) {
    for (int64_t i = 0; i < count; i++)
        sum[i] += value(bytes[i]) * scale;
}

/* sum += both halves of each byte, times a scale. */
static inline void add_halves(const uint8_t *bytes, int64_t count, float scale, float *sum) {
    int64_t i = 0;
#ifdef __clang__ /* no compiler finds by itself how to put the halves in order */
    typedef int8_t bytes_8 __attribute__((vector_size(8)));
    typedef float floats_16 __attribute__((vector_size(64)));
    for (; i + 8 <= count; i += 8) {
        bytes_8 both;
        floats_16 before;
        __builtin_memcpy(&both, bytes + i, sizeof both);
        __builtin_memcpy(&before, sum + 2 * i, sizeof before);
        bytes_8 low = (both << 4) >> 4, high = both >> 4;
        before += __builtin_convertvector(
                      __builtin_shufflevector(low, high, 0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15), floats_16) *
                  scale;
        __builtin_memcpy(sum + 2 * i, &before, sizeof before);
    }
#endif
    for (; i < count; i++) {
        sum[2 * i] += low_half(bytes[i]) * scale;
        sum[2 * i + 1] += high_half(bytes[i]) * scale;
    }
}

#endif

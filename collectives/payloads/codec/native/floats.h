/* 16-bit floats and fp32: exact one way; the other way to nearest, ties to even, with a limit to what may come out. */
#ifndef FLOATS_H
#define FLOATS_H

#include <stdint.h>

enum { FP32, FP16, BF16 }; /* the types that values travel in */

#define AT_ONCE 64 /* values made wide together; one by one each would wait for the one before */

static inline uint32_t bits_of(float x) {
    uint32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
}

static inline float from_bf16(uint16_t half) {
    return float_of((uint32_t)half << 16);
}

/* Within +-limit; NaN stays NaN. */
static inline float limited(float x, float limit) {
    x = x > limit ? limit : x;
    return x < -limit ? -limit : x;
}

static inline uint16_t to_bf16(float x) {
    uint32_t bits = bits_of(x);
    return (uint16_t)(x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0);
}

#if defined(__F16C__) || defined(__aarch64__) /* one instruction, which no setting of the process changes */
static inline float from_fp16(uint16_t half) {
    _Float16 x;
    __builtin_memcpy(&x, &half, sizeof x);
    return (float)x;
}

static inline uint16_t rounded_to_fp16(float x) {
    _Float16 rounded = (_Float16)x;
    uint16_t half;
    __builtin_memcpy(&half, &rounded, sizeof half);
    return half;
}
#else
/* The exponent is 112 too small. A subnormal half becomes the mantissa of a number that is 2^-14 too large: as a float
   it would be subnormal too, and where a process flushes those to zero it would be lost. */
static inline float from_fp16(uint16_t half) {
    uint32_t magnitude = (uint32_t)(half & 0x7fff) << 13, sign = (uint32_t)(half & 0x8000) << 16;
    uint32_t subnormal = bits_of(float_of(magnitude + 0x38800000) - 0x1p-14f);
    uint32_t finite = magnitude < 0x00800000 ? subnormal : magnitude + 0x38000000;
    return float_of(sign | (magnitude >= 0x0f800000 ? magnitude | 0x7f800000 : finite));
}

/* Adding 0.5 pushes a subnormal half to the low end of the mantissa, rounded by the addition. */
static inline uint16_t rounded_to_fp16(float x) {
    uint32_t sign = bits_of(x) & 0x80000000, magnitude = bits_of(x) ^ sign;
    uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000;
    uint32_t normal = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
    uint32_t rounded = magnitude < 0x38800000 ? subnormal : normal;
    return (uint16_t)(rounded | sign >> 16);
}
#endif

/* All NaN become one, by its sign. */
static inline uint16_t to_fp16(float x) {
    return (uint16_t)(x == x ? rounded_to_fp16(x) : 0x7e00 | (bits_of(x) >> 16 & 0x8000));
}

/* By a power of two, which has no mantissa, a product is the same and takes a fraction of the time. */
static inline __attribute__((always_inline)) void divide(float *x, int64_t count, float divisor) {
    if (bits_of(divisor) & 0x7fffff) {
        for (int64_t i = 0; i < count; i++)
            x[i] /= divisor;
        return;
    }
    float factor = 1 / divisor;
    for (int64_t i = 0; i < count; i++)
        x[i] *= factor;
}

/* Values first..first+count-1 in fp32; at most AT_ONCE. */
static inline __attribute__((always_inline)) void widen(
    const void *values, int64_t kind, int64_t first, int64_t count, float *wide) {
    if (kind == FP32)
        for (int64_t i = 0; i < count; i++)
            wide[i] = ((const float *)values)[first + i];
    else if (kind == FP16)
        for (int64_t i = 0; i < count; i++)
            wide[i] = from_fp16(((const uint16_t *)values)[first + i]);
    else
        for (int64_t i = 0; i < count; i++)
            wide[i] = from_bf16(((const uint16_t *)values)[first + i]);
}

#endif

/* Conversions between fp32 and 16-bit floats. Rounding is to nearest, ties to even, after clamping to +-limit. */
#ifndef FLOATS_H
#define FLOATS_H

#include <stdint.h>

enum { FP32, FP16, BF16 }; /* dtypes of values on the wire */

#define VALUE_CHUNK 64 /* values converted per loop: it is vectorised, unlike a loop that also scatters them */

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

/* Clamps to +-limit; NaN stays NaN. */
static inline float clamped(float x, float limit) {
    x = x > limit ? limit : x;
    return x < -limit ? -limit : x;
}

static inline uint16_t to_bf16(float x) {
    uint32_t bits = bits_of(x);
    return (uint16_t)(x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0);
}

#if defined(__F16C__) || defined(__aarch64__) /* one instruction, which flush-to-zero modes do not affect */
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
/* The exponent bias of fp32 is larger by 112. A subnormal half becomes the mantissa of a number with exponent 2^-14,
   from which 2^-14 is subtracted: shifted into a subnormal float, it would be lost in flush-to-zero mode. */
static inline float from_fp16(uint16_t half) {
    uint32_t magnitude = (uint32_t)(half & 0x7fff) << 13, sign = (uint32_t)(half & 0x8000) << 16;
    uint32_t subnormal = bits_of(float_of(magnitude + 0x38800000) - 0x1p-14f);
    uint32_t finite = magnitude < 0x00800000 ? subnormal : magnitude + 0x38000000;
    return float_of(sign | (magnitude >= 0x0f800000 ? magnitude | 0x7f800000 : finite));
}

/* For a subnormal result, adding 0.5 rounds |x| to a multiple of 2^-24 and leaves it in the low mantissa bits. */
static inline uint16_t rounded_to_fp16(float x) {
    uint32_t sign = bits_of(x) & 0x80000000, magnitude = bits_of(x) ^ sign;
    uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000;
    uint32_t normal = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
    uint32_t rounded = magnitude < 0x38800000 ? subnormal : normal;
    return (uint16_t)(rounded | sign >> 16);
}
#endif

/* NaN becomes the quiet NaN of the same sign. */
static inline uint16_t to_fp16(float x) {
    return (uint16_t)(x == x ? rounded_to_fp16(x) : 0x7e00 | (bits_of(x) >> 16 & 0x8000));
}

/* x /= divisor; multiplies by the inverse, which is faster, if the divisor is a power of two (zero mantissa bits). */
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

/* Converts values first..first+count-1 to fp32; count is at most VALUE_CHUNK. */
static inline __attribute__((always_inline)) void widen(
    const void *values, int64_t dtype, int64_t first, int64_t count, float *wide) {
    if (dtype == FP32)
        for (int64_t i = 0; i < count; i++)
            wide[i] = ((const float *)values)[first + i];
    else if (dtype == FP16)
        for (int64_t i = 0; i < count; i++)
            wide[i] = from_fp16(((const uint16_t *)values)[first + i]);
    else
        for (int64_t i = 0; i < count; i++)
            wide[i] = from_bf16(((const uint16_t *)values)[first + i]);
}

#endif

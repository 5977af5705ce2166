/* Encoding of a single value in the dtype in which it is sent. */
#ifndef ENCODE_VALUE_H
#define ENCODE_VALUE_H

#include "../../../collectives/payloads/codec/native/floats.h"

/* Writes x, clamped to +-limit and rounded to `dtype`, to values[i], +0.0 for -0.0. Returns this value as fp32. */
static inline float encode_value(float x, int64_t dtype, float limit, void *values, int64_t i) {
    float decoded = x + 0.0f;
    if (dtype == FP32) {
        ((float *)values)[i] = decoded;
        return decoded;
    }
    uint16_t half = dtype == FP16 ? to_fp16(clamped(x, limit)) : to_bf16(clamped(x, limit));
    if (half == 0x8000)
        half = 0;
    ((uint16_t *)values)[i] = half;
    return dtype == FP16 ? from_fp16(half) : from_bf16(half);
}

#endif

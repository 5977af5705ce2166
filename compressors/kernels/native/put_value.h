/* Values on their way, in the type that they travel in. */
#ifndef PUT_VALUE_H
#define PUT_VALUE_H

#include "../../../collectives/payloads/codec/native/floats.h"

/* Rounds to that type, within +-limit; returns what arrives, 0 for -0. */
static inline float put_value(float x, int64_t type, float limit, void *values, int64_t at) {
    float arrives = x + 0.0f;
    if (type == FP32) {
        ((float *)values)[at] = arrives;
        return arrives;
    }
    uint16_t half = type == FP16 ? to_fp16(limited(x, limit)) : to_bf16(limited(x, limit));
    if (half == 0x8000)
        half = 0;
    ((uint16_t *)values)[at] = half;
    return type == FP16 ? from_fp16(half) : from_bf16(half);
}

#endif

/* Rounding to the nearest integer, ties to even. */
#ifndef NEAREST_H
#define NEAREST_H

#include <stdint.h>

/* |x| must be at most 2^30. */
static inline int32_t nearest(float x) {
#if defined(__SSE4_1__) || defined(__aarch64__)
    return (int32_t)__builtin_rintf(x); /* a single instruction */
#else
    float magic = __builtin_copysignf(0x1p23f, x); /* adding it removes the fraction; |x| >= 2^23 has none */
    return (int32_t)(__builtin_fabsf(x) < 0x1p23f ? x + magic - magic : x);
#endif
}

#endif

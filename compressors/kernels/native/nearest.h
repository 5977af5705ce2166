/* The nearest integer, ties to even. */
#ifndef NEAREST_H
#define NEAREST_H

#include <stdint.h>

/* For |x| <= 2^30; what reaches 2^23 has no fraction. */
static inline int32_t nearest(float x) {
#if defined(__SSE4_1__) || defined(__aarch64__)
    return (int32_t)__builtin_rintf(x); /* an instruction */
#else
    float whole = __builtin_copysignf(0x1p23f, x); /* added, it leaves no room for a fraction */
    return (int32_t)(__builtin_fabsf(x) < 0x1p23f ? x + whole - whole : x);
#endif
}

#endif

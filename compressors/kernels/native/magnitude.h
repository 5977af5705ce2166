/* Magnitudes of fp32 as integers of the same order: the bits without the sign. NaN counts as infinite. */
#ifndef MAGNITUDE_H
#define MAGNITUDE_H

#include <stdint.h>

#define INFINITE 0x7f800000

static inline int32_t magnitude(int32_t bits) {
    int32_t unsigned_bits = bits & 0x7fffffff;
    return unsigned_bits < INFINITE ? unsigned_bits : INFINITE;
}

/* A bound that at least k of n magnitudes reach: the k-th largest, or a lower one that just as many reach. */
static inline int32_t bound_reached_by(int64_t k, const int32_t *magnitudes, int64_t n) {
    int32_t largest = 0;
    for (int64_t i = 0; i < n; i++)
        largest = magnitudes[i] > largest ? magnitudes[i] : largest;
    int32_t reached = 0, missed = largest + 1;
    while (missed - reached > 1) {
        int32_t middle = reached + (missed - reached) / 2;
        int32_t count = 0;
        for (int64_t i = 0; i < n; i++)
            count += magnitudes[i] >= middle;
        if (count >= k)
            reached = middle;
        else
            missed = middle;
        if (count == k)
            break;
    }
    return reached;
}

#endif

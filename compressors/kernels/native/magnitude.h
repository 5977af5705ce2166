/* Magnitudes of fp32 as int32: the bits without the sign, which have the same order. NaN counts as infinite. */
#ifndef MAGNITUDE_H
#define MAGNITUDE_H

#include <stdint.h>

#define INFINITE 0x7f800000
#define SCAN_PREFETCH 1024 /* elements, one page: hardware prefetchers stop at the end of a page */

static inline int32_t magnitude(int32_t bits) {
    int32_t without_sign = bits & 0x7fffffff;
    return without_sign < INFINITE ? without_sign : INFINITE;
}

/* Returns a mask: bit j is set if the magnitude of x[j] >= bound. NaN counts as infinite if bound <= INFINITE. */
static inline uint64_t reaching_mask_16(const int32_t *x, int32_t bound) {
#ifdef __clang__ /* one comparison and one mask move, which compilers do not find in the loop below */
    typedef int32_t ints __attribute__((ext_vector_type(16)));
    typedef _Bool bools __attribute__((ext_vector_type(16)));
    ints values;
    uint16_t mask;
    __builtin_memcpy(&values, x, sizeof values);
    bools reaching = __builtin_convertvector((values & 0x7fffffff) >= bound, bools);
    __builtin_memcpy(&mask, &reaching, sizeof mask);
    return mask;
#else
    uint64_t mask = 0;
    for (int j = 0; j < 16; j++)
        mask |= (uint64_t)((x[j] & 0x7fffffff) >= bound) << j;
    return mask;
#endif
}

/* Returns the mask of 64 elements, or of n if there are fewer. */
static inline uint64_t reaching_mask_64(const int32_t *x, int64_t n, int32_t bound) {
    if (n >= 64)
        return reaching_mask_16(x, bound) | reaching_mask_16(x + 16, bound) << 16 |
               reaching_mask_16(x + 32, bound) << 32 | reaching_mask_16(x + 48, bound) << 48;
    uint64_t mask = 0;
    for (int64_t i = 0; i < n; i++)
        mask |= (uint64_t)((x[i] & 0x7fffffff) >= bound) << i;
    return mask;
}

/* Prefetches 64 elements for a pass that only compares and is limited by memory. */
static inline void prefetch_ahead(const int32_t *x) {
    for (int64_t i = 0; i < 64; i += 16)
        __builtin_prefetch(x + SCAN_PREFETCH + i);
}

/* Returns a bound >= low, found by bisection, that at least k of n magnitudes reach; not more than k + slack, unless
   they equal the bound. With slack 0, these are the ones that reach the k-th largest. At least k must reach `low`. */
static inline int32_t bisect_bound(int64_t k, int64_t slack, const int32_t *magnitudes, int64_t n, int32_t low) {
    int32_t largest = low;
    for (int64_t i = 0; i < n; i++)
        largest = magnitudes[i] > largest ? magnitudes[i] : largest;
    int32_t lower = low, upper = largest + 1;
    while (upper - lower > 1) {
        int32_t middle = lower + (upper - lower) / 2;
        int32_t count = 0;
        for (int64_t i = 0; i < n; i++)
            count += magnitudes[i] >= middle;
        int enough = count >= k; /* conditional moves: a branch would be mispredicted half the time */
        lower = enough ? middle : lower;
        upper = enough ? upper : middle;
        if (enough & (count <= k + slack))
            break;
    }
    return lower;
}

#endif

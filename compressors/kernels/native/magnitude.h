/* Magnitudes of fp32 as integers of the same order: the bits without the sign. NaN counts as infinite. */
#ifndef MAGNITUDE_H
#define MAGNITUDE_H

#include <stdint.h>

#define INFINITE 0x7f800000
#define AHEAD 1024 /* elements: a page, at whose end memory would have to be asked anew */

static inline int32_t magnitude(int32_t bits) {
    int32_t without_sign = bits & 0x7fffffff;
    return without_sign < INFINITE ? without_sign : INFINITE;
}

/* Bit j of the result: whether the magnitude of x[j] reaches the bound, at most INFINITE; of 16 elements. */
static inline uint64_t reaching_of_16(const int32_t *x, int32_t bound) {
#ifdef __clang__ /* one comparison and one move of its mask, which no compiler finds by itself */
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

/* The same of 64 elements, or of n where there are fewer. */
static inline uint64_t reaching_of_64(const int32_t *x, int64_t n, int32_t bound) {
    if (n >= 64)
        return reaching_of_16(x, bound) | reaching_of_16(x + 16, bound) << 16 | reaching_of_16(x + 32, bound) << 32 |
               reaching_of_16(x + 48, bound) << 48;
    uint64_t mask = 0;
    for (int64_t i = 0; i < n; i++)
        mask |= (uint64_t)((x[i] & 0x7fffffff) >= bound) << i;
    return mask;
}

/* In a pass over memory that only compares: asks for 64 elements that will be read soon. */
static inline void fetch_ahead(const int32_t *x) {
    for (int64_t i = 0; i < 64; i += 16)
        __builtin_prefetch(x + AHEAD + i);
}

/* A bound above `low` or `low` itself that at least k of n magnitudes reach, with few more, or with none but those that
   equal it: where `slack` is 0, the k-th largest or one that just as many reach. At least k must reach `low`. */
static inline int32_t bound_reached_by(int64_t k, int64_t slack, const int32_t *magnitudes, int64_t n, int32_t low) {
    int32_t largest = low;
    for (int64_t i = 0; i < n; i++)
        largest = magnitudes[i] > largest ? magnitudes[i] : largest;
    int32_t reached = low, missed = largest + 1;
    while (missed - reached > 1) {
        int32_t middle = reached + (missed - reached) / 2;
        int32_t count = 0;
        for (int64_t i = 0; i < n; i++)
            count += magnitudes[i] >= middle;
        int enough = count >= k; /* as likely as not: selected, not branched on */
        reached = enough ? middle : reached;
        missed = enough ? missed : middle;
        if (enough & (count <= k + slack))
            break;
    }
    return reached;
}

#endif

/* Comparisons of 64 elements with a bound, as bitmasks: bit j belongs to element j. */
#ifndef MASKS_H
#define MASKS_H

#include <stdint.h>

/* Defines NAME_mask_16: bit j is set if x[j] OPERATOR bound, which is false for NaN. */
#ifdef __clang__ /* one comparison and one mask move, which compilers do not find in the loop below */
typedef float floats_16 __attribute__((ext_vector_type(16)));
typedef _Bool bools_16 __attribute__((ext_vector_type(16)));
#define DEFINE_MASK_16(NAME, OPERATOR)                                                                                 \
    static inline uint64_t NAME##_mask_16(const float *x, float bound) {                                               \
        floats_16 values;                                                                                              \
        uint16_t mask;                                                                                                 \
        __builtin_memcpy(&values, x, sizeof values);                                                                   \
        bools_16 holds = __builtin_convertvector(values OPERATOR bound, bools_16);                                     \
        __builtin_memcpy(&mask, &holds, sizeof mask);                                                                  \
        return mask;                                                                                                   \
    }
#else
#define DEFINE_MASK_16(NAME, OPERATOR)                                                                                 \
    static inline uint64_t NAME##_mask_16(const float *x, float bound) {                                               \
        uint64_t mask = 0;                                                                                             \
        for (int j = 0; j < 16; j++)                                                                                   \
            mask |= (uint64_t)(x[j] OPERATOR bound) << j;                                                              \
        return mask;                                                                                                   \
    }
#endif

/* Defines NAME_mask_64: the mask of 64 elements, or of n if there are fewer. */
#define DEFINE_MASK_64(NAME, OPERATOR)                                                                                 \
    DEFINE_MASK_16(NAME, OPERATOR)                                                                                     \
    static inline uint64_t NAME##_mask_64(const float *x, int64_t n, float bound) {                                    \
        if (n >= 64)                                                                                                   \
            return NAME##_mask_16(x, bound) | NAME##_mask_16(x + 16, bound) << 16 |                                    \
                   NAME##_mask_16(x + 32, bound) << 32 | NAME##_mask_16(x + 48, bound) << 48;                          \
        uint64_t mask = 0;                                                                                             \
        for (int64_t i = 0; i < n; i++)                                                                                \
            mask |= (uint64_t)(x[i] OPERATOR bound) << i;                                                              \
        return mask;                                                                                                   \
    }

DEFINE_MASK_64(at_least, >=)
DEFINE_MASK_64(at_most, <=)

#endif

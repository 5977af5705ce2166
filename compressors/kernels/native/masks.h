/* Comparisons of 64 elements as the bits of a word, the first one lowest. */
#ifndef MASKS_H
#define MASKS_H

#include <stdint.h>

/* Declares NAME_of_16: bit j says whether x[j] COMPARES to the bound; NaN does not. */
#ifdef __clang__ /* one comparison and one move of its mask, which no compiler finds by itself */
typedef float floats_16 __attribute__((ext_vector_type(16)));
typedef _Bool bools_16 __attribute__((ext_vector_type(16)));
#define MASK_OF_16(NAME, COMPARES)                                                                                     \
    static inline uint64_t NAME##_of_16(const float *x, float bound) {                                                 \
        floats_16 values;                                                                                              \
        uint16_t mask;                                                                                                 \
        __builtin_memcpy(&values, x, sizeof values);                                                                   \
        bools_16 holds = __builtin_convertvector(values COMPARES bound, bools_16);                                     \
        __builtin_memcpy(&mask, &holds, sizeof mask);                                                                  \
        return mask;                                                                                                   \
    }
#else
#define MASK_OF_16(NAME, COMPARES)                                                                                     \
    static inline uint64_t NAME##_of_16(const float *x, float bound) {                                                 \
        uint64_t mask = 0;                                                                                             \
        for (int j = 0; j < 16; j++)                                                                                   \
            mask |= (uint64_t)(x[j] COMPARES bound) << j;                                                              \
        return mask;                                                                                                   \
    }
#endif

/* Declares NAME_of_64: the same of 64 elements, or of n where there are fewer. */
#define MASK_OF_64(NAME, COMPARES)                                                                                     \
    MASK_OF_16(NAME, COMPARES)                                                                                         \
    static inline uint64_t NAME##_of_64(const float *x, int64_t n, float bound) {                                      \
        if (n >= 64)                                                                                                   \
            return NAME##_of_16(x, bound) | NAME##_of_16(x + 16, bound) << 16 | NAME##_of_16(x + 32, bound) << 32 |    \
                   NAME##_of_16(x + 48, bound) << 48;                                                                  \
        uint64_t mask = 0;                                                                                             \
        for (int64_t i = 0; i < n; i++)                                                                                \
            mask |= (uint64_t)(x[i] COMPARES bound) << i;                                                              \
        return mask;                                                                                                   \
    }

MASK_OF_64(at_least, >=)
MASK_OF_64(at_most, <=)

#endif

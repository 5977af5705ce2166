/* One bit per element, set where it is not negative, and the sums that say what a bit stands for. */
#include "sums.h"

static inline int64_t smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* Bit j: whether x[j] >= 0, of 16 elements. */
static inline uint64_t signs_of_16(const float *x) {
#ifdef __clang__ /* one comparison and one move of its mask, which no compiler finds by itself */
    typedef float floats __attribute__((ext_vector_type(16)));
    typedef _Bool bools __attribute__((ext_vector_type(16)));
    floats values;
    uint16_t mask;
    __builtin_memcpy(&values, x, sizeof values);
    bools positive = __builtin_convertvector(values >= 0, bools);
    __builtin_memcpy(&mask, &positive, sizeof mask);
    return mask;
#else
    uint64_t mask = 0;
    for (int j = 0; j < 16; j++)
        mask |= (uint64_t)(x[j] >= 0) << j;
    return mask;
#endif
}

/* Bits of `count` elements, a byte or more of them at a time; NaN's is not set. Returns how many are. */
static inline int64_t pack_signs(const float *x, int64_t count, uint8_t *packed) {
    int64_t num_set = 0, i = 0;
    for (; i + 64 <= count; i += 64) {
        uint64_t bits = signs_of_16(x + i) | signs_of_16(x + i + 16) << 16 | signs_of_16(x + i + 32) << 32 |
                        signs_of_16(x + i + 48) << 48;
        __builtin_memcpy(packed + i / 8, &bits, sizeof bits);
        num_set += __builtin_popcountll(bits);
    }
    for (; i < count; i += 8) {
        uint8_t byte = 0;
        for (int64_t j = 0; j < smaller(8, count - i); j++)
            byte |= (uint8_t)((x[i + j] >= 0) << j);
        packed[i / 8] = byte;
        num_set += __builtin_popcount(byte);
    }
    return num_set;
}

/* Returns the sum of magnitudes. */
double signs_and_magnitude(const float *x, int64_t numel, uint8_t *packed) {
    struct folding waiting = {.counts = {0}};
    for (int64_t start = 0; start < numel; start += SUM_STRETCH) {
        int64_t width = smaller(SUM_STRETCH, numel - start);
        add_sum(&waiting, stretch_sum(x + start, width, limited_term, __builtin_inff()));
        pack_signs(x + start, width, packed + start / 8);
    }
    return finished(&waiting);
}

/* Returns how many bits are set; `sums`: of the elements whose bits are, and of the others. NaN's is not. */
int64_t signs_and_sums(const float *x, int64_t numel, uint8_t *packed, double *sums) {
    struct folding positive = {.counts = {0}}, negative = {.counts = {0}};
    int64_t num_set = 0;
    for (int64_t start = 0; start < numel; start += SUM_STRETCH) {
        int64_t width = smaller(SUM_STRETCH, numel - start);
        add_sum(&positive, stretch_sum(x + start, width, positive_term, 0));
        add_sum(&negative, stretch_sum(x + start, width, negative_term, 0));
        num_set += pack_signs(x + start, width, packed + start / 8);
    }
    sums[0] = finished(&positive);
    sums[1] = finished(&negative);
    return num_set;
}

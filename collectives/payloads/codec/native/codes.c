/* Packed codes into a sum: a table says what the codes of a byte stand for, in units of a scale. */
#include <stdint.h>

#define STRETCH 4096 /* elements whose sum stays in the first cache, a multiple of 8 */

static inline int64_t smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* Declares add_bytes_N: sum += the N values of each of `count` bytes, times a scale. */
#define ADD_BYTES(N)                                                                                                   \
    static inline void add_bytes_##N(                                                                                  \
        const uint8_t *packed, int64_t count, const float *table, float scale, float *sum) {                           \
        typedef float row __attribute__((vector_size(4 * N)));                                                         \
        for (int64_t i = 0; i < count; i++) {                                                                          \
            row values, before;                                                                                        \
            __builtin_memcpy(&values, table + N * packed[i], sizeof values);                                           \
            __builtin_memcpy(&before, sum + N * i, sizeof before);                                                     \
            before += values * scale;                                                                                  \
            __builtin_memcpy(sum + N * i, &before, sizeof before);                                                     \
        }                                                                                                              \
    }

ADD_BYTES(1)
ADD_BYTES(2)
ADD_BYTES(4)
ADD_BYTES(8)

/* sum[i - start] += table[code i] * scale for start <= i < stop; `per_byte` codes in a byte. */
static inline void add_block(
    const uint8_t *packed, const float *table, float scale, int64_t per_byte, int64_t start, int64_t stop, float *sum) {
    int64_t i = start;
    for (; i < stop && i % per_byte; i++)
        sum[i - start] += table[packed[i / per_byte] * per_byte + i % per_byte] * scale;
    int64_t count = (stop - i) / per_byte;
    const uint8_t *bytes = packed + i / per_byte;
    switch (per_byte) {
    case 1: add_bytes_1(bytes, count, table, scale, sum + i - start); break;
    case 2: add_bytes_2(bytes, count, table, scale, sum + i - start); break;
    case 4: add_bytes_4(bytes, count, table, scale, sum + i - start); break;
    default: add_bytes_8(bytes, count, table, scale, sum + i - start);
    }
    for (i += count * per_byte; i < stop; i++)
        sum[i - start] += table[packed[i / per_byte] * per_byte + i % per_byte] * scale;
}

static void add_stretch(
    const uint8_t *packed, const float *table, const float *scales, int64_t block_numel, float sign, int64_t per_byte,
    int64_t start, int64_t stop, float *sum) {
    for (int64_t i = start, end; i < stop; i = end) {
        end = smaller(stop, (i / block_numel + 1) * block_numel);
        float scale = sign * scales[i / block_numel];
        add_block(packed, table, scale, per_byte, i, end, sum + i - start);
    }
}

/* dense += (term 0 + term 1 + ...) / divisor; one term is added, or with sign -1 subtracted, without a sum between. */
void add_codes(
    const uint64_t *packed, const uint64_t *scales, int64_t num_terms, const float *table, int64_t per_byte,
    int64_t block_numel, float sign, float divisor, float *dense, int64_t numel) {
    float sum[STRETCH];
    for (int64_t start = 0; start < numel; start += STRETCH) {
        int64_t stop = smaller(numel, start + STRETCH);
        int direct = num_terms == 1 && divisor == 1;
        float *target = direct ? dense + start : sum;
        if (!direct)
            for (int64_t i = 0; i < STRETCH; i++)
                sum[i] = num_terms == 1 ? -0.0f : 0.0f; /* a zero keeps its sign where nothing is added to it */
        for (int64_t term = 0; term < num_terms; term++)
            add_stretch(
                (const uint8_t *)packed[term], table, (const float *)scales[term], block_numel, sign, per_byte, start,
                stop, target);
        if (!direct)
            for (int64_t i = start; i < stop; i++)
                dense[i] += sum[i - start] / divisor;
    }
}

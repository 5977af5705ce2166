/* Packed codes into a sum: a table says what the codes of a byte stand for, in units of a scale. */
#include <stdint.h>

#define STRETCH 4096 /* elements whose sum stays in the first cache, a multiple of 8 */

static inline int64_t smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* sum[i - start] += table[code i] * scale for start <= i < stop; `per_byte` codes in a byte. */
static inline __attribute__((always_inline)) void add_block(
    const uint8_t *packed, const float *table, float scale, int64_t per_byte, int64_t start, int64_t stop, float *sum) {
    int64_t i = start;
    for (; i < stop && i % per_byte; i++)
        sum[i - start] += table[packed[i / per_byte] * per_byte + i % per_byte] * scale;
    for (; i + per_byte <= stop; i += per_byte) {
        const float *values = table + packed[i / per_byte] * per_byte;
        for (int64_t j = 0; j < per_byte; j++)
            sum[i - start + j] += values[j] * scale;
    }
    for (; i < stop; i++)
        sum[i - start] += table[packed[i / per_byte] * per_byte + i % per_byte] * scale;
}

static void add_stretch(
    const uint8_t *packed, const float *table, const float *scales, int64_t block_numel, float sign, int64_t per_byte,
    int64_t start, int64_t stop, float *sum) {
    for (int64_t i = start, end; i < stop; i = end) {
        end = smaller(stop, (i / block_numel + 1) * block_numel);
        float scale = sign * scales[i / block_numel];
        switch (per_byte) {
        case 1: add_block(packed, table, scale, 1, i, end, sum + i - start); break;
        case 2: add_block(packed, table, scale, 2, i, end, sum + i - start); break;
        case 4: add_block(packed, table, scale, 4, i, end, sum + i - start); break;
        default: add_block(packed, table, scale, 8, i, end, sum + i - start);
        }
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

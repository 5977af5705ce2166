/* Decoding of 2-bit codes, packed four per byte, low bits first. */
#include "floats.h"

static inline void take(const uint8_t *packed, int64_t start, int64_t stop, const float *table, float *values) {
    for (int64_t i = start; i < stop; i++)
        values[i] = table[packed[i >> 2] >> 2 * (i & 3) & 3];
}

/* values[i] = table[code i], fp32 [count]; table: fp32 [4]. */
void take_table_values(const uint8_t *packed, int64_t count, const float *table, float *values) {
    take(packed, 0, count, table, values);
}

/* Decodes two magnitudes per block to values, fp32 [count]: bit 0 of a code is the sign, bit 1 chooses the larger one.
   magnitudes: bf16 [blocks, 2], the smaller first. */
void take_magnitudes(
    const uint8_t *packed, int64_t count, int64_t block, const uint16_t *magnitudes, float *values) {
    for (int64_t start = 0; start < count; start += block, magnitudes += 2) {
        float low = from_bf16(magnitudes[0]), high = from_bf16(magnitudes[1]);
        float table[] = {low, 0 - low, high, 0 - high}; /* 0 - x, not -x: without -0.0 */
        take(packed, start, count - start < block ? count : start + block, table, values);
    }
}

/* Decoding of 2-bit codes with a table of four values per block. */
#include <stdint.h>

/* values[i] = table[4 * (i / block) + code i], fp32 [count]; packed: uint8, low bits first; table: fp32 [blocks, 4]. */
void take_table_values(const uint8_t *packed, int64_t count, int64_t block, const float *table, float *values) {
    for (int64_t start = 0; start < count; start += block, table += 4) {
        int64_t stop = count - start < block ? count : start + block;
        for (int64_t i = start; i < stop; i++)
            values[i] = table[packed[i >> 2] >> 2 * (i & 3) & 3];
    }
}

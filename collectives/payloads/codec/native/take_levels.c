/* Decodes 4-bit codes to values, fp32 [count]: plus or minus low * ratio^j, j = 0..7. packed: uint8, low half first. */
#include <stdint.h>

#include "geometric.h"

void take_levels(const uint8_t *packed, int64_t count, double low, double ratio, float *values) {
    double levels[NUM_LEVELS];
    float table[2 * NUM_LEVELS];
    geometric_levels(low, ratio, levels);
    for (int j = 0; j < NUM_LEVELS; j++) {
        table[j] = (float)levels[j];
        table[NEGATIVE + j] = -(float)levels[j];
    }
    for (int64_t i = 0; i + 1 < count; i += 2) {
        values[i] = table[packed[i / 2] & 15];
        values[i + 1] = table[packed[i / 2] >> 4];
    }
    if (count % 2)
        values[count - 1] = table[packed[count / 2] & 15];
}

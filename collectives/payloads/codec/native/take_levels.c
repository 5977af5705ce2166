/* What codes of four bits stand for: plus or minus one of eight magnitudes. */
#include <stdint.h>

#include "geometric.h"

void take_levels(const uint8_t *packed, int64_t count, double low, double ratio, float *values) {
    double row[NUM_LEVELS];
    float table[2 * NUM_LEVELS];
    geometric_row(low, ratio, row);
    for (int j = 0; j < NUM_LEVELS; j++) {
        table[j] = (float)row[j];
        table[NEGATIVE + j] = -(float)row[j];
    }
    for (int64_t i = 0; i + 1 < count; i += 2) {
        values[i] = table[packed[i / 2] & 15];
        values[i + 1] = table[packed[i / 2] >> 4];
    }
    if (count % 2)
        values[count - 1] = table[packed[count / 2] & 15];
}

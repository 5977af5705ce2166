/* Values as the nearest of eight magnitudes in a geometric row, each with its sign: codes of four bits. */
#include "../../../collectives/payloads/codec/native/floats.h"
#include "../../../collectives/payloads/codec/native/geometric.h"
#include "magnitude.h"

#define STRETCH 64

/* Which magnitude is the nearest, the larger of two that are as near; NaN counts as infinite, and as positive. */
static void codes_of(const float *x, int64_t width, const int32_t *middles, uint8_t *codes) {
    for (int64_t i = 0; i < width; i++) {
        int32_t size = magnitude((int32_t)bits_of(x[i])), code = x[i] < 0 ? NEGATIVE : 0;
        for (int j = 0; j < NUM_LEVELS - 1; j++)
            code += size >= middles[j];
        codes[i] = (uint8_t)code;
    }
}

void pack_nearest_levels(const float *x, int64_t count, double low, double ratio, uint8_t *packed) {
    double row[NUM_LEVELS];
    int32_t middles[NUM_LEVELS - 1];
    geometric_row(low, ratio, row);
    for (int j = 0; j < NUM_LEVELS - 1; j++)
        middles[j] = (int32_t)bits_of((float)((row[j] + row[j + 1]) / 2));
    for (int64_t start = 0; start < count; start += STRETCH) {
        int64_t width = count - start < STRETCH ? count - start : STRETCH;
        uint8_t codes[STRETCH + 1] = {0};
        codes_of(x + start, width, middles, codes);
        codes[width] = 0;
        for (int64_t i = 0; i < width; i += 2)
            *packed++ = (uint8_t)(codes[i] | codes[i + 1] << 4);
    }
}

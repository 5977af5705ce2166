/* Quantisation to the nearest of eight magnitudes in geometric progression, with a sign: 4-bit codes. */
#include "../../../collectives/payloads/codec/native/floats.h"
#include "../../../collectives/payloads/codec/native/geometric.h"
#include "magnitude.h"

#define CHUNK 64

/* Of two equally near magnitudes, the larger is taken. NaN counts as infinite and positive. */
static void nearest_codes(const float *x, int64_t width, const int32_t *midpoints, uint8_t *codes) {
    for (int64_t i = 0; i < width; i++) {
        int32_t bits = magnitude((int32_t)bits_of(x[i])), code = x[i] < 0 ? NEGATIVE : 0;
        for (int j = 0; j < NUM_LEVELS - 1; j++)
            code += bits >= midpoints[j];
        codes[i] = (uint8_t)code;
    }
}

/* Codes x, fp32 [count], with the magnitudes low * ratio^j; packed: uint8 [ceil(count / 2)], low half first. */
void pack_nearest_levels(const float *x, int64_t count, double low, double ratio, uint8_t *packed) {
    double levels[NUM_LEVELS];
    int32_t midpoints[NUM_LEVELS - 1];
    geometric_levels(low, ratio, levels);
    for (int j = 0; j < NUM_LEVELS - 1; j++)
        midpoints[j] = (int32_t)bits_of((float)((levels[j] + levels[j + 1]) / 2));
    for (int64_t start = 0; start < count; start += CHUNK) {
        int64_t width = count - start < CHUNK ? count - start : CHUNK;
        uint8_t codes[CHUNK + 1] = {0};
        nearest_codes(x + start, width, midpoints, codes);
        for (int64_t i = 0; i < width; i += 2)
            *packed++ = (uint8_t)(codes[i] | codes[i + 1] << 4);
    }
}

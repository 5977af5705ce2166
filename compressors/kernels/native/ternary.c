/* Elements as -1, 0 or +1: beyond a threshold, or at random without bias. */
#include "../../../collectives/payloads/codec/native/philox.h"
#include "packing.h"

/* As bytes, or two bits each, the first on top: 3 for +1, 2 for -1. */
static inline void write_levels(int8_t *levels, int64_t width, int64_t bits, uint8_t *out) {
    uint8_t codes[STRETCH], bytes[STRETCH];
    if (bits == 8) {
        write_bytes((uint8_t *)levels, width, 8, out);
        return;
    }
    for (int64_t i = width; i < STRETCH; i++)
        levels[i] = 0;
    for (int64_t i = 0; i < STRETCH; i++)
        codes[i] = (uint8_t)((levels[i] & 2) | (levels[i] > 0) | (levels[i] > 0) << 1);
    pack_pairs_high(codes, bytes);
    write_bytes(bytes, width, 2, out);
}

/* The sign where |x| >= threshold. */
void pack_ternary(const float *x, int64_t numel, float threshold, int64_t bits, uint8_t *out) {
    for (int64_t start = 0; start < numel; start += STRETCH) {
        int64_t width = numel - start < STRETCH ? numel - start : STRETCH;
        int8_t levels[STRETCH];
        if (width == STRETCH)
            for (int64_t i = 0; i < STRETCH; i++)
                levels[i] = (int8_t)((x[start + i] >= threshold) - (x[start + i] <= -threshold));
        else
            for (int64_t i = 0; i < width; i++)
                levels[i] = (int8_t)((x[start + i] >= threshold) - (x[start + i] <= -threshold));
        write_levels(levels, width, bits, out + start * bits / 8);
    }
}

static inline int8_t chosen(float x, float limit, float scale, uint32_t number) {
    float magnitude = __builtin_fabsf(x);
    magnitude = magnitude > limit ? limit : magnitude;
    int is_chosen = uniform(number) * scale < magnitude;
    return (int8_t)(is_chosen * ((x > 0) - (x < 0)));
}

/* The sign with probability min(|x|, limit) / scale, by the numbers of `key`. */
void pack_random_ternary(
    const float *x, int64_t numel, float limit, float scale, uint64_t key, int64_t bits, uint8_t *out) {
    for (int64_t start = 0; start < numel; start += STRETCH) {
        int64_t width = numel - start < STRETCH ? numel - start : STRETCH;
        int8_t levels[STRETCH];
        uint32_t numbers[STRETCH];
        random_stretch(key, start / STRETCH, numbers);
        if (width == STRETCH)
            for (int64_t i = 0; i < STRETCH; i++)
                levels[i] = chosen(x[start + i], limit, scale, numbers[i]);
        else
            for (int64_t i = 0; i < width; i++)
                levels[i] = chosen(x[start + i], limit, scale, numbers[i]);
        write_levels(levels, width, bits, out + start * bits / 8);
    }
}

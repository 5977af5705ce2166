/* Elements as integer levels of their block's scale, rounded to the nearest or at random, and packed. */
#include "../../../collectives/payloads/codec/native/philox.h"
#include "spread.h"

/* To the nearest integer, ties to even, for |x| < 2^22. */
static inline int32_t nearest(float x) {
    return (int32_t)(x + 0x1.8p23f - 0x1.8p23f);
}

static inline int32_t floor_of(float x) {
    int32_t towards_zero = (int32_t)x;
    return towards_zero - ((float)towards_zero > x);
}

/* Within +-most; NaN is 0. */
static inline float limited(float x, float most) {
    x = x == x ? x : 0;
    x = x > most ? most : x;
    return x < -most ? -most : x;
}

/* level = round(x / divisor * multiplier), within +-most; at random by the numbers of `key`. */
void pack_levels(
    const float *x, int64_t numel, const float *divisors, int64_t block_numel, float multiplier, float most,
    int64_t at_random, uint64_t key, int64_t bits, uint8_t *packed) {
    for (int64_t start = 0; start < numel; start += STRETCH) {
        int64_t width = numel - start < STRETCH ? numel - start : STRETCH;
        float relative[STRETCH];
        uint32_t numbers[STRETCH];
        uint8_t levels[STRETCH], bytes[STRETCH];
        quotients(x, divisors, block_numel, start, width, relative);
        if (at_random) {
            random_stretch(key, start / STRETCH, numbers);
            for (int64_t i = 0; i < STRETCH; i++)
                levels[i] = (uint8_t)floor_of(limited(relative[i] * multiplier + uniform(numbers[i]), most));
        } else
            for (int64_t i = 0; i < STRETCH; i++)
                levels[i] = (uint8_t)nearest(limited(relative[i] * multiplier, most));
        pack_low(levels, bits, bytes);
        write_bytes(bytes, width, bits, packed + start * bits / 8);
    }
}

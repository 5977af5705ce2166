/* Elements as integer levels of their block's scale, rounded to the nearest or at random, and packed. */
#include "../../../collectives/payloads/codec/native/parts.h"
#include "../../../collectives/payloads/codec/native/philox.h"
#include "nearest.h"
#include "spread.h"

/* Within +-most; NaN is 0. */
static inline float within(float x, float most) {
    x = x == x ? x : 0;
    x = x > most ? most : x;
    return x < -most ? -most : x;
}

static inline void round_to_nearest(struct stretch of, float multiplier, float most, uint8_t *levels) {
    for (int64_t i = 0; i < STRETCH; i++)
        levels[i] = (uint8_t)nearest(within(of.x[i] / of.divisor * multiplier, most));
}

/* In parts of a level, 2^23 of them: with a random number of 23 bits added, as many round up as are over. */
static inline void round_at_random(
    struct stretch of, float multiplier, float most, const uint32_t *numbers, uint8_t *levels) {
    for (int64_t i = 0; i < STRETCH; i++) {
        int32_t parts = nearest(within(of.x[i] / of.divisor * (multiplier * 0x1p23f), most * 0x1p23f));
        levels[i] = (uint8_t)((parts + (int32_t)(numbers[i] >> 9)) >> 23);
    }
}

/* level = round(x / divisor * multiplier), within +-most; at random by the numbers of `key`. */
void pack_levels(
    const float *const *starts, const int64_t *borders, int64_t numel, const float *divisors, int64_t block_numel, float multiplier, float most,
    int64_t at_random, uint64_t key, int64_t bits, uint8_t *packed) {
    struct parts x = {starts, borders, 0};
    for (int64_t start = 0; start < numel; start += STRETCH) {
        int64_t width = numel - start < STRETCH ? numel - start : STRETCH;
        float gathered[STRETCH], room[STRETCH];
        uint8_t levels[STRETCH], bytes[STRETCH];
        const float *here = elements_at(&x, start, width, gathered);
        struct stretch of = stretch_of(here, divisors, block_numel, start, width, room);
        if (at_random) {
            uint32_t numbers[SHARED];
            shared_stretch(key, start / STRETCH, numbers);
            round_at_random(of, multiplier, most, numbers, levels);
        } else
            round_to_nearest(of, multiplier, most, levels);
        pack_low(levels, bits, bytes);
        write_bytes(bytes, width, bits, packed + start * bits / 8);
    }
}

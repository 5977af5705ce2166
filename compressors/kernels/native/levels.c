/* Quantisation of elements to integer levels relative to their block's scale, rounded to the nearest or at random. */
#include "../../../collectives/payloads/codec/native/parts.h"
#include "../../../collectives/payloads/codec/native/philox.h"
#include "nearest.h"
#include "relative.h"

/* Clamps to +-limit; NaN becomes 0. */
static inline float clamp(float x, float limit) {
    x = x == x ? x : 0;
    x = x > limit ? limit : x;
    return x < -limit ? -limit : x;
}

static inline void round_to_nearest(struct relative_chunk chunk, float multiplier, float max_level, uint8_t *levels) {
    for (int64_t i = 0; i < CHUNK; i++)
        levels[i] = (uint8_t)nearest(clamp(chunk.x[i] / chunk.divisor * multiplier, max_level));
}

/* Computes the level in units of 2^-23, adds a random number of 23 bits and rounds down: rounding is then unbiased. */
static inline void round_at_random(
    struct relative_chunk chunk, float multiplier, float max_level, const uint32_t *numbers, uint8_t *levels) {
    for (int64_t i = 0; i < CHUNK; i++) {
        int32_t parts = nearest(clamp(chunk.x[i] / chunk.divisor * (multiplier * 0x1p23f), max_level * 0x1p23f));
        levels[i] = (uint8_t)((parts + (int32_t)(numbers[i] >> 9)) >> 23);
    }
}

/* Writes x / divisor * multiplier, rounded to the nearest or, if at_random, by the random numbers of `key`, and clamped
   to +-max_level, in two's complement: uint8 [ceil(numel * bits / 8)]; bits: 2, 4 or 8. starts, borders: x, see `struct
   parts`. divisors: fp32 [ceil(numel / block_numel)]. */
void pack_levels(
    const float *const *starts, const int64_t *borders, int64_t numel, const float *divisors, int64_t block_numel,
    float multiplier, float max_level, int64_t at_random, uint64_t key, int64_t bits, uint8_t *packed) {
    struct parts x = {starts, borders, 0};
    for (int64_t start = 0; start < numel; start += CHUNK) {
        int64_t width = numel - start < CHUNK ? numel - start : CHUNK;
        float gathered[CHUNK], divided[CHUNK];
        uint8_t levels[CHUNK], bytes[CHUNK];
        const float *here = elements_at(&x, start, width, gathered);
        struct relative_chunk chunk = relative_to_blocks(here, divisors, block_numel, start, width, divided);
        if (at_random) {
            uint32_t numbers[SHARED_STRETCH];
            shared_stretch(key, start / CHUNK, numbers);
            round_at_random(chunk, multiplier, max_level, numbers, levels);
        } else
            round_to_nearest(chunk, multiplier, max_level, levels);
        pack_low(levels, bits, bytes);
        write_bytes(bytes, width, bits, packed + start * bits / 8);
    }
}

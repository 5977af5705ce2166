/* Elements as signed powers of two relative to their block's scale, rounded at random without bias, and packed. */
#include "../../../collectives/payloads/codec/native/floats.h"
#include "../../../collectives/payloads/codec/native/parts.h"
#include "../../../collectives/payloads/codec/native/philox.h"
#include "spread.h"

/* The code of x in [-1, 1]: 0 for zero, j for 2^(1-j), and the top bit where negative; NaN is zero.

   Added to the mantissa's 23 bits a random number of as many carries into the exponent with the probability that is
   wanted. Below the smallest power that a code can name, that power is added first: what is over it in the mantissa is
   then the probability of it, or zero. */
static inline uint32_t code_of(float x, uint32_t number, uint32_t num_exponents) {
    float smallest = float_of((128 - num_exponents) << 23), magnitude = __builtin_fabsf(x);
    magnitude = magnitude == magnitude ? magnitude : 0;
    magnitude = magnitude > 1 ? 1 : magnitude;
    uint32_t is_below = magnitude < smallest;
    magnitude += is_below ? smallest : 0;
    uint32_t exponent = ((bits_of(magnitude) + (number >> 9)) >> 23) - is_below;
    uint32_t code = (128 - exponent) & num_exponents, sign = (bits_of(x) >> 31) * (num_exponents + 1);
    return code | (sign & (code + num_exponents)); /* no sign of zero */
}

/* `scales`: fp32 [num_blocks], powers of two. */
void pack_powers(
    const float *const *starts, const int64_t *borders, int64_t numel, const float *scales, int64_t block_numel, uint64_t key, int64_t bits,
    uint8_t *packed) {
    uint32_t num_exponents = (1u << (bits - 1)) - 1;
    struct parts x = {starts, borders, 0};
    for (int64_t start = 0; start < numel; start += STRETCH) {
        int64_t width = numel - start < STRETCH ? numel - start : STRETCH;
        float gathered[STRETCH], room[STRETCH];
        uint32_t numbers[SHARED];
        uint8_t codes[STRETCH], bytes[STRETCH];
        const float *here = elements_at(&x, start, width, gathered);
        struct stretch of = stretch_of(here, scales, block_numel, start, width, room);
        shared_stretch(key, start / STRETCH, numbers);
        for (int64_t i = 0; i < STRETCH; i++)
            codes[i] = (uint8_t)code_of(of.x[i] / of.divisor, numbers[i], num_exponents);
        pack_low(codes, bits, bytes);
        write_bytes(bytes, width, bits, packed + start * bits / 8);
    }
}

/* Elements as signed powers of two relative to their block's scale, rounded at random without bias, and packed. */
#include "../../../collectives/payloads/codec/native/philox.h"
#include "spread.h"

/* The code of x in [-1, 1]: 0 for zero, j for 2^(1-j), and the top bit where negative. Added to the mantissa's 23 bits
   a random number of as many carries into the exponent with the probability that is wanted. */
static inline uint32_t code_of(float x, uint32_t chance, int32_t num_exponents, float below_smallest) {
    int32_t bits, smallest = 128 - num_exponents;
    __builtin_memcpy(&bits, &x, 4);
    int32_t magnitude = bits & 0x7fffffff;
    float share = __builtin_fabsf(x) * below_smallest * 0x1p23f; /* of the smallest power, in chances */
    int32_t exponent_above = (magnitude + (int32_t)chance) >> 23;
    int32_t exponent_below = (float)(int32_t)chance < share ? smallest : smallest - 1;
    int32_t code = 128 - (magnitude < smallest << 23 ? exponent_below : exponent_above);
    code = code > num_exponents ? 0 : code;
    return (uint32_t)(bits < 0 && code ? code + num_exponents + 1 : code);
}

/* `scales`: fp32 [num_blocks], powers of two; NaN is sent as 0. */
void pack_powers(
    const float *x, int64_t numel, const float *scales, int64_t block_numel, uint64_t key, int64_t bits,
    uint8_t *packed) {
    int32_t num_exponents = (1 << (bits - 1)) - 1;
    float below_smallest = bits == 8 ? 0x1p126f : 0x1p6f;
    for (int64_t start = 0; start < numel; start += STRETCH) {
        int64_t width = numel - start < STRETCH ? numel - start : STRETCH;
        float relative[STRETCH];
        uint32_t numbers[STRETCH];
        quotients(x, scales, block_numel, start, width, relative);
        random_stretch(key, start / STRETCH, numbers);
        uint8_t codes[STRETCH], bytes[STRETCH];
        for (int64_t i = 0; i < STRETCH; i++) {
            float r = relative[i] == relative[i] ? relative[i] : 0;
            r = r > 1 ? 1 : r;
            r = r < -1 ? -1 : r;
            codes[i] = (uint8_t)code_of(r, numbers[i] >> 9, num_exponents, below_smallest);
        }
        pack_low(codes, bits, bytes);
        write_bytes(bytes, width, bits, packed + start * bits / 8);
    }
}

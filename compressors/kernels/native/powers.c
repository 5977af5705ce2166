/* Quantisation to signed powers of two relative to the block's scale, rounded at random without bias. */
#include "../../../collectives/payloads/codec/native/floats.h"
#include "../../../collectives/payloads/codec/native/parts.h"
#include "../../../collectives/payloads/codec/native/philox.h"
#include "relative.h"

/* Returns the code of x in [-1, 1]: 0 for zero, j for 2^(1-j), plus the top bit if negative. NaN becomes zero.

   A random number of 23 bits is added to the mantissa, and carries into the exponent with the probability that makes
   rounding unbiased. A magnitude below the smallest power of the codes becomes that power or zero: the power is added
   first, so that the mantissa is the probability of the power. */
static inline uint32_t code_of(float x, uint32_t number, uint32_t num_exponents) {
    float smallest = float_of((128 - num_exponents) << 23), magnitude = __builtin_fabsf(x);
    magnitude = magnitude == magnitude ? magnitude : 0;
    magnitude = magnitude > 1 ? 1 : magnitude;
    uint32_t is_below = magnitude < smallest;
    magnitude += is_below ? smallest : 0;
    uint32_t exponent = ((bits_of(magnitude) + (number >> 9)) >> 23) - is_below;
    uint32_t code = (128 - exponent) & num_exponents, sign = (bits_of(x) >> 31) * (num_exponents + 1);
    return code | (sign & (code + num_exponents)); /* no sign for zero */
}

/* Codes x / scale with the random numbers of `key`: packed, uint8 [ceil(numel * bits / 8)]; bits: 4 or 8. starts,
   borders: x, see `struct parts`. scales: fp32 [ceil(numel / block_numel)], powers of two. */
void pack_powers(
    const float *const *starts, const int64_t *borders, int64_t numel, const float *scales, int64_t block_numel,
    uint64_t key, int64_t bits, uint8_t *packed) {
    uint32_t num_exponents = (1u << (bits - 1)) - 1;
    struct parts x = {starts, borders, 0};
    for (int64_t start = 0; start < numel; start += CHUNK) {
        int64_t width = numel - start < CHUNK ? numel - start : CHUNK;
        float gathered[CHUNK], divided[CHUNK];
        uint32_t numbers[SHARED_STRETCH];
        uint8_t codes[CHUNK], bytes[CHUNK];
        const float *here = elements_at(&x, start, width, gathered);
        struct relative_chunk chunk = relative_to_blocks(here, scales, block_numel, start, width, divided);
        shared_stretch(key, start / CHUNK, numbers);
        for (int64_t i = 0; i < CHUNK; i++)
            codes[i] = (uint8_t)code_of(chunk.x[i] / chunk.divisor, numbers[i], num_exponents);
        pack_low(codes, bits, bytes);
        write_bytes(bytes, width, bits, packed + start * bits / 8);
    }
}

/* Coding of the values of sparse payloads in 2 or 8 bits, and the numbers that the values of a block share.

   Sums are exact in any order, because they are of integers: magnitudes in units of a small power of two. */
#include "../../../collectives/payloads/codec/native/floats.h"
#include "magnitude.h"
#include "nearest.h"

#define LONGEST_BLOCK 4096
#define PRECISION 40 /* bits of a magnitude as an integer: a sum of 4096 fits into 52 bits */
#define ROUNDS 4
#define SIGMA_LEVELS 4
/* Block lengths are multiples of 8: vectors of 8 leave no remainder, but four interleaved vectors would. */
#define VECTORIZE_BY_8 _Pragma("clang loop vectorize_width(8) interleave_count(1)")
#define SMALLEST_EXPONENT 874 /* biased fp64 exponent of the smallest fp32 number above 0 */
#define LARGEST 0x1.fep127f /* the largest bf16 number */

static inline double fp64_of(int64_t bits) {
    double x;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
}

static inline int64_t bits_of_fp64(double x) {
    int64_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* Returns |x|, at most LARGEST, also for NaN. */
static inline float clamped_magnitude(float x) {
    float abs_value = float_of((uint32_t)magnitude((int32_t)bits_of(x)));
    return abs_value > LARGEST ? LARGEST : abs_value;
}

/* Clamps x to +-LARGEST; NaN becomes LARGEST. */
static inline float clamped_value(float x) { return x < 0 ? -clamped_magnitude(x) : clamped_magnitude(x); }

static inline float largest_clamped_magnitude(const float *x, int64_t count) {
    int32_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        int32_t abs_value = magnitude((int32_t)bits_of(x[i]));
        largest = abs_value > largest ? abs_value : largest;
    }
    return clamped_magnitude(float_of((uint32_t)largest));
}

/* Computes 2^bits / (the power of two above x), and its inverse. */
static inline void integer_scale(float x, int64_t bits, double *scale, double *inverse) {
    int64_t exponent = bits_of_fp64(x) >> 52;
    exponent = exponent > SMALLEST_EXPONENT ? exponent : SMALLEST_EXPONENT;
    *scale = fp64_of((2045 - exponent + bits) << 52);
    *inverse = fp64_of((exponent + 1 - bits) << 52);
}

/* Rounds to the nearest integer, ties to even; |x| must be less than 2^51. */
static inline int64_t to_integer(double x) { return bits_of_fp64(x + 0x1.8p52) - bits_of_fp64(0x1.8p52); }

/* A tensor from which decoded values are subtracted, at these positions; `left` may be null. */
struct residual {
    const int64_t *positions;
    float *left;
};

/* Prefetches for entries start..stop-1, as far as they are below `count`. */
static inline void prefetch_residual(struct residual residual, int64_t start, int64_t stop, int64_t count) {
    if (residual.left)
        for (int64_t i = start; i < stop && i < count; i++)
            __builtin_prefetch(residual.left + residual.positions[i], 1);
}

static inline void subtract_from_residual(struct residual residual, const float *decoded, int64_t start, int64_t stop) {
    if (residual.left)
        for (int64_t i = start; i < stop; i++)
            residual.left[residual.positions[i]] -= decoded[i];
}

/* Packs four 2-bit codes per byte; reads codes up to the next multiple of four. */
static inline void pack_fours(const uint8_t *codes, int64_t count, uint8_t *packed) {
    for (int64_t i = 0; i < count; i += 4)
        *packed++ = (uint8_t)(codes[i] | codes[i + 1] << 2 | codes[i + 2] << 4 | codes[i + 3] << 6);
}

/* Computes the means, bf16, of the small and the large magnitudes of a block, by ROUNDS rounds of Lloyd's method. */
static void two_means(const float *abs_values, int64_t count, float largest, uint16_t *means) {
    int64_t integers[LONGEST_BLOCK], total = 0;
    double scale, inverse;
    integer_scale(largest, PRECISION, &scale, &inverse);
    VECTORIZE_BY_8 for (int64_t i = 0; i < count; i++) {
        integers[i] = to_integer(abs_values[i] * scale);
        total += integers[i];
    }
    double low = (double)total / (double)count, high = low;
    for (int round = 0; round < ROUNDS; round++) {
        int64_t middle = (int64_t)((low + high) / 2), large = 0, num_large = 0;
        VECTORIZE_BY_8 for (int64_t i = 0; i < count; i++) {
            int64_t is_large = -(int64_t)(integers[i] > middle);
            large += integers[i] & is_large;
            num_large -= is_large;
        }
        low = (double)(total - large) / (double)(count - num_large); /* no division by 0: the smallest is never large */
        high = num_large ? (double)large / (double)num_large : low;
    }
    means[0] = to_bf16((float)(low * inverse));
    means[1] = to_bf16((float)(high * inverse));
}

/* Codes values, fp32 [count], in packed, uint8 [ceil(count / 4)]: bit 0 is the sign, bit 1 chooses the larger
   magnitude. block: a multiple of 4, at most LONGEST_BLOCK; magnitudes: bf16 [blocks, 2]; decoded: fp32 [count]. If
   `left`, fp32, is not null, decoded values are subtracted from its elements at positions, int64 [count]. */
void code_two_magnitudes(const float *values, int64_t count, int64_t block, uint16_t *magnitudes, uint8_t *packed,
                         float *decoded, const int64_t *positions, float *left) {
    struct residual residual = {positions, left};
    float abs_values[LONGEST_BLOCK];
    uint8_t codes[LONGEST_BLOCK + 3];
    for (int64_t start = 0; start < count; start += block, magnitudes += 2) {
        int64_t length = count - start < block ? count - start : block;
        const float *x = values + start;
        prefetch_residual(residual, start + block, start + 2 * block, count);
        VECTORIZE_BY_8 for (int64_t i = 0; i < length; i++)
            abs_values[i] = clamped_magnitude(x[i]);
        two_means(abs_values, length, largest_clamped_magnitude(x, length), magnitudes);
        float low = from_bf16(magnitudes[0]), high = from_bf16(magnitudes[1]);
        double middle = ((double)low + (double)high) / 2;
        float threshold = (float)middle; /* becomes the largest float <= middle, to compare in fp32 instead of fp64 */
        threshold = threshold > middle ? float_of(bits_of(threshold) - 1) : threshold;
        VECTORIZE_BY_8 for (int64_t i = 0; i < length; i++) {
            int is_large = abs_values[i] > threshold, is_negative = x[i] < 0;
            float abs_value = is_large ? high : low;
            codes[i] = (uint8_t)(is_negative | is_large << 1);
            decoded[start + i] = is_negative ? 0 - abs_value : abs_value;
        }
        __builtin_memset(codes + length, 0, 3);
        pack_fours(codes, length, packed + start / 4);
        subtract_from_residual(residual, decoded, start, start + length);
    }
}

struct levels {
    double mean, width;
    int64_t borders[SIGMA_LEVELS]; /* borders[i]: smallest integer of level i, i >= 1 */
};

static int64_t level_of(int64_t integer, const struct levels *levels) {
    double level = ((double)integer - levels->mean) / levels->width + SIGMA_LEVELS / 2;
    level = level > SIGMA_LEVELS ? SIGMA_LEVELS : level;
    level = level < -1 ? -1 : level;
    return to_integer(level);
}

/* Returns levels 1.5 standard deviations wide around the mean, from the sums of integers and of their squares. */
static struct levels sigma_levels(int64_t count, int64_t sum, int64_t squares) {
    struct levels levels = {(double)sum / (double)count, 0, {0}};
    double variance = ((double)squares - (double)sum * levels.mean) / (double)(count - 1);
    levels.width = 6 * __builtin_sqrt(variance) / SIGMA_LEVELS;
    levels.width = levels.width > 0 && levels.width < __builtin_inf() ? levels.width : 1;
    for (int level = 1; level < SIGMA_LEVELS; level++) {
        int64_t border = (int64_t)(levels.mean + (level - SIGMA_LEVELS / 2 - 0.5) * levels.width);
        while (level_of(border, &levels) < level)
            border++;
        while (level_of(border - 1, &levels) >= level)
            border--;
        levels.borders[level] = border;
    }
    return levels;
}

/* Codes values, fp32 [count], by four levels. bits: precision of a value as an integer; table: fp32 [4], the mean of
   each level's values; packed, decoded, positions, left: see `code_two_magnitudes`. */
void code_sigma(const float *values, int64_t count, int64_t bits, float *table, uint8_t *packed, float *decoded,
                const int64_t *positions, float *left) {
    struct residual residual = {positions, left};
    int64_t sum = 0, squares = 0;
    int64_t sums[SIGMA_LEVELS + 1] = {0}, counts[SIGMA_LEVELS + 1] = {0}; /* of each level and all above it */
    double scale, inverse;
    if (!count)
        return;
    integer_scale(largest_clamped_magnitude(values, count), bits, &scale, &inverse);
    for (int64_t i = 0; i < count; i++) {
        int64_t integer = to_integer(clamped_value(values[i]) * scale);
        sum += integer;
        squares += integer * integer;
    }
    struct levels levels = sigma_levels(count, sum, squares);
    for (int64_t start = 0; start < count; start += VALUE_CHUNK) {
        uint8_t codes[VALUE_CHUNK] = {0};
        int64_t length = count - start < VALUE_CHUNK ? count - start : VALUE_CHUNK;
        for (int64_t i = 0; i < length; i++) {
            int64_t integer = to_integer(clamped_value(values[start + i]) * scale);
            for (int level = 1; level < SIGMA_LEVELS; level++) {
                int64_t reaches = -(int64_t)(integer >= levels.borders[level]);
                sums[level] += integer & reaches;
                counts[level] -= reaches;
                codes[i] -= (uint8_t)reaches;
            }
        }
        pack_fours(codes, length, packed + start / 4);
    }
    sums[0] = sum;
    counts[0] = count;
    for (int level = 0; level < SIGMA_LEVELS; level++) {
        int64_t total = sums[level] - sums[level + 1], num = counts[level] - counts[level + 1];
        table[level] = num ? (float)((double)total / (double)num * inverse) + 0.0f : 0;
    }
    for (int64_t start = 0; start < count; start += VALUE_CHUNK) {
        int64_t stop = count - start < VALUE_CHUNK ? count : start + VALUE_CHUNK;
        prefetch_residual(residual, stop, stop + VALUE_CHUNK, count);
        for (int64_t i = start; i < stop; i++)
            decoded[i] = table[packed[i >> 2] >> 2 * (i & 3) & 3];
        subtract_from_residual(residual, decoded, start, stop);
    }
}

/* Codes values, fp32 [count], as int8 multiples of steps, fp32 [blocks], 1/127 of each block's largest magnitude.
   codes: uint8 [count]; decoded, positions, left: see `code_two_magnitudes`. */
void code_int8(const float *values, int64_t count, int64_t block, float *steps, uint8_t *codes, float *decoded,
               const int64_t *positions, float *left) {
    struct residual residual = {positions, left};
    for (int64_t start = 0; start < count; start += block) {
        int64_t stop = count - start < block ? count : start + block;
        float step = largest_clamped_magnitude(values + start, stop - start) / 127, divisor = step > 0 ? step : 1;
        *steps++ = step;
        prefetch_residual(residual, stop, stop + block, count);
        for (int64_t i = start; i < stop; i++) {
            int32_t integer = nearest(clamped(clamped_value(values[i]) / divisor, 127));
            codes[i] = (uint8_t)integer;
            decoded[i] = (float)integer * step;
        }
        subtract_from_residual(residual, decoded, start, stop);
    }
}

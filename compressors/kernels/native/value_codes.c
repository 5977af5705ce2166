/* The values of sparse payloads as codes of 2 or 8 bits, and the numbers that blocks of codes share.

   Sums are of whole numbers, so their order does not matter: magnitudes are counted in parts of a power of two above
   the largest one. */
#include "../../../collectives/payloads/codec/native/floats.h"
#include "magnitude.h"
#include "nearest.h"

#define LONGEST_BLOCK 4096
#define PRECISION 40 /* bits of a magnitude in a sum: 4096 of them fill 52 */
#define ROUNDS 4
#define LEVELS 4
/* Blocks are short: vectors of 8 leave no rest of a multiple of 8, four vectors at once would. */
#define IN_EIGHTS _Pragma("clang loop vectorize_width(8) interleave_count(1)")
#define SMALLEST 874 /* biased exponent, as fp64, of the smallest fp32 number above 0 */
#define LARGEST 0x1.fep127f /* in bf16 */

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

/* |x|, at most LARGEST; NaN counts as infinite. */
static inline float size_of(float x) {
    float size = float_of((uint32_t)magnitude((int32_t)bits_of(x)));
    return size > LARGEST ? LARGEST : size;
}

/* x with this size; NaN is positive. */
static inline float within_largest(float x) { return x < 0 ? -size_of(x) : size_of(x); }

static inline float largest_size(const float *x, int64_t count) {
    int32_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        int32_t size = magnitude((int32_t)bits_of(x[i]));
        largest = size > largest ? size : largest;
    }
    return size_of(float_of((uint32_t)largest));
}

/* 2^bits / (the power of two above x), and its inverse. */
static inline void scale_of(float x, int64_t bits, double *scale, double *inverse) {
    int64_t exponent = bits_of_fp64(x) >> 52;
    exponent = exponent > SMALLEST ? exponent : SMALLEST;
    *scale = fp64_of((2045 - exponent + bits) << 52);
    *inverse = fp64_of((exponent + 1 - bits) << 52);
}

/* The nearest whole number, ties to even, of |x| < 2^51. */
static inline int64_t whole(double x) { return bits_of_fp64(x + 0x1.8p52) - bits_of_fp64(0x1.8p52); }

/* Where what the codes stand for is taken away; `left` may be NULL. */
struct rest {
    const int64_t *positions;
    float *left;
};

/* Asks memory for what will be taken from soon, of `count` entries at most. */
static inline void fetch_rest(struct rest of, int64_t start, int64_t stop, int64_t count) {
    if (of.left)
        for (int64_t i = start; i < stop && i < count; i++)
            __builtin_prefetch(of.left + of.positions[i], 1);
}

static inline void take_from_rest(struct rest of, const float *arrived, int64_t start, int64_t stop) {
    if (of.left)
        for (int64_t i = start; i < stop; i++)
            of.left[of.positions[i]] -= arrived[i];
}

/* Four codes of two bits per byte; codes: up to the next multiple of four. */
static inline void pack_pairs(const uint8_t *codes, int64_t count, uint8_t *packed) {
    for (int64_t i = 0; i < count; i += 4)
        *packed++ = (uint8_t)(codes[i] | codes[i + 1] << 2 | codes[i + 2] << 4 | codes[i + 3] << 6);
}

/* Two magnitudes, in bf16, for a block: means of the small and of the large ones after ROUNDS rounds of Lloyd's method,
   which begins at the mean. */
static void two_means(const float *sizes, int64_t count, float largest, uint16_t *means) {
    int64_t wholes[LONGEST_BLOCK], total = 0;
    double scale, inverse;
    scale_of(largest, PRECISION, &scale, &inverse);
    IN_EIGHTS for (int64_t i = 0; i < count; i++) {
        wholes[i] = whole(sizes[i] * scale);
        total += wholes[i];
    }
    double low = (double)total / (double)count, high = low;
    for (int round = 0; round < ROUNDS; round++) {
        int64_t middle = (int64_t)((low + high) / 2), large = 0, num_large = 0;
        IN_EIGHTS for (int64_t i = 0; i < count; i++) {
            int64_t is_large = -(int64_t)(wholes[i] > middle);
            large += wholes[i] & is_large;
            num_large -= is_large;
        }
        low = (double)(total - large) / (double)(count - num_large); /* the smallest is never large */
        high = num_large ? (double)large / (double)num_large : low;
    }
    means[0] = to_bf16((float)(low * inverse));
    means[1] = to_bf16((float)(high * inverse));
}

/* values: fp32 [count]; block: a multiple of 4, at most LONGEST_BLOCK; magnitudes: bf16 [2 per block]; packed: codes of
   two bits; arrived: fp32 [count], what the codes stand for; left: NULL, or fp32 of which elements at `positions` become
   smaller by that. */
void code_two_magnitudes(const float *values, int64_t count, int64_t block, uint16_t *magnitudes, uint8_t *packed,
                         float *arrived, const int64_t *positions, float *left) {
    struct rest rest = {positions, left};
    float sizes[LONGEST_BLOCK];
    uint8_t codes[LONGEST_BLOCK + 3];
    for (int64_t start = 0; start < count; start += block, magnitudes += 2) {
        int64_t length = count - start < block ? count - start : block;
        const float *x = values + start;
        fetch_rest(rest, start + block, start + 2 * block, count);
        IN_EIGHTS for (int64_t i = 0; i < length; i++)
            sizes[i] = size_of(x[i]);
        two_means(sizes, length, largest_size(x, length), magnitudes);
        float low = from_bf16(magnitudes[0]), high = from_bf16(magnitudes[1]);
        double middle = ((double)low + (double)high) / 2;
        float below = (float)middle; /* sizes above `middle` are those above the largest float up to it */
        below = below > middle ? float_of(bits_of(below) - 1) : below;
        IN_EIGHTS for (int64_t i = 0; i < length; i++) {
            int is_large = sizes[i] > below, is_negative = x[i] < 0;
            float size = is_large ? high : low;
            codes[i] = (uint8_t)(is_negative | is_large << 1);
            arrived[start + i] = is_negative ? 0 - size : size;
        }
        __builtin_memset(codes + length, 0, 3);
        pack_pairs(codes, length, packed + start / 4);
        take_from_rest(rest, arrived, start, start + length);
    }
}

struct levels {
    double mean, width;
    int64_t borders[LEVELS]; /* the smallest whole number of each level but the first */
};

static int64_t level_of(int64_t number, const struct levels *by) {
    double level = ((double)number - by->mean) / by->width + LEVELS / 2;
    level = level > LEVELS ? LEVELS : level;
    level = level < -1 ? -1 : level;
    return whole(level);
}

/* Levels of 1.5 standard deviations, by the sums of numbers and of their squares. */
static struct levels levels_by(int64_t count, int64_t sum, int64_t squares) {
    struct levels by = {(double)sum / (double)count, 0, {0}};
    double variance = ((double)squares - (double)sum * by.mean) / (double)(count - 1);
    by.width = 6 * __builtin_sqrt(variance) / LEVELS;
    by.width = by.width > 0 && by.width < __builtin_inf() ? by.width : 1;
    for (int level = 1; level < LEVELS; level++) {
        int64_t border = (int64_t)(by.mean + (level - LEVELS / 2 - 0.5) * by.width);
        while (level_of(border, &by) < level)
            border++;
        while (level_of(border - 1, &by) >= level)
            border--;
        by.borders[level] = border;
    }
    return by;
}

/* values: fp32 [count]; bits: of a value in a sum; table: the means of four levels of values; packed:
   codes of two bits; arrived, positions, left: as above. */
void code_sigma(const float *values, int64_t count, int64_t bits, float *table, uint8_t *packed, float *arrived,
                const int64_t *positions, float *left) {
    struct rest rest = {positions, left};
    int64_t sum = 0, squares = 0, sums[LEVELS + 1] = {0}, counts[LEVELS + 1] = {0}; /* of a level and all above */
    double scale, inverse;
    if (!count)
        return;
    scale_of(largest_size(values, count), bits, &scale, &inverse);
    for (int64_t i = 0; i < count; i++) {
        int64_t number = whole(within_largest(values[i]) * scale);
        sum += number;
        squares += number * number;
    }
    struct levels by = levels_by(count, sum, squares);
    for (int64_t start = 0; start < count; start += AT_ONCE) {
        uint8_t codes[AT_ONCE] = {0};
        int64_t length = count - start < AT_ONCE ? count - start : AT_ONCE;
        for (int64_t i = 0; i < length; i++) {
            int64_t number = whole(within_largest(values[start + i]) * scale);
            for (int level = 1; level < LEVELS; level++) {
                int64_t reaches = -(int64_t)(number >= by.borders[level]);
                sums[level] += number & reaches;
                counts[level] -= reaches;
                codes[i] -= (uint8_t)reaches;
            }
        }
        pack_pairs(codes, length, packed + start / 4);
    }
    sums[0] = sum;
    counts[0] = count;
    for (int level = 0; level < LEVELS; level++) {
        int64_t total = sums[level] - sums[level + 1], number = counts[level] - counts[level + 1];
        table[level] = number ? (float)((double)total / (double)number * inverse) + 0.0f : 0;
    }
    for (int64_t start = 0; start < count; start += AT_ONCE) {
        int64_t stop = count - start < AT_ONCE ? count : start + AT_ONCE;
        fetch_rest(rest, stop, stop + AT_ONCE, count);
        for (int64_t i = start; i < stop; i++)
            arrived[i] = table[packed[i >> 2] >> 2 * (i & 3) & 3];
        take_from_rest(rest, arrived, start, stop);
    }
}

/* values: fp32 [count]; steps: fp32 [1 per block], 1/127 of the block's largest magnitude; codes: the nearest number of
   steps; arrived, positions, left: as above. */
void code_int8(const float *values, int64_t count, int64_t block, float *steps, uint8_t *codes, float *arrived,
               const int64_t *positions, float *left) {
    struct rest rest = {positions, left};
    for (int64_t start = 0; start < count; start += block) {
        int64_t stop = count - start < block ? count : start + block;
        float step = largest_size(values + start, stop - start) / 127, divisor = step > 0 ? step : 1;
        *steps++ = step;
        fetch_rest(rest, stop, stop + block, count);
        for (int64_t i = start; i < stop; i++) {
            int32_t number = nearest(limited(within_largest(values[i]) / divisor, 127));
            codes[i] = (uint8_t)number;
            arrived[i] = (float)number * step;
        }
        take_from_rest(rest, arrived, start, stop);
    }
}

/* Elements as -1, 0 or +1: beyond a threshold, or at random without bias. */
#include "../../../collectives/payloads/codec/native/philox.h"
#include "masks.h"
#include "sum_by_blocks.h"
#include "sums.h"

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* Bit j of the word goes to bit 2 * j, four at a time in reverse: bits of the codes in a byte, the first on top. */
static inline uint64_t spread(uint32_t word) {
    uint64_t bits = word;
    bits = (bits & 0x55555555) << 1 | (bits >> 1 & 0x55555555);
    bits = (bits & 0x33333333) << 2 | (bits >> 2 & 0x33333333);
    bits = (bits | bits << 16) & 0x0000ffff0000ffff;
    bits = (bits | bits << 8) & 0x00ff00ff00ff00ff;
    bits = (bits | bits << 4) & 0x0f0f0f0f0f0f0f0f;
    bits = (bits | bits << 2) & 0x3333333333333333;
    return (bits | bits << 1) & 0x5555555555555555;
}

/* Codes of at most SUM_STRETCH elements. Returns how many are not 0. */
static inline int64_t pack_codes(const float *x, int64_t width, float threshold, uint8_t *out) {
    uint64_t positive[SUM_STRETCH / 64] = {0}, coded[SUM_STRETCH / 64] = {0}, codes[SUM_STRETCH / 32];
    uint32_t halves[2][SUM_STRETCH / 32];
    int64_t count = 0;
    for (int64_t i = 0; i < width; i += 64) {
        uint64_t above = at_least_of_64(x + i, width - i, threshold), below = at_most_of_64(x + i, width - i, -threshold);
        positive[i / 64] = above & ~below;
        coded[i / 64] = above ^ below;
        count += __builtin_popcountll(coded[i / 64]);
    }
    __builtin_memcpy(halves[0], positive, sizeof positive);
    __builtin_memcpy(halves[1], coded, sizeof coded);
    for (int64_t i = 0; i < SUM_STRETCH / 32; i++)
        codes[i] = spread(halves[0][i]) | spread(halves[1][i]) << 1;
    __builtin_memcpy(out, codes, (uint64_t)(width + 3) / 4);
    return count;
}

/* The sign where |x| >= threshold, of at most SUM_STRETCH elements: as bytes, or two bits each. */
static inline void write_signs(const float *x, int64_t width, float threshold, int64_t bits, uint8_t *out) {
    if (bits == 8)
        for (int64_t i = 0; i < width; i++)
            out[i] = (uint8_t)((x[i] >= threshold) - (x[i] <= -threshold));
    else
        pack_codes(x, width, threshold, out);
}

/* Of all elements. */
void pack_ternary(const float *x, int64_t numel, float threshold, int64_t bits, uint8_t *out) {
    for (int64_t i = 0; i < numel; i += SUM_STRETCH)
        write_signs(x + i, smaller(SUM_STRETCH, numel - i), threshold, bits, out + i * bits / 8);
}

struct coding {
    float threshold;
    uint8_t *out;
};

static inline void code_block(float *x, int64_t start, int64_t width, void *context) {
    struct coding *to = context;
    float threshold = to->threshold;
    pack_codes(x, width, threshold, to->out + start / 4);
    for (int64_t i = 0; i < width; i++)
        x[i] -= x[i] >= threshold ? threshold : x[i] <= -threshold ? -threshold : 0.0f;
}

/* Codes of gradient + residual; `left`: the same less what the codes stand for, `threshold` with a sign. */
void pack_ternary_of_sum(
    const float *gradient, const float *residual, int64_t numel, float threshold, uint8_t *out, float *left) {
    struct coding to = {threshold, out};
    sum_by_blocks(gradient, residual, numel, SUM_STRETCH, code_block, &to, left);
}

/* |x| where it reaches a threshold; NaN does not. */
static inline double coded_term(float x, float threshold) {
    float magnitude = __builtin_fabsf(x);
    return magnitude >= threshold ? magnitude : 0;
}

/* Codes alone. Returns the sum of the magnitudes whose code is not 0; `count`: how many these are. */
double pack_ternary_and_sum(const float *x, int64_t numel, float threshold, uint8_t *out, int64_t *count) {
    struct folding waiting = {.counts = {0}};
    *count = 0;
    for (int64_t i = 0; i < numel; i += SUM_STRETCH) {
        int64_t width = smaller(SUM_STRETCH, numel - i);
        *count += pack_codes(x + i, width, threshold, out + i / 4);
        add_sum(&waiting, stretch_sum(x + i, width, coded_term, threshold));
    }
    return finished(&waiting);
}

/* x with probability min(|x|, limit) / scale, else 0. */
static inline float kept(float x, float limit, float scale, uint32_t number) {
    float magnitude = __builtin_fabsf(x);
    magnitude = magnitude > limit ? limit : magnitude;
    return uniform(number) * scale < magnitude ? x : 0;
}

/* The sign with that probability, by the numbers of `key`. */
void pack_random_ternary(
    const float *x, int64_t numel, float limit, float scale, uint64_t key, int64_t bits, uint8_t *out) {
    float chosen[SUM_STRETCH];
    uint32_t numbers[SUM_STRETCH];
    for (int64_t start = 0; start < numel; start += SUM_STRETCH) {
        int64_t width = smaller(SUM_STRETCH, numel - start);
        for (int64_t i = 0; i < width; i += SHARED)
            shared_stretch(key, (start + i) / SHARED, numbers + i);
        for (int64_t i = 0; i < width; i++)
            chosen[i] = kept(x[start + i], limit, scale, numbers[i]);
        write_signs(chosen, width, 0x1p-149f, bits, out + start * bits / 8);
    }
}

double squares_and_largest(const float *x, int64_t numel, float *largest);

/* Codes of each of some layers, with a number that keys its random numbers: elements are clipped at `clip` root mean
   squares, unless that is 0. scales: the largest magnitude then. The codes of a layer begin with a byte. */
void random_ternary_of_layers(
    const float *const *starts, const int64_t *borders, int64_t num_layers, double clip, const uint64_t *keys,
    float *scales, uint8_t *out) {
    for (int64_t layer = 0; layer < num_layers; layer++) {
        int64_t numel = borders[layer + 1] - borders[layer];
        float largest, limit = __builtin_inff();
        double squares = squares_and_largest(starts[layer], numel, &largest);
        if (clip != 0)
            limit = (float)(clip * __builtin_sqrt(squares / (double)numel));
        scales[layer] = largest < limit ? largest : limit;
        pack_random_ternary(starts[layer], numel, limit, scales[layer], keys[layer], 2, out);
        out += (numel + 3) / 4;
    }
}

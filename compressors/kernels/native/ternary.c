/* Ternary quantisation to -1, 0 or +1, by a threshold or at random without bias. */
#include "../../../collectives/payloads/codec/native/philox.h"
#include "masks.h"
#include "sum_by_blocks.h"
#include "sums.h"

static inline int64_t min_int64(int64_t a, int64_t b) { return a < b ? a : b; }

/* Reverses each four bits and moves bit j to bit 2 * j: the first code of a byte is in its highest bits. */
static inline uint64_t spread_bits(uint32_t word) {
    uint64_t bits = word;
    bits = (bits & 0x55555555) << 1 | (bits >> 1 & 0x55555555);
    bits = (bits & 0x33333333) << 2 | (bits >> 2 & 0x33333333);
    bits = (bits | bits << 16) & 0x0000ffff0000ffff;
    bits = (bits | bits << 8) & 0x00ff00ff00ff00ff;
    bits = (bits | bits << 4) & 0x0f0f0f0f0f0f0f0f;
    bits = (bits | bits << 2) & 0x3333333333333333;
    return (bits | bits << 1) & 0x5555555555555555;
}

/* Packs 2-bit codes of at most SUM_STRETCH elements. Returns how many are not 0. */
static inline int64_t pack_ternary_codes(const float *x, int64_t width, float threshold, uint8_t *out) {
    uint64_t positive[SUM_STRETCH / 64] = {0}, coded[SUM_STRETCH / 64] = {0}, codes[SUM_STRETCH / 32];
    uint32_t halves[2][SUM_STRETCH / 32];
    int64_t count = 0;
    for (int64_t i = 0; i < width; i += 64) {
        uint64_t above = at_least_mask_64(x + i, width - i, threshold);
        uint64_t below = at_most_mask_64(x + i, width - i, -threshold);
        positive[i / 64] = above & ~below;
        coded[i / 64] = above ^ below;
        count += __builtin_popcountll(coded[i / 64]);
    }
    __builtin_memcpy(halves[0], positive, sizeof positive);
    __builtin_memcpy(halves[1], coded, sizeof coded);
    for (int64_t i = 0; i < SUM_STRETCH / 32; i++)
        codes[i] = spread_bits(halves[0][i]) | spread_bits(halves[1][i]) << 1;
    __builtin_memcpy(out, codes, (uint64_t)(width + 3) / 4);
    return count;
}

/* Writes sign(x) if |x| >= threshold, else 0, as int8 (bits = 8) or packed codes (bits = 2). width <= SUM_STRETCH. */
static inline void write_signs(const float *x, int64_t width, float threshold, int64_t bits, uint8_t *out) {
    if (bits == 8)
        for (int64_t i = 0; i < width; i++)
            out[i] = (uint8_t)((x[i] >= threshold) - (x[i] <= -threshold));
    else
        pack_ternary_codes(x, width, threshold, out);
}

/* Writes signs as `write_signs` for all of x, fp32 [numel]; out: int8 [numel] or uint8 [ceil(numel / 4)]. */
void pack_ternary(const float *x, int64_t numel, float threshold, int64_t bits, uint8_t *out) {
    for (int64_t i = 0; i < numel; i += SUM_STRETCH)
        write_signs(x + i, min_int64(SUM_STRETCH, numel - i), threshold, bits, out + i * bits / 8);
}

struct code_context {
    float threshold;
    uint8_t *out;
};

static inline void code_block(float *x, int64_t start, int64_t width, void *context) {
    struct code_context *code = context;
    float threshold = code->threshold;
    pack_ternary_codes(x, width, threshold, code->out + start / 4);
    for (int64_t i = 0; i < width; i++)
        x[i] -= x[i] >= threshold ? threshold : x[i] <= -threshold ? -threshold : 0.0f;
}

/* Writes packed codes of gradient + residual, fp32 [numel]; left: the sum minus the decoded codes, 0 or +-threshold. */
void pack_ternary_of_sum(
    const float *gradient, const float *residual, int64_t numel, float threshold, uint8_t *out, float *left) {
    struct code_context code = {threshold, out};
    sum_by_blocks(gradient, residual, numel, SUM_STRETCH, code_block, &code, left);
}

/* |x| if it is at least the threshold, else 0, also for NaN. */
static inline double coded_term(float x, float threshold) {
    float magnitude = __builtin_fabsf(x);
    return magnitude >= threshold ? magnitude : 0;
}

/* Writes packed codes. Returns the sum of the magnitudes whose code is not 0, in fp64; count: their number. */
double pack_ternary_and_sum(const float *x, int64_t numel, float threshold, uint8_t *out, int64_t *count) {
    struct folded_sum pending = {.counts = {0}};
    *count = 0;
    for (int64_t i = 0; i < numel; i += SUM_STRETCH) {
        int64_t width = min_int64(SUM_STRETCH, numel - i);
        *count += pack_ternary_codes(x + i, width, threshold, out + i / 4);
        push_sum(&pending, stretch_sum(x + i, width, coded_term, threshold));
    }
    return finish_sum(&pending);
}

/* Returns x with probability min(|x|, limit) / scale, else 0. */
static inline float keep_at_random(float x, float limit, float scale, uint32_t number) {
    float magnitude = __builtin_fabsf(x);
    magnitude = magnitude > limit ? limit : magnitude;
    return uniform(number) * scale < magnitude ? x : 0;
}

/* Writes sign(x) with probability min(|x|, limit) / scale, else 0, by the random numbers of `key`, like
   `pack_ternary`. */
void pack_random_ternary(
    const float *x, int64_t numel, float limit, float scale, uint64_t key, int64_t bits, uint8_t *out) {
    float chosen[SUM_STRETCH];
    uint32_t numbers[SUM_STRETCH];
    for (int64_t start = 0; start < numel; start += SUM_STRETCH) {
        int64_t width = min_int64(SUM_STRETCH, numel - start);
        for (int64_t i = 0; i < width; i += SHARED_STRETCH)
            shared_stretch(key, (start + i) / SHARED_STRETCH, numbers + i);
        for (int64_t i = 0; i < width; i++)
            chosen[i] = keep_at_random(x[start + i], limit, scale, numbers[i]);
        write_signs(chosen, width, 0x1p-149f, bits, out + start * bits / 8);
    }
}

double squares_and_largest(const float *x, int64_t numel, float *largest);

/* Writes packed random codes of layers, each beginning at a byte. starts[i]: address of layer i, which has borders[i +
   1] - borders[i] elements. Elements are clipped at `clip` times the layer's root mean square, unless clip is 0. keys:
   seed per layer; scales: fp32 [num_layers], the largest magnitudes after clipping. */
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

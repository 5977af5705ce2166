/* Sign bits, set where an element is >= 0, and the sums from which the values of the bits are computed. */
#include "masks.h"
#include "sum_by_blocks.h"
#include "sums.h"

static inline int64_t min_int64(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* Packs the sign bits of `count` elements, 0 for NaN. Returns the number of set bits. */
static inline int64_t pack_signs(const float *x, int64_t count, uint8_t *packed) {
    int64_t num_set = 0;
    for (int64_t i = 0; i < count; i += 64) {
        uint64_t bits = at_least_mask_64(x + i, count - i, 0);
        if (count - i >= 64) /* constant length: no call of memcpy */
            __builtin_memcpy(packed + i / 8, &bits, sizeof bits);
        else
            __builtin_memcpy(packed + i / 8, &bits, (uint64_t)(count - i + 7) / 8);
        num_set += __builtin_popcountll(bits);
    }
    return num_set;
}

struct sign_context {
    uint8_t *packed;
    struct folded_sum magnitudes;
};

static inline void sign_block(float *x, int64_t start, int64_t width, void *context) {
    struct sign_context *signs = context;
    push_sum(&signs->magnitudes, stretch_sum(x, width, limited_term, __builtin_inff()));
    pack_signs(x, width, signs->packed + start / 8);
}

/* Writes sign bits of x, fp32 [numel], to packed, uint8 [ceil(numel / 8)]. Returns the sum of |x|, in fp64. */
double signs_and_magnitude(float *x, int64_t numel, uint8_t *packed) {
    struct sign_context signs = {packed, {.counts = {0}}};
    for (int64_t start = 0; start < numel; start += SUM_STRETCH)
        sign_block(x + start, start, min_int64(SUM_STRETCH, numel - start), &signs);
    return finish_sum(&signs.magnitudes);
}

/* Computes sum = gradient + residual, fp32 [numel], and runs `signs_and_magnitude` on it. */
double add_signs_and_magnitude(
    const float *gradient, const float *residual, int64_t numel, uint8_t *packed, float *sum) {
    struct sign_context signs = {packed, {.counts = {0}}};
    sum_by_blocks(gradient, residual, numel, SUM_STRETCH, sign_block, &signs, sum);
    return finish_sum(&signs.magnitudes);
}

struct split_context {
    uint8_t *packed;
    int64_t num_set;
    struct folded_sum positive, negative;
};

static inline void split_block(float *x, int64_t start, int64_t width, void *context) {
    struct split_context *split = context;
    push_sum(&split->positive, stretch_sum(x, width, positive_term, 0));
    push_sum(&split->negative, stretch_sum(x, width, negative_term, 0));
    split->num_set += pack_signs(x, width, split->packed + start / 8);
}

static int64_t sums_of(struct split_context *split, double *sums) {
    sums[0] = finish_sum(&split->positive);
    sums[1] = finish_sum(&split->negative);
    return split->num_set;
}

/* Writes the bits of `signs_and_magnitude`; sums: fp64 [2], of the elements with a set bit, and of the others. Returns
   the number of set bits. */
int64_t signs_and_sums(float *x, int64_t numel, uint8_t *packed, double *sums) {
    struct split_context split = {packed, 0, {.counts = {0}}, {.counts = {0}}};
    for (int64_t start = 0; start < numel; start += SUM_STRETCH)
        split_block(x + start, start, min_int64(SUM_STRETCH, numel - start), &split);
    return sums_of(&split, sums);
}

/* Computes sum = gradient + residual, fp32 [numel], and runs `signs_and_sums` on it. */
int64_t add_signs_and_sums(
    const float *gradient, const float *residual, int64_t numel, uint8_t *packed, double *sums, float *sum) {
    struct split_context split = {packed, 0, {.counts = {0}}, {.counts = {0}}};
    sum_by_blocks(gradient, residual, numel, SUM_STRETCH, split_block, &split, sum);
    return sums_of(&split, sums);
}

/* Subtracts the decoded values: `high` where the bit is set, else `low`. */
static inline void subtract_decoded(float *x, int64_t numel, float low, float high) {
    for (int64_t i = 0; i < numel; i++)
        x[i] -= x[i] >= 0 ? high : low;
}

/* Encodes layers: sign bits, each layer beginning at a byte, and scales, fp32 [num_layers], the mean magnitudes if
   by_mean, else 1. Layer i is elements borders[i]..borders[i+1]-1 of `left`, from which the decoded values are
   subtracted. If `gradients` is not null, left = gradients + residual is computed first. */
void sign_layers(
    const float *const *gradients, const float *residual, const int64_t *borders, int64_t num_layers, int64_t by_mean,
    uint8_t *packed, float *scales, float *left) {
    for (int64_t layer = 0; layer < num_layers; layer++) {
        int64_t start = borders[layer], numel = borders[layer + 1] - start;
        float *x = left + start;
        double sum = gradients ? add_signs_and_magnitude(gradients[layer], residual + start, numel, packed, x)
                               : signs_and_magnitude(x, numel, packed);
        scales[layer] = by_mean ? (float)(sum / (double)numel) : 1;
        subtract_decoded(x, numel, -scales[layer], scales[layer]);
        packed += (numel + 7) / 8;
    }
}

/* Does the same with means, fp32 [num_layers, 2], of each layer's elements without and with a set bit. */
void two_means_of_layers(
    const float *const *gradients, const float *residual, const int64_t *borders, int64_t num_layers, uint8_t *packed,
    float *means, float *left) {
    for (int64_t layer = 0; layer < num_layers; layer++) {
        int64_t start = borders[layer], numel = borders[layer + 1] - start;
        float *x = left + start, *low = means + 2 * layer, *high = low + 1;
        double sums[2];
        int64_t num_set = gradients ? add_signs_and_sums(gradients[layer], residual + start, numel, packed, sums, x)
                                    : signs_and_sums(x, numel, packed, sums);
        int64_t num_unset = numel - num_set;
        *low = (float)(sums[1] / (double)(num_unset ? num_unset : 1));
        *high = (float)(sums[0] / (double)(num_set ? num_set : 1));
        subtract_decoded(x, numel, *low, *high);
        packed += (numel + 7) / 8;
    }
}

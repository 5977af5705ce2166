/* One bit per element, set where it is not negative, and the sums that say what a bit stands for. */
#include "masks.h"
#include "sum_by_blocks.h"
#include "sums.h"

static inline int64_t smaller(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* Bits of `count` elements; NaN's is not set. Returns how many are. */
static inline int64_t pack_signs(const float *x, int64_t count, uint8_t *packed) {
    int64_t num_set = 0;
    for (int64_t i = 0; i < count; i += 64) {
        uint64_t bits = at_least_of_64(x + i, count - i, 0);
        if (count - i >= 64) /* without a call */
            __builtin_memcpy(packed + i / 8, &bits, sizeof bits);
        else
            __builtin_memcpy(packed + i / 8, &bits, (uint64_t)(count - i + 7) / 8);
        num_set += __builtin_popcountll(bits);
    }
    return num_set;
}

struct signing {
    uint8_t *packed;
    struct folding magnitudes;
};

static inline void sign_block(float *x, int64_t start, int64_t width, void *context) {
    struct signing *signs = context;
    add_sum(&signs->magnitudes, stretch_sum(x, width, limited_term, __builtin_inff()));
    pack_signs(x, width, signs->packed + start / 8);
}

/* Returns the sum of magnitudes. */
double signs_and_magnitude(float *x, int64_t numel, uint8_t *packed) {
    struct signing signs = {packed, {.counts = {0}}};
    for (int64_t start = 0; start < numel; start += SUM_STRETCH)
        sign_block(x + start, start, smaller(SUM_STRETCH, numel - start), &signs);
    return finished(&signs.magnitudes);
}

/* The same of sum = gradient + residual. */
double add_signs_and_magnitude(
    const float *gradient, const float *residual, int64_t numel, uint8_t *packed, float *sum) {
    struct signing signs = {packed, {.counts = {0}}};
    sum_by_blocks(gradient, residual, numel, SUM_STRETCH, sign_block, &signs, sum);
    return finished(&signs.magnitudes);
}

struct splitting {
    uint8_t *packed;
    int64_t num_set;
    struct folding positive, negative;
};

static inline void split_block(float *x, int64_t start, int64_t width, void *context) {
    struct splitting *split = context;
    add_sum(&split->positive, stretch_sum(x, width, positive_term, 0));
    add_sum(&split->negative, stretch_sum(x, width, negative_term, 0));
    split->num_set += pack_signs(x, width, split->packed + start / 8);
}

static int64_t sums_of(struct splitting *split, double *sums) {
    sums[0] = finished(&split->positive);
    sums[1] = finished(&split->negative);
    return split->num_set;
}

/* Returns how many bits are set; `sums`: of the elements whose bits are, and of the others. NaN's is not. */
int64_t signs_and_sums(float *x, int64_t numel, uint8_t *packed, double *sums) {
    struct splitting split = {packed, 0, {.counts = {0}}, {.counts = {0}}};
    for (int64_t start = 0; start < numel; start += SUM_STRETCH)
        split_block(x + start, start, smaller(SUM_STRETCH, numel - start), &split);
    return sums_of(&split, sums);
}

/* The same of sum = gradient + residual. */
int64_t add_signs_and_sums(
    const float *gradient, const float *residual, int64_t numel, uint8_t *packed, double *sums, float *sum) {
    struct splitting split = {packed, 0, {.counts = {0}}, {.counts = {0}}};
    sum_by_blocks(gradient, residual, numel, SUM_STRETCH, split_block, &split, sum);
    return sums_of(&split, sums);
}

/* x less `high` where its bit is set, else less `low`. */
static inline void take_away(float *x, int64_t numel, float low, float high) {
    for (int64_t i = 0; i < numel; i++)
        x[i] -= x[i] >= 0 ? high : low;
}

/* Of each of some layers, whose elements lie end to end in `left`: bits, which begin with a byte, and the magnitude that
   they stand for, the mean or 1. Before that, unless `gradients` is null, left = gradients + residual; at the end, what
   bits and magnitude stand for is taken away. */
void sign_layers(
    const float *const *gradients, const float *residual, const int64_t *borders, int64_t num_layers, int64_t by_mean,
    uint8_t *packed, float *scales, float *left) {
    for (int64_t layer = 0; layer < num_layers; layer++) {
        int64_t start = borders[layer], numel = borders[layer + 1] - start;
        float *x = left + start;
        double sum = gradients ? add_signs_and_magnitude(gradients[layer], residual + start, numel, packed, x)
                               : signs_and_magnitude(x, numel, packed);
        scales[layer] = by_mean ? (float)(sum / (double)numel) : 1;
        take_away(x, numel, -scales[layer], scales[layer]);
        packed += (numel + 7) / 8;
    }
}

/* The same with the two means, of the elements whose bits are not set and of the others. */
void two_means_of_layers(
    const float *const *gradients, const float *residual, const int64_t *borders, int64_t num_layers, uint8_t *packed,
    float *means, float *left) {
    for (int64_t layer = 0; layer < num_layers; layer++) {
        int64_t start = borders[layer], numel = borders[layer + 1] - start;
        float *x = left + start, *low = means + 2 * layer, *high = low + 1;
        double sums[2];
        int64_t num_set = gradients ? add_signs_and_sums(gradients[layer], residual + start, numel, packed, sums, x)
                                    : signs_and_sums(x, numel, packed, sums);
        int64_t others = numel - num_set;
        *low = (float)(sums[1] / (double)(others ? others : 1));
        *high = (float)(sums[0] / (double)(num_set ? num_set : 1));
        take_away(x, numel, *low, *high);
        packed += (numel + 7) / 8;
    }
}

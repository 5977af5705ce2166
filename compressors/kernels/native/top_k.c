/* Selection of the k largest magnitudes of all elements; of equal ones the first.

   A sample gives a bound that a few more than k elements are expected to reach. These candidates are found in one pass,
   and the exact choice is made among them; or among all, if fewer than k reach the bound, or too many. */
#include "../../../collectives/payloads/codec/native/set_bits.h"
#include "encode_value.h"
#include "magnitude.h"
#include "sum_by_blocks.h"

#define SAMPLE_RUN 16 /* elements sampled of every SAMPLE_PERIOD: one cache line */
#define SAMPLE_PERIOD 1024
#define BISECTION_MAX_NUMEL 16384 /* elements: so many mostly fit into the L1 cache */
#define SCATTER_PREFETCH 32 /* entries; this far ahead, a prefetch hides the latency of memory */

/* Histogram of a digit of magnitudes with a given prefix. Four histograms take turns, because increments of one counter
   by equal neighbours, such as zeros, would wait for each other. */
static void count_digits(const int32_t *x, int64_t n, int shift, int32_t prefix, int32_t prefix_mask, int64_t *counts) {
    enum { DIGITS = 2048, WAYS = 4 };
    uint32_t ways[WAYS][DIGITS] = {{0}};
    for (int64_t i = 0; i < n; i++) {
        int32_t value = magnitude(x[i]);
        ways[i % WAYS][value >> shift & (DIGITS - 1)] += (value & prefix_mask) == prefix;
    }
    for (int digit = 0; digit < DIGITS; digit++)
        counts[digit] = (int64_t)ways[0][digit] + ways[1][digit] + ways[2][digit] + ways[3][digit];
}

/* Does the work of `kth_largest` by bisection, which ends as soon as a bound separates k magnitudes from the others. */
static int32_t kth_largest_of_few(const int32_t *x, int64_t n, int64_t k) {
    int32_t lower = 0, upper = INFINITE + 1, count = 0;
    while (upper - lower > 1 && count != k) {
        int32_t middle = lower + (upper - lower) / 2;
        count = 0;
        for (int64_t i = 0; i < n; i++)
            count += magnitude(x[i]) >= middle;
        lower = count >= k ? middle : lower;
        upper = count >= k ? upper : middle;
    }
    return lower;
}

/* Returns a bound that k of n magnitudes reach, 1 <= k <= n, or more only if they equal it, by radix select. */
static int32_t kth_largest(const int32_t *x, int64_t n, int64_t k) {
    if (n <= BISECTION_MAX_NUMEL)
        return kth_largest_of_few(x, n, k);
    static const int shifts[] = {20, 9, 0};
    int32_t prefix = 0, prefix_mask = 0;
    for (int step = 0; step < 3; step++) {
        int64_t counts[2048];
        int digit = 2047;
        count_digits(x, n, shifts[step], prefix, prefix_mask, counts);
        for (; counts[digit] < k; digit--)
            k -= counts[digit];
        prefix |= digit << shifts[step];
        prefix_mask |= 2047 << shifts[step];
    }
    return prefix;
}

/* Returns a bound that somewhat more than k of all elements are expected to reach; 0 if the sample is too small. */
static int32_t bound_by_sample(const int32_t *sample, int64_t sample_numel, int64_t k) {
    int64_t expected = k * SAMPLE_RUN / SAMPLE_PERIOD;
    int64_t wanted = expected + expected / 8 + 32;
    return wanted < sample_numel ? kth_largest(sample, sample_numel, wanted) : 0;
}

static int64_t sample_of(const int32_t *x, int64_t n, int32_t *sample) {
    int64_t sample_numel = 0;
    for (int64_t start = 0; start + SAMPLE_PERIOD <= n; start += SAMPLE_PERIOD)
        for (int64_t i = 0; i < SAMPLE_RUN; i++)
            sample[sample_numel++] = x[start + i];
    return sample_numel;
}

static int64_t sample_of_sum(const float *gradient, const float *residual, int64_t n, int32_t *sample) {
    int64_t sample_numel = 0;
    for (int64_t start = 0; start + SAMPLE_PERIOD <= n; start += SAMPLE_PERIOD, sample_numel += SAMPLE_RUN) {
        float sum[SAMPLE_RUN];
        for (int64_t i = 0; i < SAMPLE_RUN; i++)
            sum[i] = gradient[start + i] + residual[start + i];
        __builtin_memcpy(sample + sample_numel, sum, sizeof sum);
    }
    return sample_numel;
}

/* Finds the elements that reach the bound. Returns their number, or -1 if it is more than `capacity`. */
static int64_t find_candidates(const int32_t *x, int64_t n, int32_t bound, int64_t capacity, int64_t *positions,
                               int32_t *values) {
    int64_t count = 0;
    for (int64_t start = 0; start < n; start += 64) {
        prefetch_ahead(x + start);
        uint64_t mask = reaching_mask_64(x + start, n - start, bound);
        if (count + __builtin_popcountll(mask) > capacity)
            return -1;
        for (; mask; mask &= mask - 1) {
            positions[count] = start + __builtin_ctzll(mask);
            values[count] = x[positions[count]];
            count++;
        }
    }
    return count;
}

/* Selects the first k elements that reach `smallest`, those above it before those equal to it; values may be null. */
static void select_first(const int32_t *x, int64_t n, int64_t k, int32_t smallest, const int64_t *positions,
                         int64_t *selected, int32_t *values) {
    int64_t ties_left = k;
    for (int64_t i = 0; i < n; i++)
        ties_left -= magnitude(x[i]) > smallest;
    for (int64_t start = 0; start < n; start += 64)
        for (uint64_t mask = reaching_mask_64(x + start, n - start, smallest); mask; mask &= mask - 1) {
            int64_t i = start + __builtin_ctzll(mask);
            if (magnitude(x[i]) > smallest || ties_left-- > 0) {
                *selected++ = positions ? positions[i] : i;
                if (values)
                    *values++ = x[i];
            }
        }
}

/* Writes the positions of the k largest magnitudes of x, fp32 [numel], ascending, to selected, int64 [k], k >= 1.
   Scratch memory: candidates, int64 [capacity], and scratch, int32 [max(capacity, numel / 64)]. */
void top_k(const int32_t *x, int64_t numel, int64_t k, int64_t *selected, int64_t capacity, int64_t *candidates,
           int32_t *scratch) {
    int32_t bound = bound_by_sample(scratch, sample_of(x, numel, scratch), k);
    int64_t count = bound ? find_candidates(x, numel, bound, capacity, candidates, scratch) : -1;
    if (count >= k)
        select_first(scratch, count, k, kth_largest(scratch, count, k), candidates, selected, 0);
    else
        select_first(x, numel, k, kth_largest(x, numel, k), 0, selected, 0);
}

struct candidates {
    int32_t bound;
    int64_t capacity, count; /* capacity + 1 once there are too many */
    int64_t *positions;
    float *values;
};

static inline void find_in_block(float *x, int64_t start, int64_t width, void *context) {
    struct candidates *found = context;
    int64_t before = found->count;
    for (int64_t i = 0; i < width && found->count <= found->capacity; i += 64) {
        uint64_t mask = reaching_mask_64((const int32_t *)x + i, width - i, found->bound);
        if (found->count + __builtin_popcountll(mask) > found->capacity)
            found->count = found->capacity + 1;
        else
            found->count = write_set_bits(mask, start + i, found->capacity, found->count, found->positions);
    }
    for (int64_t i = before; i < found->count && found->count <= found->capacity; i++)
        found->values[i] = x[found->positions[i] - start];
}

/* Computes sum = gradient + residual, fp32 [numel], and `top_k` of it; finds the candidates of a block while it is in
   the cache. values: fp32 [k], the selected entries. */
void add_and_top_k(const float *gradient, const float *residual, int64_t numel, int64_t k, int64_t *selected,
                   int32_t *values, int64_t capacity, int64_t *candidates, int32_t *scratch, float *sum) {
    int32_t bound = bound_by_sample(scratch, sample_of_sum(gradient, residual, numel, scratch), k);
    struct candidates found = {bound, capacity, bound ? 0 : capacity + 1, candidates, (float *)scratch};
    sum_by_blocks(gradient, residual, numel, SHORT_BLOCK, find_in_block, &found, sum);
    const int32_t *all = (const int32_t *)sum;
    if (k <= found.count && found.count <= capacity)
        select_first(scratch, found.count, k, kth_largest(scratch, found.count, k), candidates, selected, values);
    else
        select_first(all, numel, k, kth_largest(all, numel, k), 0, selected, values);
}

/* Runs `add_and_top_k` with sums, fp32 [k], as scratch memory. Writes the entries to `values`, in `dtype`, clamped to
   +-limit, and subtracts them from `left`; drops those that round to zero. Returns the number of values; or -1, with
   invalid results, if an entry is not finite. */
int64_t send_top_k(const float *gradient, const float *residual, int64_t numel, int64_t k, int64_t dtype, float limit,
                   int64_t *selected, float *sums, void *values, int64_t capacity, int64_t *candidates,
                   int32_t *scratch, float *left) {
    int64_t count = 0;
    add_and_top_k(gradient, residual, numel, k, selected, (int32_t *)sums, capacity, candidates, scratch, left);
    for (int64_t i = 0; i < k; i++) {
        if (magnitude((int32_t)bits_of(sums[i])) == INFINITE)
            return -1;
        if (i + SCATTER_PREFETCH < k)
            __builtin_prefetch(left + selected[i + SCATTER_PREFETCH], 1);
        float decoded = encode_value(sums[i], dtype, limit, values, count);
        left[selected[i]] = sums[i] - decoded;
        selected[count] = selected[i];
        count += decoded != 0;
    }
    return count;
}

/* Runs `top_k` on each layer, elements borders[i]..borders[i+1]-1 of `sums`; if `gradients` is not null, sums =
   gradients + residual is computed first. selected: int64 [sum of ks], ks[i] positions counted from the start of layer
   i. values, int32 [largest of ks], candidates and scratch are scratch memory. */
void top_k_of_layers(const float *const *gradients, const float *residual, const int64_t *borders, const int64_t *ks,
                     int64_t num_layers, int64_t *selected, int32_t *values, int64_t capacity, int64_t *candidates,
                     int32_t *scratch, float *sums) {
    for (int64_t layer = 0; layer < num_layers; selected += ks[layer++]) {
        int64_t start = borders[layer], numel = borders[layer + 1] - start;
        if (gradients)
            add_and_top_k(gradients[layer], residual + start, numel, ks[layer], selected, values, capacity, candidates,
                          scratch, sums + start);
        else
            top_k((const int32_t *)sums + start, numel, ks[layer], selected, capacity, candidates, scratch);
    }
}

/* Writes entries of layers to `values`, in `dtype`, clamped to +-limit, and subtracts them from `left`; layer i is
   elements borders[i]..borders[i+1]-1 of `left` and has ks[i] positions. Drops entries that round to zero, also from
   positions; counts[i]: number of values of layer i. Returns that of all; or -1, with invalid results, if `finite` is
   set and an entry is not finite. */
int64_t send_from_layers(const int64_t *borders, const int64_t *ks, int64_t num_layers, int64_t dtype, float limit,
                         int64_t finite, int64_t *positions, void *values, int64_t *counts, float *left) {
    int64_t total = 0;
    const int64_t *next = positions;
    for (int64_t layer = 0; layer < num_layers; layer++) {
        float *x = left + borders[layer];
        int64_t before = total;
        for (const int64_t *stop = next + ks[layer]; next < stop; next++) {
            if (stop - next > SCATTER_PREFETCH)
                __builtin_prefetch(x + next[SCATTER_PREFETCH], 1);
            int64_t position = *next;
            float value = x[position];
            if (finite && magnitude((int32_t)bits_of(value)) == INFINITE)
                return -1;
            float decoded = encode_value(value, dtype, limit, values, total);
            x[position] = value - decoded;
            positions[total] = position;
            total += decoded != 0;
        }
        counts[layer] = total - before;
    }
    return total;
}

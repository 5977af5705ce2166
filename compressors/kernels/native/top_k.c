/* The k largest magnitudes of all; of equal ones the first.

   A sample gives a bound that a few more than k are expected to reach; those are found in one pass, and the exact
   choice is made among them. Where fewer than k reach it, or too many, the exact choice is made among all. */
#include "../../../collectives/payloads/codec/native/set_bits.h"
#include "magnitude.h"
#include "put_value.h"
#include "sum_by_blocks.h"

#define SAMPLED_RUN 16 /* elements, one line of the cache, of every SAMPLED_OF */
#define SAMPLED_OF 1024
#define FEW 16384 /* elements, which the first cache holds at least in part */
#define SOON 32 /* entries: so long does memory take to answer */

/* Counting with four histograms in turn: equal neighbours, as zeros are, do not wait for each other. */
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

/* The same of a few, by bisection, which needs no histogram: a magnitude that is the k-th largest, or lies between it
   and the next smaller one. */
static int32_t kth_largest_of_few(const int32_t *x, int64_t n, int64_t k) {
    int32_t reached = 0, missed = INFINITE + 1, count = 0;
    while (missed - reached > 1 && count != k) {
        int32_t middle = reached + (missed - reached) / 2;
        count = 0;
        for (int64_t i = 0; i < n; i++)
            count += magnitude(x[i]) >= middle;
        reached = count >= k ? middle : reached;
        missed = count >= k ? missed : middle;
    }
    return reached;
}

/* A magnitude that k of n reach, 1 <= k <= n, or more only where they tie: its bits from the top, some at a time. */
static int32_t kth_largest(const int32_t *x, int64_t n, int64_t k) {
    if (n <= FEW)
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

/* A bound that somewhat more than k of all are expected to reach, by a sample; 0 where it cannot tell. */
static int32_t bound_by_sample(const int32_t *sample, int64_t sampled, int64_t k) {
    int64_t expected = k * SAMPLED_RUN / SAMPLED_OF;
    int64_t wanted = expected + expected / 8 + 32;
    return wanted < sampled ? kth_largest(sample, sampled, wanted) : 0;
}

static int64_t sample_of(const int32_t *x, int64_t n, int32_t *sample) {
    int64_t sampled = 0;
    for (int64_t start = 0; start + SAMPLED_OF <= n; start += SAMPLED_OF)
        for (int64_t i = 0; i < SAMPLED_RUN; i++)
            sample[sampled++] = x[start + i];
    return sampled;
}

static int64_t sample_of_sum(const float *gradient, const float *residual, int64_t n, int32_t *sample) {
    int64_t sampled = 0;
    for (int64_t start = 0; start + SAMPLED_OF <= n; start += SAMPLED_OF, sampled += SAMPLED_RUN) {
        float sum[SAMPLED_RUN];
        for (int64_t i = 0; i < SAMPLED_RUN; i++)
            sum[i] = gradient[start + i] + residual[start + i];
        __builtin_memcpy(sample + sampled, sum, sizeof sum);
    }
    return sampled;
}

/* Where the bound is reached, and by what; returns how many, or -1 where they are more than `most`. */
static int64_t find_candidates(const int32_t *x, int64_t n, int32_t bound, int64_t most, int64_t *positions,
                               int32_t *values) {
    int64_t count = 0;
    for (int64_t start = 0; start < n; start += 64) {
        fetch_ahead(x + start);
        uint64_t mask = reaching_of_64(x + start, n - start, bound);
        if (count + __builtin_popcountll(mask) > most)
            return -1;
        for (; mask; mask &= mask - 1) {
            positions[count] = start + __builtin_ctzll(mask);
            values[count] = x[positions[count]];
            count++;
        }
    }
    return count;
}

/* The first k of those that reach the bound; entries above it go before those that equal it. `values`, if any, gets
   what they are. */
static void keep_first(const int32_t *x, int64_t n, int64_t k, int32_t smallest, const int64_t *positions,
                       int64_t *selected, int32_t *values) {
    int64_t room = k;
    for (int64_t i = 0; i < n; i++)
        room -= magnitude(x[i]) > smallest;
    for (int64_t start = 0; start < n; start += 64)
        for (uint64_t mask = reaching_of_64(x + start, n - start, smallest); mask; mask &= mask - 1) {
            int64_t i = start + __builtin_ctzll(mask);
            if (magnitude(x[i]) > smallest || room-- > 0) {
                *selected++ = positions ? positions[i] : i;
                if (values)
                    *values++ = x[i];
            }
        }
}

/* x: fp32 [numel]; selected: int64 [k], ascending, 1 <= k <= numel; candidates: int64 [most] and scratch: int32
   [max(most, numel / 64)] are scratch memory. */
void top_k(const int32_t *x, int64_t numel, int64_t k, int64_t *selected, int64_t most, int64_t *candidates,
           int32_t *scratch) {
    int32_t bound = bound_by_sample(scratch, sample_of(x, numel, scratch), k);
    int64_t count = bound ? find_candidates(x, numel, bound, most, candidates, scratch) : -1;
    if (count >= k)
        keep_first(scratch, count, k, kth_largest(scratch, count, k), candidates, selected, 0);
    else
        keep_first(x, numel, k, kth_largest(x, numel, k), 0, selected, 0);
}

struct candidates {
    int32_t bound;
    int64_t most, count; /* more than `most` where there is no room for them, and from then on */
    int64_t *positions;
    float *values;
};

static inline void find_in_block(float *x, int64_t start, int64_t width, void *context) {
    struct candidates *found = context;
    int64_t before = found->count;
    for (int64_t i = 0; i < width && found->count <= found->most; i += 64) {
        uint64_t mask = reaching_of_64((const int32_t *)x + i, width - i, found->bound);
        if (found->count + __builtin_popcountll(mask) > found->most)
            found->count = found->most + 1;
        else
            found->count = write_set_bits(mask, start + i, found->most, found->count, found->positions);
    }
    for (int64_t i = before; i < found->count && found->count <= found->most; i++)
        found->values[i] = x[found->positions[i] - start];
}

/* sum = gradient + residual, and `top_k` of it, whose candidates are found while a block of it is at hand. values: fp32
   [k], what is there. */
void add_and_top_k(const float *gradient, const float *residual, int64_t numel, int64_t k, int64_t *selected,
                   int32_t *values, int64_t most, int64_t *candidates, int32_t *scratch, float *sum) {
    int32_t bound = bound_by_sample(scratch, sample_of_sum(gradient, residual, numel, scratch), k);
    struct candidates found = {bound, most, bound ? 0 : most + 1, candidates, (float *)scratch};
    sum_by_blocks(gradient, residual, numel, SHORT_BLOCK, find_in_block, &found, sum);
    const int32_t *all = (const int32_t *)sum;
    if (k <= found.count && found.count <= most)
        keep_first(scratch, found.count, k, kth_largest(scratch, found.count, k), candidates, selected, values);
    else
        keep_first(all, numel, k, kth_largest(all, numel, k), 0, selected, values);
}

/* `add_and_top_k` with the values as they travel, in `sent`, and what does not arrive in `left`. What rounds to zero is
   not sent. Returns how many are; -1, and what was written does not count, where one is not finite. */
int64_t send_top_k(const float *gradient, const float *residual, int64_t numel, int64_t k, int64_t type, float limit,
                   int64_t *selected, float *values, void *sent, int64_t most, int64_t *candidates, int32_t *scratch,
                   float *left) {
    int64_t count = 0;
    add_and_top_k(gradient, residual, numel, k, selected, (int32_t *)values, most, candidates, scratch, left);
    for (int64_t i = 0; i < k; i++) {
        if (magnitude((int32_t)bits_of(values[i])) == INFINITE)
            return -1;
        if (i + SOON < k)
            __builtin_prefetch(left + selected[i + SOON], 1);
        float arrives = put_value(values[i], type, limit, sent, count);
        left[selected[i]] = values[i] - arrives;
        selected[count] = selected[i];
        count += arrives != 0;
    }
    return count;
}

/* `top_k` of each of some layers, whose elements lie end to end in `sums`; before that, unless `gradients` is null, sums
   = gradients + residual. ks: how many of each layer; selected: int64 [sum of ks], counted from the layer's start;
   values: int32 [largest of ks] is scratch memory, as are candidates and scratch. */
void top_k_of_layers(const float *const *gradients, const float *residual, const int64_t *borders, const int64_t *ks,
                     int64_t num_layers, int64_t *selected, int32_t *values, int64_t most, int64_t *candidates,
                     int32_t *scratch, float *sums) {
    for (int64_t layer = 0; layer < num_layers; selected += ks[layer++]) {
        int64_t start = borders[layer], numel = borders[layer + 1] - start;
        if (gradients)
            add_and_top_k(gradients[layer], residual + start, numel, ks[layer], selected, values, most, candidates,
                          scratch, sums + start);
        else
            top_k((const int32_t *)sums + start, numel, ks[layer], selected, most, candidates, scratch);
    }
}

/* Of layers that lie end to end in `left`, values at `positions`, ks of each layer: as they travel, in `sent`, and what
   does not arrive in `left`. What rounds to zero is not sent. counts: how many are, of each layer, whose positions move
   together. Returns how many in all; -1, and what was written does not count, where one has to be finite and is not. */
int64_t send_from_layers(const int64_t *borders, const int64_t *ks, int64_t num_layers, int64_t type, float limit,
                         int64_t finite, int64_t *positions, void *sent, int64_t *counts, float *left) {
    int64_t total = 0;
    const int64_t *next = positions;
    for (int64_t layer = 0; layer < num_layers; layer++) {
        float *x = left + borders[layer];
        int64_t before = total;
        for (const int64_t *stop = next + ks[layer]; next < stop; next++) {
            if (stop - next > SOON)
                __builtin_prefetch(x + next[SOON], 1);
            int64_t position = *next;
            float value = x[position];
            if (finite && magnitude((int32_t)bits_of(value)) == INFINITE)
                return -1;
            float arrives = put_value(value, type, limit, sent, total);
            x[position] = value - arrives;
            positions[total] = position;
            total += arrives != 0;
        }
        counts[layer] = total - before;
    }
    return total;
}

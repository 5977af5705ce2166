/* The k largest magnitudes of all; of equal ones the first.

   A sample gives a bound that a few more than k are expected to reach; those are found in one pass, and the exact
   choice is made among them. Where fewer than k reach it, or too many, the exact choice is made among all. */
#include "magnitude.h"

#define SAMPLED_RUN 16 /* elements, one line of the cache, of every SAMPLED_OF */
#define SAMPLED_OF 1024

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

/* The k-th largest magnitude, 1 <= k <= n: its bits from the top, some at a time. */
static int32_t kth_largest(const int32_t *x, int64_t n, int64_t k) {
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

/* A bound that somewhat more than k of n are expected to reach. The sample is written to `scratch`. */
static int32_t sampled_bound(const int32_t *x, int64_t n, int64_t k, int32_t *scratch) {
    int64_t sampled = 0;
    for (int64_t start = 0; start + SAMPLED_OF <= n; start += SAMPLED_OF)
        for (int64_t i = 0; i < SAMPLED_RUN; i++)
            scratch[sampled++] = x[start + i];
    int64_t expected = k * SAMPLED_RUN / SAMPLED_OF;
    int64_t wanted = expected + expected / 8 + 32;
    return wanted < sampled ? kth_largest(scratch, sampled, wanted) : 0;
}

/* Where the bound is reached, and by which magnitudes; returns how many, or -1 where they are more than `most`. */
static int64_t find_candidates(const int32_t *x, int64_t n, int32_t bound, int64_t most, int64_t *positions,
                               int32_t *magnitudes) {
    int64_t count = 0;
    for (int64_t start = 0; start < n; start += 64) {
        fetch_ahead(x + start);
        uint64_t mask = reaching_of_64(x + start, n - start, bound);
        if (count + __builtin_popcountll(mask) > most)
            return -1;
        for (; mask; mask &= mask - 1) {
            positions[count] = start + __builtin_ctzll(mask);
            magnitudes[count] = magnitude(x[positions[count]]);
            count++;
        }
    }
    return count;
}

/* The first k of those that reach the bound; entries above it go before those that equal it. */
static void keep_first(const int32_t *x, int64_t n, int64_t k, int32_t smallest, const int64_t *positions,
                       int64_t *selected) {
    int64_t room = k;
    for (int64_t i = 0; i < n; i++)
        room -= magnitude(x[i]) > smallest;
    for (int64_t start = 0; start < n; start += 64)
        for (uint64_t mask = reaching_of_64(x + start, n - start, smallest); mask; mask &= mask - 1) {
            int64_t i = start + __builtin_ctzll(mask);
            if (magnitude(x[i]) > smallest || room-- > 0)
                *selected++ = positions ? positions[i] : i;
        }
}

/* x: fp32 [numel]; selected: int64 [k], ascending, 1 <= k <= numel; candidates: int64 [most] and magnitudes: int32
   [max(most, numel / 64)] are scratch memory. */
void top_k(const int32_t *x, int64_t numel, int64_t k, int64_t *selected, int64_t most, int64_t *candidates,
           int32_t *magnitudes) {
    int32_t bound = sampled_bound(x, numel, k, magnitudes);
    int64_t count = bound ? find_candidates(x, numel, bound, most, candidates, magnitudes) : -1;
    if (count >= k)
        keep_first(magnitudes, count, k, kth_largest(magnitudes, count, k), candidates, selected);
    else
        keep_first(x, numel, k, kth_largest(x, numel, k), 0, selected);
}

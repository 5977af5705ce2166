/* The k largest magnitudes in every group of consecutive elements; of equal ones the first.

   The maxima of several times k interleaved lanes give a bound that k entries reach and few more; the exact choice is
   made among those few. */
#include "../../../collectives/payloads/codec/native/floats.h"
#include "../../../collectives/payloads/codec/native/parts.h"
#include "../../../collectives/payloads/codec/native/past_cache.h"
#include "magnitude.h"
#include "put_value.h"

#define LONGEST_GROUP 16384
#define FEW_LANES 32
#define MANY_LANES 192
#define LANES_PER_KEPT 3
#define FEW 16 /* bits of one mask */
#define KEPT 3 /* a type: fp32, and what is sent also stays */

/* A bound that at least k of the elements reach, and few more. */
static inline __attribute__((always_inline)) int32_t bound_by_lanes(const int32_t *x, int64_t size, int64_t k,
                                                                    const int lanes) {
    int32_t maxima[MANY_LANES] = {0};
    for (int64_t start = 0; start + lanes <= size; start += lanes)
        for (int lane = 0; lane < lanes; lane++) {
            int32_t other = x[start + lane] & 0x7fffffff;
            maxima[lane] = other > maxima[lane] ? other : maxima[lane];
        }
    int32_t least = INFINITE;
    for (int lane = 0; lane < lanes; lane++) {
        maxima[lane] = maxima[lane] < INFINITE ? maxima[lane] : INFINITE;
        least = maxima[lane] < least ? maxima[lane] : least;
    }
    return bound_reached_by(k, 1, maxima, lanes, least);
}

static int32_t bound_by_all(const int32_t *x, int64_t size, int64_t k) {
    int32_t magnitudes[LONGEST_GROUP];
    for (int64_t i = 0; i < size; i++)
        magnitudes[i] = magnitude(x[i]);
    return bound_reached_by(k, 0, magnitudes, size, 0);
}

/* Ascending positions of those that reach the bound; returns how many. All masks come first: comparing is then one
   steady loop, and only this reading of the masks branches on data. What is read next is fetched on the way, of one
   piece of memory: of two it would be more than memory answers meanwhile. */
static int64_t find_in_group(const int32_t *x, int64_t size, int32_t bound, const float *next, int32_t *positions) {
    uint64_t masks[LONGEST_GROUP / 64];
    int64_t num_masks = 0, count = 0;
    for (int64_t start = 0; start < size; start += 64) {
        masks[num_masks++] = reaching_of_64(x + start, size - start, bound);
        for (int64_t i = start; i < start + 64; i += LINE)
            __builtin_prefetch(next + i);
    }
    for (int64_t i = 0; i < num_masks; i++)
        for (uint64_t mask = masks[i]; mask; mask &= mask - 1)
            positions[count++] = (int32_t)(64 * i + __builtin_ctzll(mask));
    return count;
}

/* `keep_largest` for at most FEW candidates: an entry is kept where fewer than k are better, which is known without a
   branch. Better is what is larger, and of equal ones the earlier. */
static void keep_largest_of_few(const int32_t *x, int64_t k, int32_t *positions, int64_t count) {
    int32_t candidates[FEW] = {0};
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i++)
        candidates[i] = magnitude(x[positions[i]]);
    for (int64_t i = 0; i < count; i++) {
        uint64_t larger = reaching_of_16(candidates, candidates[i] + 1), earlier = (1ull << i) - 1;
        uint64_t better = larger | (reaching_of_16(candidates, candidates[i]) & earlier);
        positions[kept] = positions[i];
        kept += __builtin_popcountll(better) < k;
    }
}

/* Leave the k largest of `count` > k candidates, the first among equals, in `positions`. */
static void keep_largest(const int32_t *x, int64_t k, int32_t bound, int32_t *positions, int64_t count) {
    int32_t candidates[LONGEST_GROUP];
    for (int64_t i = 0; i < count; i++)
        candidates[i] = magnitude(x[positions[i]]);
    int32_t smallest = bound_reached_by(k, 0, candidates, count, bound);
    int64_t room = k, kept = 0;
    for (int64_t i = 0; i < count; i++)
        room -= candidates[i] > smallest;
    for (int64_t i = 0; i < count; i++) {
        int tied = candidates[i] == smallest;
        int keeps = candidates[i] > smallest || (tied && room > 0);
        room -= tied;
        positions[kept] = positions[i];
        kept += keeps;
    }
}

/* Ascending positions within the group of its k largest: int32 [LONGEST_GROUP], of which k count. */
static void choose(const int32_t *x, int64_t size, int64_t k, const float *next, int32_t *positions) {
    int32_t bound;
    if (LANES_PER_KEPT * k <= FEW_LANES && 2 * FEW_LANES <= size)
        bound = bound_by_lanes(x, size, k, FEW_LANES);
    else if (LANES_PER_KEPT * k <= MANY_LANES && 2 * MANY_LANES <= size)
        bound = bound_by_lanes(x, size, k, MANY_LANES);
    else
        bound = bound_by_all(x, size, k);
    int64_t count = find_in_group(x, size, bound, next, positions);
    if (count > k && count <= FEW)
        keep_largest_of_few(x, k, positions, count);
    else if (count > k)
        keep_largest(x, k, bound, positions, count);
}

/* x: fp32 [numel]; selected: [k per whole group, k_last in a shorter last one]; group_size at most LONGEST_GROUP. */
void select_groups(const int32_t *x, int64_t numel, int64_t group_size, int64_t k, int64_t k_last, int64_t *selected) {
    int32_t positions[LONGEST_GROUP];
    for (int64_t start = 0; start < numel; start += group_size) {
        int whole = numel - start >= group_size;
        int64_t kept = whole ? k : k_last;
        int64_t size = whole ? group_size : numel - start;
        choose(x + start, size, kept, (const float *)(x + start + size), positions);
        for (int64_t i = 0; i < kept; i++)
            *selected++ = start + positions[i];
    }
}

/* The sums of elements start..start+size-1 come into x, and what was there leaves to `out`. Returns where the gradient
   goes on. */
static const float *read_group(
    struct parts *from, const float *residual, int64_t start, int64_t size, float *x, int past_cache, float *out) {
    const float *next = residual;
    for (int64_t done = 0, length; done < size; done += length) {
        const float *gradient = element_at(from, start + done, &length);
        length = length < size - done ? length : size - done;
        replace_by_sum(gradient, residual + start + done, length, x + done, past_cache, out + done);
        next = gradient + length;
    }
    return next;
}

/* x = gradient + residual, of which the k largest per group are sent and the rest stays: one pass over memory.

   The gradient: `starts` and `borders` of its parts; residual and left: fp32 [numel]. Of what is selected,
   values: [as selected] in the type that travels, within +-limit; indices: int64, within the group; positions: int64.
   Returns whether all of x is finite: what is not is among the largest. */
int64_t send_groups(const float *const *starts, const int64_t *borders, const float *residual, int64_t numel,
                    int64_t group_size, int64_t k, int64_t k_last, int type, float limit, void *values,
                    int64_t *indices, int64_t *positions, float *left) {
    struct parts gradient = {starts, borders, 0};
    int32_t chosen[LONGEST_GROUP];
    _Alignas(64) float x[LONGEST_GROUP];
    int past_cache = numel >= LONG;
    int64_t sent = 0, all_finite = 1, size = numel < group_size ? numel : group_size;
    __builtin_memset(x, 0, (uint64_t)size * sizeof *x);
    /* Zeros leave, whose place the first group takes later. */
    const float *next = read_group(&gradient, residual, 0, size, x, past_cache, left);
    for (int64_t start = 0; start < numel;) {
        int64_t kept = size == group_size ? k : k_last;
        choose((const int32_t *)x, size, kept, next, chosen);
        for (int64_t i = 0; i < kept; i++, sent++) {
            float *entry = x + chosen[i];
            indices[sent] = chosen[i];
            positions[sent] = start + chosen[i];
            all_finite &= magnitude((int32_t)bits_of(*entry)) < INFINITE;
            float arrives = put_value(*entry, type == KEPT ? FP32 : type, limit, values, sent);
            *entry -= type == KEPT ? 0 : arrives;
        }
        int64_t rest = numel - start - size, following = rest < size ? rest : size;
        next = read_group(&gradient, residual, start + size, following, x, past_cache, left + start);
        copy_part(x + following, size - following, numel, left + start + following);
        start += size;
        size = following;
    }
    finish_past_cache();
    return all_finite;
}

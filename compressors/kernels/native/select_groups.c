/* Selection of the k largest magnitudes in every group of consecutive elements; of equal ones the first.

   The elements of a group are divided among several times k interleaved lanes. The k-th largest of the lanes' maxima is
   a bound that at least k elements reach, and few more; the exact choice is made among those. */
#include "../../../collectives/payloads/codec/native/floats.h"
#include "../../../collectives/payloads/codec/native/nontemporal.h"
#include "../../../collectives/payloads/codec/native/parts.h"
#include "../../../collectives/payloads/codec/native/set_bits.h"
#include "encode_value.h"
#include "magnitude.h"

#define LONGEST_GROUP 16384
#define FEW_LANES 32
#define MANY_LANES 192
#define LANES_PER_KEPT 3
#define MASK_BITS 16 /* also the most candidates for `keep_largest_of_few` */
#define PREFETCHED 512 /* floats; the hardware prefetches the rest; more would evict the group from the L1 cache */
#define KEPT 3 /* a dtype: fp32 values that are not subtracted */

/* Returns a bound that at least k of the elements reach, and few more. */
static inline __attribute__((always_inline)) int32_t bound_by_lanes(const int32_t *x, int64_t size, int64_t k,
                                                                    const int lanes) {
    int32_t maxima[MANY_LANES] = {0};
    for (int64_t start = 0; start + lanes <= size; start += lanes)
        for (int lane = 0; lane < lanes; lane++) {
            int32_t other = x[start + lane] & 0x7fffffff;
            maxima[lane] = other > maxima[lane] ? other : maxima[lane];
        }
    int32_t smallest = INFINITE;
    for (int lane = 0; lane < lanes; lane++) {
        maxima[lane] = maxima[lane] < INFINITE ? maxima[lane] : INFINITE;
        smallest = maxima[lane] < smallest ? maxima[lane] : smallest;
    }
    return bisect_bound(k, 1, maxima, lanes, smallest);
}

static int32_t bound_by_all(const int32_t *x, int64_t size, int64_t k) {
    int32_t magnitudes[LONGEST_GROUP];
    for (int64_t i = 0; i < size; i++)
        magnitudes[i] = magnitude(x[i]);
    return bisect_bound(k, 0, magnitudes, size, 0);
}

/* Writes the positions of the elements that reach the bound, ascending; returns their number. All masks are computed
   first, so that only the loop that reads them has unpredictable branches. Before that, the first elements of the next
   group's gradient are prefetched. */
static int64_t find_in_group(
    const int32_t *x, int64_t size, int32_t bound, const float *next_gradient, int64_t *positions) {
    uint64_t masks[LONGEST_GROUP / 64];
    int64_t num_masks = 0, count = 0;
    for (int64_t i = 0; i < size && i < PREFETCHED; i += CACHE_LINE)
        __builtin_prefetch(next_gradient + i);
    for (int64_t start = 0; start < size; start += 64)
        masks[num_masks++] = reaching_mask_64(x + start, size - start, bound);
    for (int64_t i = 0; i < num_masks; i++)
        count = write_set_bits(masks[i], 64 * i, LONGEST_GROUP, count, positions);
    return count;
}

/* Does the work of `keep_largest` without branches, for at most MASK_BITS candidates: keeps an entry if fewer than k
   others are larger, or equal and earlier. */
static void keep_largest_of_few(const int32_t *x, int64_t k, int64_t *positions, int64_t count) {
    int32_t candidates[MASK_BITS] = {0};
    int64_t kept = 0;
    for (int64_t i = 0; i < count; i++)
        candidates[i] = magnitude(x[positions[i]]);
    for (int64_t i = 0; i < count; i++) {
        uint64_t larger = reaching_mask_16(candidates, candidates[i] + 1), earlier = (1ull << i) - 1;
        uint64_t better = larger | (reaching_mask_16(candidates, candidates[i]) & earlier);
        positions[kept] = positions[i];
        kept += __builtin_popcountll(better) < k;
    }
}

/* Keeps the k largest of `count` > k candidates in `positions`, the first among equals. */
static void keep_largest(const int32_t *x, int64_t k, int32_t bound, int64_t *positions, int64_t count) {
    int32_t candidates[LONGEST_GROUP];
    for (int64_t i = 0; i < count; i++)
        candidates[i] = magnitude(x[positions[i]]);
    int32_t smallest = bisect_bound(k, 0, candidates, count, bound);
    int64_t ties_left = k, kept = 0;
    for (int64_t i = 0; i < count; i++)
        ties_left -= candidates[i] > smallest;
    for (int64_t i = 0; i < count; i++) {
        int tied = candidates[i] == smallest;
        int keeps = candidates[i] > smallest || (tied && ties_left > 0);
        ties_left -= tied;
        positions[kept] = positions[i];
        kept += keeps;
    }
}

/* Writes the positions of the k largest magnitudes of a group, ascending, to the first k of int64 [LONGEST_GROUP]. */
static void select_in_group(const int32_t *x, int64_t size, int64_t k, const float *next_gradient, int64_t *positions) {
    int32_t bound;
    if (LANES_PER_KEPT * k <= FEW_LANES && 2 * FEW_LANES <= size)
        bound = bound_by_lanes(x, size, k, FEW_LANES);
    else if (LANES_PER_KEPT * k <= MANY_LANES && 2 * MANY_LANES <= size)
        bound = bound_by_lanes(x, size, k, MANY_LANES);
    else
        bound = bound_by_all(x, size, k);
    int64_t count = find_in_group(x, size, bound, next_gradient, positions);
    if (count > k && count <= MASK_BITS)
        keep_largest_of_few(x, k, positions, count);
    else if (count > k)
        keep_largest(x, k, bound, positions, count);
}

/* Writes the positions of the k largest magnitudes per group of x, fp32 [numel], ascending, to selected: int64 [k per
   whole group, then k_last of a shorter last one]. group_size is at most LONGEST_GROUP. */
void select_groups(const int32_t *x, int64_t numel, int64_t group_size, int64_t k, int64_t k_last, int64_t *selected) {
    int64_t positions[LONGEST_GROUP];
    for (int64_t start = 0; start < numel; start += group_size) {
        int whole = numel - start >= group_size;
        int64_t kept = whole ? k : k_last;
        int64_t size = whole ? group_size : numel - start;
        select_in_group(x + start, size, kept, (const float *)(x + start + size), positions);
        for (int64_t i = 0; i < kept; i++)
            *selected++ = start + positions[i];
    }
}

/* Writes x, the previous group, to `out`, and sets x to gradient + residual of elements start..start+size-1. Returns
   the address of the next gradient element. */
static const float *load_group(
    struct parts *parts, const float *residual, int64_t start, int64_t size, float *x, int nontemporal, float *out) {
    const float *next_gradient = residual;
    for (int64_t done = 0, length; done < size; done += length) {
        const float *gradient = element_at(parts, start + done, &length);
        length = length < size - done ? length : size - done;
        flush_and_add(gradient, residual + start + done, length, x + done, nontemporal, out + done);
        next_gradient = gradient + length;
    }
    return next_gradient;
}

/* Selects the k largest entries per group of x = gradient + residual as `values`, and writes the rest of x to `left`,
   in one pass over memory. starts, borders: gradient, see `struct parts`; residual, left: fp32 [numel]. The other
   arrays have one element per value, in the order of `select_groups`: values, in `dtype`, clamped to +-limit; indices
   within groups and positions, int64. Returns whether all of x is finite; if not, a value is not finite. */
int64_t send_groups(const float *const *starts, const int64_t *borders, const float *residual, int64_t numel,
                    int64_t group_size, int64_t k, int64_t k_last, int64_t dtype, float limit, void *values,
                    int64_t *indices, int64_t *positions, float *left) {
    struct parts gradient = {starts, borders, 0};
    int64_t chosen[LONGEST_GROUP];
    _Alignas(64) float x[LONGEST_GROUP];
    int nontemporal = numel >= NONTEMPORAL_MIN_NUMEL;
    int64_t sent = 0, all_finite = 1, size = numel < group_size ? numel : group_size;
    __builtin_memset(x, 0, (uint64_t)size * sizeof *x);
    /* this writes zeros, which the first group overwrites later */
    const float *next_gradient = load_group(&gradient, residual, 0, size, x, nontemporal, left);
    for (int64_t start = 0; start < numel;) {
        int64_t kept = size == group_size ? k : k_last;
        select_in_group((const int32_t *)x, size, kept, next_gradient, chosen);
        for (int64_t i = 0; i < kept; i++, sent++) {
            float *entry = x + chosen[i];
            indices[sent] = chosen[i];
            positions[sent] = start + chosen[i];
            all_finite &= magnitude((int32_t)bits_of(*entry)) < INFINITE;
            float decoded = encode_value(*entry, dtype == KEPT ? FP32 : dtype, limit, values, sent);
            *entry -= dtype == KEPT ? 0 : decoded;
        }
        int64_t remaining = numel - start - size, next_size = remaining < size ? remaining : size;
        next_gradient = load_group(&gradient, residual, start + size, next_size, x, nontemporal, left + start);
        copy_chunk(x + next_size, size - next_size, numel, left + start + next_size);
        start += size;
        size = next_size;
    }
    fence_nontemporal_stores();
    return all_finite;
}

/* The k largest magnitudes in every group of consecutive elements; of equal ones the first.

   The maxima of several times k interleaved lanes give a bound that k entries reach and few more; the exact choice is
   made among those few. */
#include "magnitude.h"

#define LONGEST_GROUP 16384
#define FEW_LANES 32
#define MANY_LANES 192
#define LANES_PER_KEPT 3

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
   steady loop, and only this reading of the masks branches on data. */
static int64_t find_in_group(const int32_t *x, int64_t size, int32_t bound, int32_t *positions) {
    uint64_t masks[LONGEST_GROUP / 64];
    int64_t num_masks = 0, count = 0;
    for (int64_t start = 0; start < size; start += 64)
        masks[num_masks++] = reaching_of_64(x + start, size - start, bound);
    for (int64_t i = 0; i < num_masks; i++)
        for (uint64_t mask = masks[i]; mask; mask &= mask - 1)
            positions[count++] = (int32_t)(64 * i + __builtin_ctzll(mask));
    return count;
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

static void select_group(const int32_t *x, int64_t size, int64_t k, int64_t start, int64_t *selected) {
    int32_t bound, positions[LONGEST_GROUP];
    if (LANES_PER_KEPT * k <= FEW_LANES && 2 * FEW_LANES <= size)
        bound = bound_by_lanes(x, size, k, FEW_LANES);
    else if (LANES_PER_KEPT * k <= MANY_LANES && 2 * MANY_LANES <= size)
        bound = bound_by_lanes(x, size, k, MANY_LANES);
    else
        bound = bound_by_all(x, size, k);
    int64_t count = find_in_group(x, size, bound, positions);
    if (count > k)
        keep_largest(x, k, bound, positions, count);
    for (int64_t i = 0; i < k; i++)
        selected[i] = start + positions[i];
}

/* x: fp32 [numel]; selected: [k per whole group, k_last in a shorter last one]; group_size at most LONGEST_GROUP. */
void select_groups(const int32_t *x, int64_t numel, int64_t group_size, int64_t k, int64_t k_last, int64_t *selected) {
    int64_t start = 0;
    for (; numel - start >= group_size; start += group_size, selected += k)
        select_group(x + start, group_size, k, start, selected);
    if (start < numel)
        select_group(x + start, numel - start, k_last, start, selected);
}

/* The k largest magnitudes in every group of consecutive elements; of equal ones the first.

   The maxima of several times k interleaved lanes give a bound that k entries reach and few more; the exact choice is
   made among those few. */
#include "magnitude.h"

#define LONGEST_GROUP 16384
#define LANES_PER_KEPT 6

static int32_t lower_bound(const int32_t *magnitudes, int64_t size, int64_t k) {
    int32_t maxima[LONGEST_GROUP];
    int64_t lanes = (LANES_PER_KEPT * k + 15) / 16 * 16;
    if (2 * lanes > size)
        return bound_reached_by(k, magnitudes, size);
    __builtin_memcpy(maxima, magnitudes, lanes * sizeof *maxima);
    for (int64_t start = lanes; start < size; start += lanes) {
        int64_t width = size - start < lanes ? size - start : lanes;
        for (int64_t lane = 0; lane < width; lane++) {
            int32_t other = magnitudes[start + lane];
            maxima[lane] = other > maxima[lane] ? other : maxima[lane];
        }
    }
    return bound_reached_by(k, maxima, lanes);
}

/* Ascending positions of those that reach the bound; returns how many. */
static int64_t find_reaching(const int32_t *magnitudes, int64_t size, int32_t bound, int32_t *positions) {
    uint8_t reaches[LONGEST_GROUP + 8];
    for (int64_t i = 0; i < size; i++)
        reaches[i] = magnitudes[i] >= bound;
    __builtin_memset(reaches + size, 0, 8);
    int64_t count = 0;
    for (int64_t start = 0; start < size; start += 8) {
        uint64_t eight;
        __builtin_memcpy(&eight, reaches + start, 8);
        for (; eight; eight &= eight - 1)
            positions[count++] = (int32_t)(start + (__builtin_ctzll(eight) >> 3));
    }
    return count;
}

static void select_group(const int32_t *x, int64_t size, int64_t k, int64_t start, int64_t *selected) {
    int32_t magnitudes[LONGEST_GROUP], positions[LONGEST_GROUP], candidates[LONGEST_GROUP];
    for (int64_t i = 0; i < size; i++)
        magnitudes[i] = magnitude(x[i]);
    int64_t count = find_reaching(magnitudes, size, lower_bound(magnitudes, size, k), positions);
    for (int64_t i = 0; i < count; i++)
        candidates[i] = magnitudes[positions[i]];
    int32_t smallest = count > k ? bound_reached_by(k, candidates, count) : 0;
    int64_t room = k;
    for (int64_t i = 0; i < count; i++)
        room -= candidates[i] > smallest;
    for (int64_t i = 0; i < count; i++) {
        int tied = candidates[i] == smallest;
        if (candidates[i] > smallest || (tied && room-- > 0))
            *selected++ = start + positions[i];
    }
}

/* x: fp32 [numel]; selected: [k per whole group, k_last in a shorter last one]; group_size at most LONGEST_GROUP. */
void select_groups(const int32_t *x, int64_t numel, int64_t group_size, int64_t k, int64_t k_last, int64_t *selected) {
    int64_t start = 0;
    for (; numel - start >= group_size; start += group_size, selected += k)
        select_group(x + start, group_size, k, start, selected);
    if (start < numel)
        select_group(x + start, numel - start, k_last, start, selected);
}

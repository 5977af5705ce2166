/* Number and positions of the elements of x, fp32 [numel], whose magnitude has bits >= bound, at most INFINITE. */
#include "magnitude.h"

int64_t count_reaching(const int32_t *x, int64_t numel, int32_t bound) {
    int64_t count = 0;
    for (int64_t i = 0; i < numel; i++)
        count += (x[i] & 0x7fffffff) >= bound;
    return count;
}

/* Writes positions, int64 [capacity], ascending. Returns their number; if it exceeds `capacity`, some are missing. */
int64_t find_reaching(const int32_t *x, int64_t numel, int32_t bound, int64_t capacity, int64_t *positions) {
    int64_t count = 0;
    for (int64_t start = 0; start < numel; start += 64) {
        prefetch_ahead(x + start);
        uint64_t mask = reaching_mask_64(x + start, numel - start, bound);
        if (count + __builtin_popcountll(mask) > capacity)
            return count + count_reaching(x + start, numel - start, bound);
        for (; mask; mask &= mask - 1)
            positions[count++] = start + __builtin_ctzll(mask);
    }
    return count;
}

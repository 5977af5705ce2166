/* Which elements' magnitudes reach a bound: how many, and where. The bound is a magnitude, at most INFINITE. */
#include "magnitude.h"

int64_t count_reaching(const int32_t *x, int64_t numel, int32_t bound) {
    int64_t count = 0;
    for (int64_t i = 0; i < numel; i++)
        count += (x[i] & 0x7fffffff) >= bound;
    return count;
}

/* positions: int64 [room], ascending. Returns how many there are; where they are more than `room`, some are missing. */
int64_t find_reaching(const int32_t *x, int64_t numel, int32_t bound, int64_t room, int64_t *positions) {
    int64_t count = 0;
    for (int64_t start = 0; start < numel; start += 64) {
        fetch_ahead(x + start);
        uint64_t mask = reaching_of_64(x + start, numel - start, bound);
        if (count + __builtin_popcountll(mask) > room)
            return count + count_reaching(x + start, numel - start, bound);
        for (; mask; mask &= mask - 1)
            positions[count++] = start + __builtin_ctzll(mask);
    }
    return count;
}

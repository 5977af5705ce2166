/* Positions drawn without replacement: the first `count` distinct ones that a key's random numbers name. */
#include "drawing.h"
#include "set_bits.h"

#define FEW 32 /* words: most are empty where few positions are drawn, and are passed over together */

/* Bit j says whether word j of a few has any bit set. */
static inline uint64_t occupied(const uint64_t *words, int64_t num_words) {
    uint64_t any = 0;
    for (int64_t j = 0; j < num_words; j++)
        any |= (uint64_t)(words[j] != 0) << j;
    return any;
}

/* Writes `count` ascending positions below `numel`; where more than half are asked for, those not drawn. */
void draw_positions(int64_t numel, int64_t count, uint64_t key, uint64_t *marks, int64_t *positions) {
    int64_t num_words = (numel + 63) / 64, found = 0;
    int others = count > numel / 2;
    draw((uint32_t)numel, others ? numel - count : count, key, marks);
    if (others) {
        for (int64_t i = 0; i < num_words; i++)
            marks[i] = ~marks[i];
        if (numel % 64)
            marks[num_words - 1] &= (1ull << numel % 64) - 1;
    }
    for (int64_t first = 0; first < num_words; first += FEW) {
        int whole = num_words - first >= FEW;
        uint64_t left = whole ? occupied(marks + first, FEW) : occupied(marks + first, num_words - first);
        for (; left; left &= left - 1) {
            int64_t at = first + __builtin_ctzll(left);
            found = write_set_bits(marks[at], 64 * at, count, found, positions);
        }
    }
}

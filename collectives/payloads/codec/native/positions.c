/* Positions drawn without replacement: the first `count` distinct ones that a key's random numbers select. */
#include "drawing.h"
#include "set_bits.h"

#define WORDS_AT_ONCE 32 /* words tested together, without branches: if few positions are drawn, most words are zero */

/* Returns a bitmask: bit j is set if word j is not zero. */
static inline uint64_t nonzero_words(const uint64_t *words, int64_t num_words) {
    uint64_t mask = 0;
    for (int64_t j = 0; j < num_words; j++)
        mask |= (uint64_t)(words[j] != 0) << j;
    return mask;
}

/* Writes a random set of positions below `numel`, int64 [count], ascending. marks: uint64 [ceil(numel / 64)], zeros,
   overwritten. If `count` is more than half of `numel`, the positions to leave out are drawn. */
void draw_positions(int64_t numel, int64_t count, uint64_t key, uint64_t *marks, int64_t *positions) {
    int64_t num_words = (numel + 63) / 64, found = 0;
    int complement = count > numel / 2;
    draw_distinct((uint32_t)numel, complement ? numel - count : count, key, marks);
    if (complement) {
        for (int64_t i = 0; i < num_words; i++)
            marks[i] = ~marks[i];
        if (numel % 64)
            marks[num_words - 1] &= (1ull << numel % 64) - 1;
    }
    for (int64_t first = 0; first < num_words; first += WORDS_AT_ONCE) {
        int is_whole = num_words - first >= WORDS_AT_ONCE;
        uint64_t pending =
            is_whole ? nonzero_words(marks + first, WORDS_AT_ONCE) : nonzero_words(marks + first, num_words - first);
        for (; pending; pending &= pending - 1) {
            int64_t word = first + __builtin_ctzll(pending);
            found = write_set_bits(marks[word], 64 * word, count, found, positions);
        }
    }
}

/* Positions drawn without replacement: the first `count` distinct ones that a key's random numbers name. */
#include "philox.h"
#include "set_bits.h"

/* `marks` [ceil(numel / 64)], zeros at first, has a bit for every element; afterwards those of the drawn are set. */
static void draw(uint32_t numel, int64_t count, uint64_t key, uint64_t *marks) {
    if (!count)
        return;
    uint32_t unfair = (uint32_t)((1ull << 32) % numel); /* so many of 2^32 numbers are too many to be shared out */
    uint32_t numbers[2][STRETCH];
    random_stretch(key, 0, numbers[0]);
    for (int64_t stretch = 0; count; stretch++) {
        uint32_t *now = numbers[stretch % 2], *next = numbers[(stretch + 1) % 2];
        random_stretch(key, stretch + 1, next);
        for (int i = 0; i < STRETCH && count; i++) {
            __builtin_prefetch(marks + ((uint64_t)next[i] * numel >> 38), 1);
            uint64_t product = (uint64_t)now[i] * numel, position = product >> 32;
            uint64_t is_new = ((uint32_t)product >= unfair) & ~(marks[position >> 6] >> (position & 63));
            marks[position >> 6] |= is_new << (position & 63);
            count -= (int64_t)is_new;
        }
    }
}

/* Writes `count` ascending positions below `numel`; where more than half are asked for, those not drawn. */
void draw_positions(int64_t numel, int64_t count, uint64_t key, uint64_t *marks, int64_t *positions) {
    int others = count > numel / 2;
    int64_t found = 0;
    draw((uint32_t)numel, others ? numel - count : count, key, marks);
    for (int64_t start = 0; start < numel; start += 64) {
        uint64_t left = marks[start / 64];
        if (others)
            left = ~left & (numel - start < 64 ? (1ull << (numel - start)) - 1 : ~0ull);
        found = write_set_bits(left, start, count, found, positions);
    }
}

/* Conversion of ascending positions to and from bitmaps, and validation of received positions. */
#include "bits.h"

/* Sets bit (positions[i] >> shift) + i * per_index of packed, uint8 [ceil(num_bits / 8)], initially zeros; per_index is
   0 for a bitmap, 1 for the unary high parts of Elias-Fano. Skips bits >= num_bits. Returns whether there were none. */
int64_t mark_bits(
    const int64_t *positions, int64_t count, int64_t shift, int64_t per_index, int64_t num_bits, uint8_t *packed) {
    int64_t outside = 0;
    for (int64_t i = 0; i < count; i++) {
        int64_t bit = (positions[i] >> shift) + i * per_index;
        if (bit < 0 || bit >= num_bits)
            outside = 1;
        else
            packed[bit >> 3] |= (uint8_t)(1 << (bit & 7));
    }
    return !outside;
}

/* Inverse of `mark_bits`: decodes the first `count` set bits into positions, int64 [count]: ((bit - i * per_index) <<
   shift) | low part i. low_parts: packed codes of `shift` bits each. Returns the number of set bits. */
int64_t find_bits(
    const uint8_t *packed, int64_t num_bits, int64_t count, int64_t shift, int64_t per_index, const uint8_t *low_parts,
    int64_t *positions) {
    int64_t found = 0, nbytes = (num_bits + 7) / 8;
    unpack_codes(low_parts, count, shift, positions);
    for (int64_t byte = 0; byte < nbytes; byte += 8) {
        uint64_t word = 0;
        if (nbytes - byte >= 8)
            __builtin_memcpy(&word, packed + byte, 8);
        else
            __builtin_memcpy(&word, packed + byte, (uint64_t)(nbytes - byte));
        if (num_bits - 8 * byte < 64)
            word &= (1ull << (num_bits - 8 * byte)) - 1;
        int64_t first = 8 * byte, after = found + __builtin_popcountll(word), stop = after < count ? after : count;
        for (int64_t i = found; i < stop; i++, word &= word - 1)
            positions[i] |= (first + __builtin_ctzll(word) - i * per_index) << shift;
        found = after;
    }
    return found;
}

/* Returns whether positions, int64 [count], ascend strictly within 0..universe-1. */
int64_t ascends(const int64_t *positions, int64_t count, int64_t universe) {
    int64_t bad = 0;
    for (int64_t i = 1; i < count; i++)
        bad |= positions[i] <= positions[i - 1];
    return !count || (!bad && positions[0] >= 0 && positions[count - 1] < universe);
}

/* Turns indices within groups, int64 [count], into positions: adds group_size * (i / k) to entry i. Returns whether all
   indices lie within their groups. */
int64_t add_group_starts(int64_t *positions, int64_t count, int64_t group_size, int64_t k) {
    int64_t outside = 0;
    for (int64_t first = 0, start = 0; first < count; first += k, start += group_size)
        for (int64_t i = first; i < first + k && i < count; i++) {
            outside |= positions[i] < 0 || positions[i] >= group_size;
            positions[i] += start;
        }
    return !outside;
}

/* Does the work of `unpack_groups` for `in_fours` codes, four at a time. k is at least 4, so that four codes lie in at
   most two groups. Returns whether all indices lie within their groups. */
static inline int64_t unpack_groups_in_fours(
    const uint8_t *packed, int64_t in_fours, int64_t bits, int64_t group_size, int64_t k, int32_t *indices,
    int64_t *positions) {
    typedef int32_t indices_4 __attribute__((vector_size(16)));
    codes_4 rank_in_group = {0, 1, 2, 3}, group_start = {0}, outside = {0};
    for (int64_t i = 0; i < in_fours; i += 4) {
        codes_4 codes = four_codes_at(packed, i, bits), four_positions = group_start + codes;
        indices_4 narrow = __builtin_convertvector(codes, indices_4);
        __builtin_memcpy(indices + i, &narrow, sizeof narrow);
        __builtin_memcpy(positions + i, &four_positions, sizeof four_positions);
        outside |= codes >= group_size;
        rank_in_group += 4;
        codes_4 in_next_group = rank_in_group >= k;
        group_start += in_next_group & group_size;
        rank_in_group -= in_next_group & k;
    }
    return !(outside[0] | outside[1] | outside[2] | outside[3]);
}

/* Unpacks codes of `bits` bits, k per group: indices, int32 [count], within groups, and their positions, int64 [count].
   Returns whether indices lie within their groups and positions ascend strictly below `numel`. */
int64_t unpack_groups(
    const uint8_t *packed, int64_t count, int64_t bits, int64_t group_size, int64_t k, int64_t numel, int32_t *indices,
    int64_t *positions) {
    int64_t nbytes = (count * bits + 7) / 8, in_fours = k < 4 ? 0 : num_in_fours(count, nbytes, bits);
    int64_t inside = unpack_groups_in_fours(packed, in_fours, bits, group_size, k, indices, positions);
    for (int64_t i = in_fours; i < count; i++) {
        indices[i] = (int32_t)code_at(packed, nbytes, i, bits);
        positions[i] = i / k * group_size + indices[i];
        inside &= indices[i] < group_size;
    }
    return inside && ascends(positions, count, numel);
}

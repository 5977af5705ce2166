/* Ascending positions from and to bitmaps, and what must be true of those that were received. */
#include "bits.h"

/* Sets bit (positions[i] >> shift) + i * per_index of `packed`, zeros at first: a bitmap of the positions, or with
   per_index = 1 their high parts in unary. Returns whether all bits lay within `num_bits`; others are left out. */
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

/* The inverse, for the first `count` bits set: (bit - i * per_index) << shift, joined with the low part, of `shift` bits
   each in `low_parts`. Returns how many bits are set. */
int64_t find_bits(
    const uint8_t *packed, int64_t num_bits, int64_t count, int64_t shift, int64_t per_index, const uint8_t *low_parts,
    int64_t *positions) {
    int64_t found = 0, nbytes = (num_bits + 7) / 8;
    unpack_codes(low_parts, count, shift, positions);
    for (int64_t byte = 0; byte < nbytes; byte += 8) {
        uint64_t left = 0;
        if (nbytes - byte >= 8)
            __builtin_memcpy(&left, packed + byte, 8);
        else
            __builtin_memcpy(&left, packed + byte, (uint64_t)(nbytes - byte));
        if (num_bits - 8 * byte < 64)
            left &= (1ull << (num_bits - 8 * byte)) - 1;
        int64_t first = 8 * byte, after = found + __builtin_popcountll(left), stop = after < count ? after : count;
        for (int64_t i = found; i < stop; i++, left &= left - 1)
            positions[i] |= (first + __builtin_ctzll(left) - i * per_index) << shift;
        found = after;
    }
    return found;
}

/* Whether they ascend strictly within 0..universe-1. */
int64_t ascends(const int64_t *positions, int64_t count, int64_t universe) {
    int64_t bad = 0;
    for (int64_t i = 1; i < count; i++)
        bad |= positions[i] <= positions[i - 1];
    return !count || (!bad && positions[0] >= 0 && positions[count - 1] < universe);
}

/* positions[i] += group_size * (i / k), indices within groups before. Returns whether all lay within their group. */
int64_t add_group_starts(int64_t *positions, int64_t count, int64_t group_size, int64_t k) {
    int64_t outside = 0;
    for (int64_t first = 0, start = 0; first < count; first += k, start += group_size)
        for (int64_t i = first; i < first + k && i < count; i++) {
            outside |= positions[i] < 0 || positions[i] >= group_size;
            positions[i] += start;
        }
    return !outside;
}

/* Indices within groups of k, as many as `in_fours` says, and the positions that they are; k at least 4, so that four
   of them lie in two groups at most. Returns whether all lie within their group. */
static inline int64_t unpack_groups_in_fours(
    const uint8_t *packed, int64_t in_fours, int64_t bits, int64_t group_size, int64_t k, int32_t *indices,
    int64_t *positions) {
    typedef int32_t indices_4 __attribute__((vector_size(16)));
    codes_4 place = {0, 1, 2, 3}, start = {0}, outside = {0}; /* place in its group; where that starts */
    for (int64_t i = 0; i < in_fours; i += 4) {
        codes_4 codes = four_codes_at(packed, i, bits), there = start + codes;
        indices_4 narrow = __builtin_convertvector(codes, indices_4);
        __builtin_memcpy(indices + i, &narrow, sizeof narrow);
        __builtin_memcpy(positions + i, &there, sizeof there);
        outside |= codes >= group_size;
        place += 4;
        codes_4 in_next = place >= k;
        start += in_next & group_size;
        place -= in_next & k;
    }
    return !(outside[0] | outside[1] | outside[2] | outside[3]);
}

/* Indices within groups of k from their bits, and the positions that they are. Returns whether all ascend within their
   group, and below `numel`. */
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

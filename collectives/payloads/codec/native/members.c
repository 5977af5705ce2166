/* Packs a message with the sparse payloads of several tensors. */
#include <stdint.h>

#define HEADER 16

void pack_bits(const int64_t *codes, int64_t count, int64_t bits, uint8_t *packed);
int64_t mark_bits(
    const int64_t *positions, int64_t count, int64_t shift, int64_t per_index, int64_t num_bits, uint8_t *packed);

/* Layout of one payload in the message. values, low, marks, end: offsets in bytes of the values, the low parts of
   positions, the bitmap or unary code, and the end. low_bits: bits of a low part. num_marks, per_position: `num_bits`
   and `per_index` of `mark_bits`. wide: nonzero if all elements of the tensor are sent, without positions. */
struct member {
    uint8_t header[HEADER];
    int64_t count, values, low, marks, end, low_bits, num_marks, per_position, wide;
};

/* Writes all payloads to `message`. positions, int64, and values, `width` bytes each: those of all payloads, one after
   another. Returns whether all positions fit into the bits of their payloads. */
int64_t pack_members(
    const struct member *members, int64_t num_members, const int64_t *positions, const uint8_t *values, int64_t width,
    uint8_t *message) {
    int64_t inside = 1;
    for (const struct member *member = members; member < members + num_members; message += member++->end) {
        uint64_t nbytes = (uint64_t)(member->count * width);
        __builtin_memcpy(message, member->header, HEADER);
        __builtin_memset(message + HEADER, 0, (uint64_t)(member->end - HEADER));
        if (member->wide)
            for (int64_t i = 0; i < member->count; i++) {
                int64_t start = member->values + positions[i] * width;
                if (positions[i] < 0 || start + width > member->end)
                    inside = 0;
                else
                    __builtin_memcpy(message + start, values + i * width, (uint64_t)width);
            }
        else
            __builtin_memcpy(message + member->values, values, nbytes);
        if (member->low_bits)
            pack_bits(positions, member->count, member->low_bits, message + member->low);
        if (member->num_marks)
            inside &= mark_bits(
                positions, member->count, member->per_position * member->low_bits, member->per_position,
                member->num_marks, message + member->marks);
        positions += member->count;
        values += nbytes;
    }
    return inside;
}

/* Sparse payloads of several tensors, one after another in one message. */
#include <stdint.h>

#define HEADER 16

void pack_bits(const int64_t *codes, int64_t count, int64_t bits, uint8_t *packed);
int64_t mark_bits(
    const int64_t *positions, int64_t count, int64_t shift, int64_t per_index, int64_t num_bits, uint8_t *packed);

/* A payload of `count` entries: its header, where in it the fields begin, and how positions are written: the low
   `low_bits` of each, and marks in `num_marks` bits, with the `per_position` of `mark_bits`. `wide`: all elements are
   sent instead. */
struct member {
    uint8_t header[HEADER];
    int64_t count, values, low, marks, end, low_bits, num_marks, per_position, wide;
};

/* positions and values: of all members, one after another; `width`: bytes of a value. Returns whether all positions
   lay within their bits. */
int64_t pack_members(
    const struct member *members, int64_t num_members, const int64_t *positions, const uint8_t *values, int64_t width,
    uint8_t *message) {
    int64_t inside = 1;
    for (const struct member *from = members; from < members + num_members; message += from++->end) {
        uint64_t nbytes = (uint64_t)(from->count * width);
        __builtin_memcpy(message, from->header, HEADER);
        __builtin_memset(message + HEADER, 0, (uint64_t)(from->end - HEADER));
        if (from->wide)
            for (int64_t i = 0; i < from->count; i++)
                __builtin_memcpy(message + from->values + positions[i] * width, values + i * width, (uint64_t)width);
        else
            __builtin_memcpy(message + from->values, values, nbytes);
        if (from->low_bits)
            pack_bits(positions, from->count, from->low_bits, message + from->low);
        if (from->num_marks)
            inside &= mark_bits(
                positions, from->count, from->per_position * from->low_bits, from->per_position, from->num_marks,
                message + from->marks);
        positions += from->count;
        values += nbytes;
    }
    return inside;
}

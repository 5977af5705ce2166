/* Eight magnitudes in a geometric row: products in fp64, one after the other, rounded to fp32. */
#ifndef GEOMETRIC_H
#define GEOMETRIC_H

#define NUM_LEVELS 8
#define NEGATIVE 8 /* in a code of four bits, beside the number of the magnitude */

static inline void geometric_row(double low, double ratio, double *row) {
    double largest = 0x1.fffffep127;
    row[0] = low;
    for (int j = 1; j < NUM_LEVELS; j++) {
        double next = row[j - 1] * ratio;
        row[j] = next < largest ? next : largest;
    }
}

#endif

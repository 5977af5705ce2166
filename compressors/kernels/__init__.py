"""Selection, quantisation and random numbers: loops over elements that compressors share."""

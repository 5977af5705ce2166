/* Identifies the library to the loader. */

#ifndef SOURCES
#define SOURCES ""
#endif

/* Returns the digest of the sources from which this library was compiled, a C string. */
const char *sources_digest(void) { return SOURCES; }
